"""Measures `hotloop run` on scripts beside plain python: times, exit codes and output.

    python -m bench.run_scripts --sources FOLDER --calibrate                                 measures lengths for --seconds
    python -m bench.run_scripts --sources FOLDER --seconds 60 --pairs 1 --beside --record    the public scripts
    python -m bench.run_scripts --sources FOLDER --seconds 15 --numbers                      their printed numbers
    python -m bench.run_scripts train.py "other.py --epochs 3" --pairs 3                     scripts of your own
    python -m bench.run_scripts "bench/small_training.py adam 90000" --only mnist --pairs 6 --record run-scripts-cost

`bench/public_scripts/list.toml` lists the public scripts. Their repositories are fetched into FOLDER/OWNER/NAME unless they are
there. reinforce and actor_critic need the package gymnasium, time_sequence matplotlib, makemore tensorboard, and super_resolution
six. `--calibrate` runs each script twice for some seconds and writes FOLDER/lengths.json.

The two runs of a pair follow each other in random order. With `--beside` both run at once, each on a core of its own, and again
with the cores exchanged; such a pair has two times of each. The ratio is python's time over hotloop's; the interval is that of
paired runs (95 %, from six pairs on). `cpu_ratio` is that of the user and system time of the process and its children, and
`late_ratio` that of an update in the last third of the updates: see bench/late_steps.

`--numbers` measures no times. Python runs three times with one thread and three times with two threads, and so does hotloop. The
distance of two outputs is the root mean square of the relative differences of their numbers. `spread` is the largest distance of
two outputs of python, and `distance` the largest distance of an output of hotloop from the nearest output of python.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.claim import ROOT, write_claim
from bench.public_scripts.sources import (
    PICTURES,
    STAND_INS,
    Length,
    Measured,
    PublicScript,
    fetch,
    prepare,
    read_list,
)
from hotloop.tuning.races.statistics import ratio_of

_NUMBER = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?")

_LENGTHS = "lengths.json"

_CALIBRATED_PICTURES = 6_000

_FORMS = ("python", "hotloop")

_LATE_STEPS = Path(__file__).with_name("late_steps")
"""A folder for PYTHONPATH, whose `sitecustomize` measures late steps."""


@dataclass(frozen=True)
class Case:
    """A script to measure.

    Attributes:
        name: for the record.
        prepare: writes the script's files into a new folder, or none; returns the working folder, and script and arguments.
        times: patterns of printed times.
        environment: variables of its processes.
    """

    name: str
    prepare: Callable[[Path], tuple[Path, list[str]]]
    times: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The end of one process.

    Attributes:
        cpu_s: user and system time of the process and its children.
        late_cpu_s: CPU time of an update in the last third; None with few updates.
    """

    seconds: float
    cpu_s: float
    late_cpu_s: float | None
    exit_code: int
    stdout: str
    stderr: str
    summary: dict[str, Any] | None


def public_case(script: PublicScript, sources: Path, length: Length) -> Case:
    """Returns a script of the list, in a new copy for each run."""

    def write(folder: Path) -> tuple[Path, list[str]]:
        place = folder / "script"
        return place, prepare(script, sources, place, length.count)

    return Case(script.name, write, script.times, {"FASHION_MNIST_COUNT": str(length.pictures)})


def own_case(command: Path | str) -> Case:
    """Returns a script that runs in its own folder; a text may have arguments after the path."""
    name, *arguments = [str(command)] if isinstance(command, Path) else shlex.split(command)
    path = Path(name).resolve()
    return Case(" ".join([path.stem, *arguments]), lambda _: (path.parent, [str(path), *arguments]))


class Process:
    """One run of a case, which begins at once.

    Args:
        core: the only core that the run may use; None for all.
        threads: of OpenMP; None for the default.
    """

    def __init__(
        self, case: Case, form: str, options: Sequence[str] = (), core: int | None = None, threads: int | None = None
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory()
        folder = Path(self._temporary.name)
        self._late = folder / "late"
        self._late.mkdir()
        place, command = case.prepare(folder)
        self._record = folder / "record.json"
        if form == "hotloop":
            hosted = ["-m", "hotloop", "run", command[0], "--record", str(self._record), *options, "--"]
            command = [*hosted, *command[1:]]
        self._files = [(folder / name).open("w+", encoding="utf-8") for name in ("stdout", "stderr")]
        pinned = [] if core is None else ["taskset", "--cpu-list", str(core)]
        self._began = time.perf_counter()
        self._process = subprocess.Popen(
            [*pinned, sys.executable, *command],
            cwd=place,
            stdout=self._files[0],
            stderr=self._files[1],
            env=_environment(place, threads) | dict(case.environment) | {"LATE_STEPS": str(self._late)},
        )

    def end(self) -> Outcome:
        """Waits for the end; processes that run at once are waited for in threads, so that each time is its own."""
        _, status, used = os.wait4(self._process.pid, 0)
        seconds = time.perf_counter() - self._began
        code = self._process.returncode = os.waitstatus_to_exitcode(status)
        late = [json.loads(path.read_text(encoding="utf-8")) for path in self._late.iterdir()]
        late_cpu_s = max(late, key=lambda one: one["updates"])["late_cpu_s"] if late else None
        texts = [Path(file.name).read_text(encoding="utf-8") for file in self._files]
        for file in self._files:
            file.close()
        summary = json.loads(self._record.read_text(encoding="utf-8")) if self._record.is_file() else None
        self._temporary.cleanup()
        return Outcome(seconds, used.ru_utime + used.ru_stime, late_cpu_s, code, texts[0], texts[1], summary)


def _environment(place: Path, threads: int | None) -> dict[str, str]:
    path = [
        str(STAND_INS),
        str(_LATE_STEPS),
        str(ROOT / "src"),
        str(place),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    fixed = {"PYTHONPATH": os.pathsep.join(path), "PYTHONHASHSEED": "0", "MPLBACKEND": "agg"}
    return dict(os.environ) | fixed | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})


def differences(plain: str, hosted: str, times: Sequence[str] = ()) -> tuple[bool, float, float]:
    """Returns whether the text outside numbers is equal, the largest relative difference of a number, and the distance.

    Args:
        times: patterns of texts that are left out.
    """
    for pattern in times:
        plain, hosted = (re.sub(pattern, "", text, flags=re.MULTILINE) for text in (plain, hosted))
    if _text(plain) != _text(hosted):
        return False, math.inf, math.inf
    pairs = zip(map(float, _NUMBER.findall(plain)), map(float, _NUMBER.findall(hosted)), strict=True)
    found = [abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0 for a, b in pairs]
    distance = math.sqrt(math.fsum(one * one for one in found) / len(found)) if found else 0.0
    return True, max(found, default=0.0), distance


def _text(output: str) -> list[str]:
    """Returns the text between numbers; the width of a number doesn't count."""
    return [" ".join(part.split()) for part in _NUMBER.split(output)]


def measure(case: Case, pairs: int, options: Sequence[str], *, beside: bool = False) -> dict[str, Any]:
    """Returns the times of one script, and the facts of hotloop's last run."""
    order = random.Random(0)
    outcomes: dict[str, list[Outcome]] = {form: [] for form in _FORMS}
    cores = sorted(os.sched_getaffinity(0))[:2]
    for _ in range(pairs):
        if beside:
            for placed in (cores, cores[::-1]):
                both = [Process(case, form, options, core) for form, core in zip(_FORMS, placed, strict=True)]
                for form, outcome in zip(_FORMS, _ends(both), strict=True):
                    outcomes[form].append(outcome)
        else:
            for form in order.sample(_FORMS, 2):
                outcomes[form].append(Process(case, form, options).end())
    plain, hosted = outcomes["python"], outcomes["hotloop"]
    ratio = ratio_of([one.seconds for one in plain], [one.seconds for one in hosted], confidence=0.95)
    same_text, largest, _ = differences(plain[0].stdout, hosted[0].stdout, case.times)
    summary = hosted[-1].summary or {"ratio": None, "parts": [], "notes": []}
    return {
        "script": case.name,
        "python_s": [one.seconds for one in plain],
        "hotloop_s": [one.seconds for one in hosted],
        "ratio": ratio.median,
        "low": ratio.low,
        "high": ratio.high,
        "python_cpu_s": [one.cpu_s for one in plain],
        "hotloop_cpu_s": [one.cpu_s for one in hosted],
        "cpu_ratio": _paired([one.cpu_s for one in plain], [one.cpu_s for one in hosted]),
        "python_late_cpu_s": [one.late_cpu_s for one in plain],
        "hotloop_late_cpu_s": [one.late_cpu_s for one in hosted],
        "late_ratio": _paired([one.late_cpu_s for one in plain], [one.late_cpu_s for one in hosted]),
        "exit_codes": sorted({one.exit_code for one in plain}),
        "exit_codes_equal": {one.exit_code for one in plain} == {one.exit_code for one in hosted},
        "stdout_equal": plain[0].stdout == hosted[0].stdout,
        "text_equal": same_text,
        "largest_difference": largest if math.isfinite(largest) else None,
        "step_ratio": summary["ratio"],
        "exchanged": [_line(part, part["exchange"]) for part in summary["parts"] if part["used"]],
        "not_exchanged": [_line(part, part["reason"]) for part in summary["parts"] if not part["used"]],
        "notes": summary["notes"],
    }


def _paired(plain: Sequence[float | None], hosted: Sequence[float | None]) -> dict[str, float | None] | None:
    """Returns python's seconds over hotloop's, as median and interval; None if a run has none."""
    known = [(one, other) for one, other in zip(plain, hosted, strict=True) if one and other]
    if len(known) < len(plain):
        return None
    found = ratio_of([one for one, _ in known], [other for _, other in known], confidence=0.95)
    return {"median": found.median, "low": found.low, "high": found.high}


def _ends(processes: Sequence[Process]) -> list[Outcome]:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(Process.end, processes))


def _line(part: dict[str, Any], last: str) -> str:
    return f"{part['kind']}: {part['name']}: {last}"


def compare_numbers(case: Case, options: Sequence[str], runs: int = 3) -> dict[str, Any]:
    """Returns how far hotloop's printed numbers are from python's, beside python's own spread over 1 and 2 threads."""
    outcomes: dict[str, list[Outcome]] = {form: [] for form in _FORMS}
    for form, threads, _ in itertools.product(_FORMS, (1, 2), range(runs)):
        outcomes[form].append(Process(case, form, options, threads=threads).end())
    plain, hosted = outcomes["python"], outcomes["hotloop"]

    def distance(one: Outcome, other: Outcome) -> float:
        return differences(one.stdout, other.stdout, case.times)[2]

    spread = max(distance(one, other) for one, other in itertools.combinations(plain, 2))
    distances = [min(distance(one, other) for other in plain) for one in hosted]
    finite = [value for value in distances if math.isfinite(value)]
    return {
        "script": case.name,
        "exit_codes_equal": {one.exit_code for one in plain} == {one.exit_code for one in hosted},
        "text_equal": len(finite) == len(distances),
        "python_text_equal": math.isfinite(spread),
        "spread": spread if math.isfinite(spread) else None,
        "distance": max(finite, default=None),
        "within": max(distances) <= spread,
        "exchanged": sorted(
            {
                _line(part, part["exchange"])
                for one in hosted
                if one.summary
                for part in one.summary["parts"]
                if part["used"]
            }
        ),
    }


def geometric_mean(ratios: Sequence[float]) -> float | None:
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios else None


def _cases(arguments: argparse.Namespace) -> list[Case]:
    own = [own_case(command) for command in arguments.scripts]
    if own and not arguments.only:
        return own
    listed = _listed(arguments)
    lengths = _read_lengths(arguments.sources)
    return own + [
        public_case(script, arguments.sources, script.length(arguments.seconds, lengths.get(script.name)))
        for script in listed
    ]


def _listed(arguments: argparse.Namespace) -> list[PublicScript]:
    listed = [script for script in read_list() if not arguments.only or script.name in arguments.only]
    fetch(listed, arguments.sources)
    return listed


def _read_lengths(folder: Path) -> dict[str, Measured]:
    path = folder / _LENGTHS
    stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {name: Measured(*values) for name, values in stored.items()}


def calibrate(scripts: Sequence[PublicScript], folder: Path) -> None:
    """Measures start and length of scripts under python, and writes them after each script."""
    for script in scripts:
        share = _CALIBRATED_PICTURES / PICTURES if script.pictures else 1.0
        first = 1 if script.pictures else max(1, round(script.per_minute / 30))
        lengths = [Length(count, _CALIBRATED_PICTURES) for count in (first, 5 * first)]
        short, long = (Process(public_case(script, folder, length), "python").end() for length in lengths)
        if short.exit_code or long.exit_code:
            raise SystemExit(f"{script.name} ended with {short.exit_code} and {long.exit_code}: {long.stderr[-500:]}")
        count_s = (long.seconds - short.seconds) / (4 * first)
        if count_s <= 0:
            print(script.name, "is not measured: the longer run took less time", flush=True)
            continue
        measured = Measured(max(0.0, short.seconds - first * count_s), count_s / share)
        print(script.name, measured, flush=True)
        known = {**_read_lengths(folder), script.name: measured}
        (folder / _LENGTHS).write_text(json.dumps(known, indent=2), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", help="scripts of your own; without them, or with --only, public ones")
    parser.add_argument(
        "--sources", type=Path, default=Path(".bench/public_scripts"), help="folder of the repositories"
    )
    parser.add_argument("--only", nargs="+", help="names of public scripts")
    parser.add_argument("--seconds", type=float, default=60.0, help="wanted length of a run (default: 60)")
    parser.add_argument("--calibrate", action="store_true", help="measure the lengths of the public scripts, and end")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--beside", action="store_true", help="run both at once, on a core each")
    parser.add_argument("--numbers", action="store_true", help="compare printed numbers instead of times")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--record", nargs="?", const="run-scripts", metavar="NAME", help="write a claim (run-scripts)")
    arguments = parser.parse_args()
    if arguments.calibrate:
        calibrate(_listed(arguments), arguments.sources)
        return
    options = ["--exact"] if arguments.exact else []
    rows = list[dict[str, Any]]()
    for case in _cases(arguments):
        if arguments.numbers:
            row = compare_numbers(case, options)
        else:
            row = measure(case, arguments.pairs, options, beside=arguments.beside)
        rows.append(row)
        print(json.dumps(row), flush=True)
    figures: dict[str, Any] = {"scripts": rows}
    if not arguments.numbers:
        exchanged = [row["ratio"] for row in rows if row["exchanged"]]
        figures["geometric_mean"] = geometric_mean([row["ratio"] for row in rows])
        figures["geometric_mean_with_exchange"] = geometric_mean(exchanged)
    print(json.dumps({name: value for name, value in figures.items() if name != "scripts"}))
    if arguments.record:
        name = f"{arguments.record}-numbers" if arguments.numbers else arguments.record
        print(write_claim(name, f"python -m bench.run_scripts {' '.join(sys.argv[1:])}", None, figures))


if __name__ == "__main__":
    main()
