"""Measures whether an edit makes the steps of a training script faster.

    OMP_NUM_THREADS=1 python -m bench.script_pairs main.py edited.py --updates 40 -- --epochs 1
    OMP_NUM_THREADS=1 python -m bench.script_pairs switched.py -- --epochs 1

The second form runs one process. The script does its edit where the built-in name `EDITED` is true, and `EDITED` changes after
steps, so that neighbouring steps form a pair. Two processes of the same script differ by up to a tenth on some machines, so
small gains need this form. The first form runs both scripts in two processes and serves edits that need another start.

In the first form, while one script runs through a window of `--updates` optimizer
steps, the other script and its workers are stopped (SIGSTOP). The same steps of both scripts form a pair. A ratio above 1
means that the edited script is faster: `ratio` of whole windows, `regular` of their median steps, which leaves out what a
script does between some of its steps only.
"""

from __future__ import annotations

import argparse
import builtins
import json
import os
import runpy
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.claim import ROOT
from hotloop.tuning.races.statistics import ratio_of

SWITCH = "EDITED"
"""The built-in name by which a script with both forms knows which one a step has."""

WARM_UP = 5
"""Pairs of steps that are left out at the start."""

SKIPPED_WINDOWS = 1
"""Windows of each script before the first pair: the first steps allocate memory and start workers."""


def host(report: Path, updates: int, every: int, script: str) -> None:
    """Runs a script in this process and stops the process group after each window.

    Args:
        report: receives one line per window: the seconds of each step after the window's first one.
        updates: optimizer steps of a window.
        every: optimizer steps of which one ends a step of the training; a GAN has several.
    """
    ends = list[float]()

    def step_ended() -> None:
        ends.append(time.perf_counter())
        if len(ends) > updates:
            with report.open("a") as file:
                file.write(json.dumps([after - before for before, after in pairwise(ends)]) + "\n")
            ends.clear()
            os.killpg(0, signal.SIGSTOP)

    os.killpg(0, signal.SIGSTOP)  # until the first window
    _run(script, every, step_ended)


def host_switched(report: Path, steps: int, every: int, script: str) -> None:
    """Runs a script in this process, with `EDITED` true in one step of each pair of steps; then ends the process.

    Args:
        report: receives the pairs of seconds, original and edited.
        steps: pairs to measure, after `WARM_UP` pairs.
        every: optimizer steps of which one ends a step of the training.
    """
    ends = list[float]()

    def step_ended() -> None:
        ends.append(time.perf_counter())
        step = len(ends) - 1
        setattr(builtins, SWITCH, _is_edited(step))
        if step == 2 * (steps + WARM_UP):
            times = [after - before for before, after in pairwise(ends)]
            pairs = [
                sorted(zip(map(_is_edited, (at, at + 1)), times[at : at + 2], strict=True))
                for at in range(2 * WARM_UP, len(times), 2)
            ]
            report.write_text(json.dumps([[before, after] for (_, before), (_, after) in pairs]))
            os._exit(0)

    setattr(builtins, SWITCH, False)
    _run(script, every, step_ended)


def _run(script: str, every: int, step_ended: Callable[[], None]) -> None:
    """Runs a script as the main program and calls `step_ended` after each training step."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    count = 0

    def updated(*_: Any) -> None:
        nonlocal count
        count += 1
        if count % every == 0:
            step_ended()

    register_optimizer_step_post_hook(updated)
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def _is_edited(step: int) -> bool:
    """Both orders of a pair occur equally often (sequence of Thue and Morse)."""
    return step.bit_count() % 2 == 1


def compare_switched(script: Path, arguments: list[str], folder: Path, steps: int, every: int) -> dict[str, Any]:
    """Runs the script in a process of its own and returns the ratio of its pairs."""
    report = folder / "switched.json"
    report.unlink(missing_ok=True)
    with (folder / "switched.log").open("w") as log:
        subprocess.run(
            _command("host_switched", report, steps, every, script, arguments),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if not report.exists():
        return {"pairs": 0}
    pairs = [([before], [after]) for before, after in json.loads(report.read_text())]
    return {"pairs": len(pairs), "ratio": _ratio(pairs, sum)}


def _command(function: str, report: Path, steps: int, every: int, script: Path, arguments: list[str]) -> list[str]:
    code = (
        f"import sys; sys.path.append({str(ROOT)!r}); from pathlib import Path; from bench.script_pairs import {function}; "
        f"sys.argv = {[str(script), *arguments]!r}; {function}(Path({str(report)!r}), {steps}, {every}, {str(script)!r})"
    )
    return [sys.executable, "-P", "-c", code]  # -P: a script's folder may have a bench.py


class Side:
    """A script in a process group of its own, which runs only while `window` waits for it."""

    def __init__(self, script: Path, arguments: list[str], folder: Path, name: str, updates: int, every: int) -> None:
        self.report = folder / f"{name}.txt"
        self.report.unlink(missing_ok=True)
        with (folder / f"{name}.log").open("w") as log:
            self.process = subprocess.Popen(
                _command("host", self.report, updates, every, script, arguments),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        os.waitpid(self.process.pid, os.WUNTRACED)

    def window(self) -> list[float] | None:
        """Runs one window and returns the seconds of its steps; None after the script's end."""
        before = self._windows()
        os.killpg(self.process.pid, signal.SIGCONT)
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            self.process.returncode = os.waitstatus_to_exitcode(status)
            return None
        windows = self._windows()
        return windows[-1] if len(windows) > len(before) else None

    def end(self) -> None:
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _windows(self) -> list[list[float]]:
        return [json.loads(line) for line in self.report.read_text().splitlines()] if self.report.exists() else []


def compare(original: Side, edited: Side, limit_s: float) -> dict[str, Any]:
    """Alternates windows until the time limit or the end of one script; the order of a pair alternates, too."""
    pairs: list[tuple[list[float], list[float]]] = []
    end, skipped = time.monotonic() + limit_s, SKIPPED_WINDOWS
    try:
        while time.monotonic() < end:
            sides = (original, edited) if len(pairs) % 2 else (edited, original)
            steps = {id(side): side.window() for side in sides}
            if None in steps.values():
                break
            if skipped:
                skipped -= 1
                continue
            pairs.append((steps[id(original)] or [], steps[id(edited)] or []))
    finally:
        original.end()
        edited.end()
    if not pairs:
        return {"pairs": 0}
    return {"pairs": len(pairs), "ratio": _ratio(pairs, sum), "regular": _ratio(pairs, statistics.median)}


def _ratio(pairs: Sequence[tuple[list[float], list[float]]], of: Callable[[list[float]], float]) -> dict[str, Any]:
    """The median over the pairs with its 95 % interval, and the total seconds of both sides."""
    before, after = ([of(steps) for steps in side] for side in zip(*pairs, strict=True))
    found = ratio_of(before, after, confidence=0.95)
    values = {
        "median": found.median,
        "low": found.low,
        "high": found.high,
        "before_s": sum(before),
        "after_s": sum(after),
    }
    return {name: value and round(value, 4) for name, value in values.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("original", type=Path)
    parser.add_argument("edited", type=Path, nargs="?", help="without it, the original has an edit for `EDITED`")
    parser.add_argument("--updates", type=int, default=20, help="steps of a window (default: 20), or pairs of steps")
    parser.add_argument("--every", type=int, default=1, help="optimizer steps of one training step (default: 1)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for all windows (default: 60)")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="for reports and logs of the scripts")
    given = sys.argv[1:]
    split = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:split])
    options.folder.mkdir(parents=True, exist_ok=True)
    rest = given[split + 1 :], options.folder
    if options.edited is None:
        found = compare_switched(options.original, *rest, options.updates, options.every)
    else:
        original, edited = (
            Side(script, *rest, name, options.updates, options.every)
            for script, name in ((options.original, "original"), (options.edited, "edited"))
        )
        found = compare(original, edited, options.limit)
    print(json.dumps(found))
    return 0 if found["pairs"] else 1


if __name__ == "__main__":
    sys.exit(main())
