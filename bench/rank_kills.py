"""Kills and stops processes of real trainings in all modes, at random moments. Takes about 20 minutes on 2 cores.

    OMP_NUM_THREADS=1 python -m bench.rank_kills --folder /tmp/kills                 all runs
    OMP_NUM_THREADS=1 python -m bench.rank_kills --folder /tmp/kills --at-most 8     the next 8 runs; call it again
    OMP_NUM_THREADS=1 python -m bench.rank_kills --folder /tmp/kills --record        the same, and a claim of all runs

Each run is a `hotloop train` with real processes. One of them gets SIGKILL, or SIGSTOP and 30 s later SIGCONT: a rank, the
command, a worker or a server of an asynchronous training, or an actor of Ray. The moment is random: while the processes
start, or at a step. Required is one of these ends:

undisturbed    exit code 0, and State, history and figures are bitwise those of a run without a fault
one line       one error line within the limit of `--rank-timeout`, exit code 1; the run resumes to the same bits
killed         the command itself was killed; the run resumes to the same bits

No process may be left 5 s after the end. `parallel=local` averages at each checkpoint, so a run whose command was killed must
resume and end, with other bits. `parallel=async` must count each sample once in each epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from bench.claim import write_claim
from hotloop.training.run import Run, is_run
from tests.support.processes.process_tree import MARK, left_after, processes_of
from tests.support.processes.resumed_training import disagreements

SAMPLES, EPOCHS, STEPS = 200, 5, 100
TASK = f"""
import time, torch, hotloop
from torch import nn

class Samples(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        self.x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, place):
        time.sleep(0.006)
        return self.x[place], int(self.x[place, :4].argmax())

def model():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

task = hotloop.Task(model=model, loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
                    data=Samples({SAMPLES}, 1), validation=Samples(24, 2), batch_size=10, epochs={EPOCHS})
"""

RANKED = ("data", "sharded", "stages", "tensor", "towers", "local")
AXES = {"stages": ("split=2", "microbatches=2"), "local": ("sync_every=4",)}
STOPPED_S, SHORT_S, LONG_S = 30, 10, 60
"""How long a process is stopped, and limits of `--rank-timeout` below and above this time."""
LEFT_S, END_S = 5.0, 40
"""The most time for the end of the other processes, and for the end of a command after its limit."""
LIMIT_S = 180
"""A command that runs longer after its fault has failed."""
START_S = 600
"""A command that hasn't reached the moment of its fault after this time has failed."""


@dataclass(frozen=True)
class Fault:
    """A signal to one process of a training.

    Attributes:
        mode: a value of `parallel`, and `on Ray` if Ray starts the processes.
        name: of the signal.
        victim: `rank`, `command`, `worker` or `actor`; the command of an asynchronous training is its server.
        timeout_s: the value of `--rank-timeout`.
    """

    mode: str
    name: str
    victim: str
    timeout_s: int = LONG_S


FAULTS = (
    *(
        Fault(mode, name, victim)
        for mode in RANKED
        for name in ("SIGKILL", "SIGSTOP")
        for victim in ("rank", "command")
    ),
    *(Fault(mode, "SIGSTOP", "rank", SHORT_S) for mode in RANKED),
    Fault("data", "SIGSTOP", "command", SHORT_S),
    *(Fault("async", name, victim) for name in ("SIGKILL", "SIGSTOP") for victim in ("worker", "command")),
    *(Fault("async on Ray", name, victim) for name in ("SIGKILL", "SIGSTOP") for victim in ("actor", "command")),
    *(Fault("data on Ray", "SIGKILL", victim) for victim in ("rank", "actor", "command")),
    *(Fault("data on Ray", "SIGSTOP", victim) for victim in ("rank", "actor")),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for runs and rows.jsonl, from which to go on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-most", type=int, help="runs in this call")
    parser.add_argument("--at-once", type=int, default=2, help="runs at the same time")
    parser.add_argument("--record", action="store_true", help="write a claim")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "task.py").write_text(TASK)
    journal = folder / "rows.jsonl"
    rows = [json.loads(line) for line in journal.open()] if journal.is_file() else []
    numbered = list(enumerate(random.Random(options.seed).sample(FAULTS, len(FAULTS))))
    left = [(number, fault) for number, fault in numbered if number not in {row["run"] for row in rows}]
    now = left[: options.at_most]
    with ThreadPoolExecutor(options.at_once) as pool:
        modes = dict.fromkeys(reference(fault.mode) for _, fault in now if not fault.mode.startswith("async"))
        whole = dict(zip(modes, pool.map(partial(undisturbed, folder), modes), strict=True))
        for row in pool.map(lambda one: run_of(folder, *one, options.seed, whole), now):
            rows.append(row)
            print(json.dumps(row), flush=True)
            with journal.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(json.dumps(summary(rows), indent=2))
    if len(left) > len(now):
        print("call it again to go on")
    elif options.record:
        command = f"python -m bench.rank_kills --folder FOLDER --seed {options.seed} --record"
        print(write_claim("rank-kills", command, None, {**summary(rows), "stopped_s": STOPPED_S, "rows": rows}))
    return 1 if any(row["problems"] for row in rows) else 0


def reference(mode: str) -> str:
    """The mode whose undisturbed run has the same bits."""
    return mode.partition(" on ")[0]


def undisturbed(folder: Path, mode: str) -> Path:
    """Trains without a fault; returns the run."""
    own = folder / f"undisturbed {mode}"
    run = own / "run"
    if not (is_run(run) and Run.open(run).final):
        command = Command(own, options_of(Fault(mode, "", ""), run))
        if command.process.wait(LIMIT_S) != 0:
            raise SystemExit(f"the undisturbed run of {mode} failed: {command.output()}")
    return run


def options_of(fault: Fault, run: Path) -> list[str]:
    """Arguments of `hotloop train` for a new run."""
    axes = [f"parallel={reference(fault.mode)}", *AXES.get(fault.mode, ())]
    axes += ["workforce=ray"] if fault.mode.endswith("on Ray") else []
    settings = [word for axis in axes for word in ("--set", axis)]
    waits = ["--rank-timeout", f"{fault.timeout_s}s"]
    return [
        str(run.parents[1] / "task.py"),
        *settings,
        "--ranks",
        "2",
        *waits,
        "--run",
        str(run),
        "--checkpoint-every",
        "10",
    ]


class Command:
    """`hotloop train` in a session of its own, with all processes that it starts."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.mark = folder, uuid.uuid4().hex
        self._written = folder / f"{self.mark}.txt"
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        with self._written.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hotloop", "train", *arguments],
                cwd=folder,
                env={**environment, MARK: self.mark, "XDG_DATA_HOME": str(folder / "data")},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self) -> str:
        return self._written.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        return processes_of(self.mark, self.folder)

    def victim(self, kind: str, place: int) -> psutil.Process | None:
        """The process itself, or one of two processes of a kind; None before both exist."""
        if kind == "command":
            return psutil.Process(self.process.pid)
        found = sorted((one for one in self.processes() if is_a(kind, one)), key=lambda one: one.pid)
        return found[place] if len(found) == 2 else None

    def left(self) -> tuple[list[str], float]:
        """Names of the processes that are left 5 s after the end, which are killed then; and seconds until none was left."""
        left, seconds = left_after(LEFT_S, self.mark, self.folder)
        names = []
        for one in left:
            with suppress(psutil.NoSuchProcess):
                names.append(f"{one.pid} {one.status()} {' '.join(one.cmdline())[:120]}")
                one.kill()
        return names, seconds


def is_a(kind: str, process: psutil.Process) -> bool:
    """Whether a process is a rank, a worker of an asynchronous training, or an actor of Ray."""
    with suppress(psutil.Error):
        words = process.cmdline()
        if kind == "rank":
            return "RANK" in process.environ() and "hotloop" in words
        if kind == "actor":
            return bool(words) and words[0].startswith(("ray::Host", "ray::Keeper"))
        parent = process.parent()
        return parent is not None and "multiprocessing.forkserver" in " ".join(parent.cmdline())
    return False


def run_of(folder: Path, number: int, fault: Fault, seed: int, whole: dict[str, Path]) -> dict[str, Any]:
    """One training with one fault: where the fault came, how the training ended, and what is wrong with it."""
    draws, own = random.Random(f"{seed} {number}"), folder / str(number)
    row: dict[str, Any] = {"run": number, **asdict(fault)}
    command = Command(own, options_of(fault, own / "run"))
    try:
        return row | disturbed(command, fault, draws, whole)
    except Exception as error:
        return row | {
            "result": "failed",
            "problems": [f"{type(error).__name__}: {error}; output: {command.output()!r}"],
        }
    finally:
        for one in command.processes():
            with suppress(psutil.NoSuchProcess):
                one.kill()


def disturbed(command: Command, fault: Fault, draws: random.Random, whole: dict[str, Path]) -> dict[str, Any]:
    run = command.folder / "run"
    moment = wait_for_moment(command, fault, draws, run)
    victim = command.victim(fault.victim, moment.pop("victim"))
    assert victim is not None
    began, number = time.monotonic(), signal.Signals[fault.name]
    victim.send_signal(number)
    with suppress(subprocess.TimeoutExpired):
        command.process.wait(STOPPED_S)
    if command.process.poll() is None and number == signal.SIGSTOP:
        with suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGCONT)
    code = command.process.wait(LIMIT_S)
    seconds = time.monotonic() - began
    left, left_s = command.left()
    output = command.output()
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    result = "undisturbed" if code == 0 else "killed" if code == -number else "one line"
    problems = [f"left: {name}" for name in left]
    if "Traceback" in output or len(errors) != (result == "one line"):
        problems.append(f"output: {output!r}")
    if result == "one line" and (code != 1 or seconds > fault.timeout_s + END_S):
        problems.append(f"exit code {code} after {seconds:.0f} s")
    if result == "killed" and fault.victim != "command":
        problems.append(f"exit code {code}")
    problems += disagreements_with(whole, fault, run) if not code else resumed(command.folder, fault, run, whole)
    measured = {"seconds": round(seconds, 1), "left_s": round(left_s, 1)}
    return {**moment, "result": result, "code": code, **measured, "error": "".join(errors), "problems": problems}


def wait_for_moment(command: Command, fault: Fault, draws: random.Random, run: Path) -> dict[str, Any]:
    """Waits until a random moment; returns the moment and which of two processes is the victim."""
    place, step, pause_s = draws.randrange(2), draws.randint(1, STEPS - 15), draws.uniform(0, 3)
    is_start = draws.random() < 0.3
    wait_until(command, lambda: command.victim(fault.victim, place) is not None)
    if is_start:
        time.sleep(pause_s)
        return {"moment": f"{pause_s:.1f} s after the process exists", "victim": place}
    wait_until(command, lambda: is_run(run) and Run.open(run).reached() >= step)
    return {"moment": f"step {step}", "victim": place}


def wait_until(command: Command, has_happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not has_happened():
        if command.process.poll() is not None or time.monotonic() > deadline:
            raise TimeoutError("the moment of the fault never came")
        time.sleep(0.1)


def resumed(folder: Path, fault: Fault, run: Path, whole: dict[str, Path]) -> list[str]:
    """Resumes a run, or starts anew if none exists; what is wrong with its end."""
    command = Command(folder, ["--resume", str(run)] if is_run(run) else options_of(fault, run))
    code = command.process.wait(LIMIT_S)
    left, _ = command.left()
    problems = [f"left after the resumed run: {name}" for name in left]
    if code != 0:
        return [*problems, f"the resumed run ended with exit code {code}: {command.output()!r}"]
    return problems + disagreements_with(whole, fault, run)


def disagreements_with(whole: dict[str, Path], fault: Fault, run: Path) -> list[str]:
    """What is wrong with a finished run."""
    found = Run.open(run)
    samples = [row["samples"] for row in found.epochs]
    if found.final is None or samples != [SAMPLES] * EPOCHS:
        return [f"samples in epochs: {samples}, final figures: {found.final}"]
    saved_between = fault.mode == "local" and (fault.name, fault.victim) == ("SIGKILL", "command")
    if reference(fault.mode) == "async" or saved_between:
        return []
    return disagreements(whole[reference(fault.mode)], run)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """All runs in a few figures."""
    return {
        "n": len(rows),
        "as_required": sum(not row["problems"] for row in rows),
        "ends": dict(Counter(row["result"] for row in rows)),
        "modes": {mode: sum(row["mode"] == mode for row in rows) for mode in sorted({row["mode"] for row in rows})},
        "signals": dict(Counter(row["name"] for row in rows)),
        "victims": dict(Counter(row["victim"] for row in rows)),
        "longest_until_no_process_is_left_s": max((row.get("left_s", 0.0) for row in rows), default=None),
        "problems": [f"run {row['run']}: {problem}" for row in rows for problem in row["problems"]],
    }


if __name__ == "__main__":
    sys.exit(main())
