"""Real trainings that are killed and resumed, and what must then be equal to one that never was.

The Task, `tests/support/tasks/full_state_task.py` or `tests/support/tasks/capturable_task.py`, notes each step it begins, so that what a killed process did is
known from outside, not from what hotloop says of itself. It can be held at a step, so that no training runs away from
its test on a machine that is busy.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hotloop.core.state import differing_paths
from hotloop.training.checkpoint import Checkpoint
from hotloop.training.run import Run, is_run
from tests.support.processes.forked_server import Process, Server

EVERYTHING = Path(__file__).parents[1] / "tasks/full_state_task.py"
CAPTURABLE = Path(__file__).parents[1] / "tasks/capturable_task.py"

INSTANTS = ("start-up", "step", "step", "step", "checkpoint", "evaluation")
"""Where to kill, each as often as it stands here."""


def last_checkpoint(run: Run) -> Checkpoint:
    """The newest good checkpoint of a run."""
    found = run.checkpoints.newest()
    assert found is not None, f"{run.path} has no good checkpoint"
    return found[0]


def disagreements(one: Path, other: Path) -> list[str]:
    """What differs between two finished runs, though only their speeds may: any bit of State, history, best, figures."""
    runs = [Run.open(path) for path in (one, other)]
    a, b = (last_checkpoint(run) for run in runs)
    found = [f"state{path}" for path in differing_paths(a.state, b.state)]
    speeds = {"seconds": 0.0, "samples_per_s": 0.0}
    if [r.model_copy(update=speeds) for r in a.history] != [r.model_copy(update=speeds) for r in b.history]:
        found.append("history")
    if [row | speeds for row in runs[0].epochs] != [row | speeds for row in runs[1].epochs]:
        found.append("metrics.jsonl")
    if (a.best is None) != (b.best is None):
        found.append("best")
    elif a.best is not None and b.best is not None:
        found += ["best epoch"] * ((a.best.epoch, a.best.figure) != (b.best.epoch, b.best.figure))
        weights = [run.checkpoints.load_best(best).state for run, best in zip(runs, (a.best, b.best), strict=True)]
        found += [f"best weights{path}" for path in differing_paths(*weights)]
    if runs[0].final != runs[1].final:
        found.append(f"final figures: {runs[0].final} and {runs[1].final}")
    return [one for one in found if "/attributes/" not in one]  # Tasks of tests count how often they are called


@dataclass
class Training:
    """One run of the Task in processes that start, end and are killed.

    Attributes:
        folder: holds the run and the marks.
        every: steps from checkpoint to checkpoint.
        task: the Task's file.
        plan: options of the first start that choose the plan.
        tried: whether each process tries its plan on one batch before its first step.
        server: starts the processes; unless it is given, all of them are fresh ones.
        problems: what was found wrong on the way; empty when all is well.
        orphans: workers that were alive when their training was killed.
        start_up_s: how long the last process took to its first step.
    """

    folder: Path
    epochs: int
    every: int
    workers: int = 0
    task: Path = EVERYTHING
    plan: tuple[str, ...] = ()
    tried: bool = False
    server: Server = field(default_factory=lambda: Server(forks=False))
    problems: list[str] = field(default_factory=list)
    orphans: list[psutil.Process] = field(default_factory=list)
    start_up_s: float = 2.0
    kills: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.run = self.folder / "run"

    def begin(self, *options: str, **more: Any) -> Process:
        """Starts the run, or goes on with it if there is one, in a session of its own."""
        return self.server.start("train", *self._arguments(), *options, **{"stderr": subprocess.STDOUT} | more)

    def _arguments(self) -> list[str]:
        if is_run(self.run):
            return ["--resume", str(self.run)]
        arguments = [str(self.task), *self.plan, "--run", str(self.run), "-p", f"epochs={self.epochs}"]
        arguments += ["-p", f"marks={self.folder}", "--checkpoint-every", str(self.every)]
        return [*arguments, "--workers", str(self.workers)]

    def finish(self, *options: str, fresh: bool = True) -> str:
        """Lets it run to its end, as a fresh process; returns what it printed."""
        process = self.begin(*options, fresh=fresh)
        output, _ = process.communicate(timeout=600)
        if process.returncode != 0:
            self.problems.append(f"exit code {process.returncode}: {output}")
        return output

    def marks(self, name: str) -> int:
        """How many steps, or batches of evaluation, were begun in all processes so far; or at which step it is held."""
        path = self.folder / name
        return path.stat().st_size if path.exists() else 0

    def starts(self) -> list[dict[str, Any]]:
        """The journal's starts and resumes."""
        return (
            [e for e in Run.open(self.run).journal() if e["event"] in ("start", "resume")] if is_run(self.run) else []
        )

    def hold(self, steps: int) -> None:
        """Lets processes begin no step after so many of all of them, until `release`."""
        with (self.folder / "held").open("ab") as file:
            file.truncate(steps)

    def release(self) -> None:
        (self.folder / "held").unlink()

    def kill(self, instant: str, draws: random.Random, *options: str) -> bool:
        """Goes on, and kills at a random moment of the kind; False if training came to its end before."""
        begun, started = self.marks("steps"), len(self.starts())
        self.hold(begun + self.tried + 3 * self.every)  # further than any moment is
        process = self.begin(*options)
        try:
            if not self._moment(instant, draws, process):
                self._ended(process)
                return False
            self.orphans += psutil.Process(process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            self._ended(process)
            return False
        finally:
            process.kill()
            process.communicate()
            self.release()
        self._look(instant, max(0, self.marks("steps") - begun - self.tried), started)
        return True

    def _ended(self, process: Process) -> None:
        output, _ = process.communicate(timeout=600)
        if process.returncode != 0:
            self.problems.append(f"exit code {process.returncode}: {output}")

    def _moment(self, instant: str, draws: random.Random, process: Process) -> bool:
        """Waits for the moment; False if the process ended first."""
        steps, evaluations = self.marks("steps"), self.marks("evaluation")
        if instant == "start-up":
            time.sleep(draws.uniform(0, self.start_up_s))
            return process.poll() is None
        started = time.monotonic()
        if not until(process, lambda: self.marks("steps") > steps + self.tried):
            return False
        self.start_up_s = time.monotonic() - started
        if instant == "evaluation":
            return until(process, lambda: self.marks("evaluation") > evaluations)
        ahead = draws.randint(1, 2 * self.every)
        if not until(process, lambda: self.marks("steps") >= steps + ahead):
            return False
        if instant == "checkpoint":
            return until(process, self._writing, pause_s=0)
        time.sleep(draws.uniform(0, 0.02))
        return process.poll() is None

    def _writing(self) -> bool:
        if self.marks("steps") > self.marks("held"):  # nobody saw the checkpoint: one more
            self.hold(self.marks("held") + self.every)
        folder = self.run / "checkpoints"
        return any(name.endswith(".part") for place in (folder, folder / "best") for name in _names(place))

    def _look(self, instant: str, begun: int, started: int) -> None:
        """Checks the journal against the marks, now that a process is dead."""
        starts = self.starts()
        if len(starts) > started + 1:
            self.problems.append(f"one process logged {len(starts) - started} starts")
        self._check_repetition(starts)
        reached = starts[-1]["step"] + begun if len(starts) > started else None
        if reached is None and begun:
            self.problems.append(f"{begun} steps were begun before the journal had a start")
        files = len(Run.open(self.run).checkpoints.files()) if is_run(self.run) else 0
        if files > 3:
            self.problems.append(f"{files} checkpoints were kept")
        self.kills.append({"instant": instant, "begun": begun, "reached": reached, "starts": len(starts)})

    def _check_repetition(self, starts: list[dict[str, Any]]) -> None:
        """What a resume says that it may repeat is true, and at most an interval."""
        resumed = [event for event in starts if event["event"] == "resume"]
        for event in resumed:
            if event["repeated_at_most"] > self.every:
                self.problems.append(f"a resume repeats {event['repeated_at_most']} steps of {self.every}")
        if not self.kills or self.kills[-1]["reached"] is None or len(starts) == self.kills[-1]["starts"]:
            return
        reached, event = self.kills[-1]["reached"], starts[-1]
        if not event["step"] <= reached <= event["step"] + event["repeated_at_most"]:
            self.problems.append(f"step {reached} was reached, but the next resume says {event}")

    def check_end(self, timeout_s: float = 30) -> None:
        """No worker outlives its training for long, no half-written file stays, and the run is free."""
        self._check_repetition(self.starts())
        _, alive = psutil.wait_procs(self.orphans, timeout=timeout_s)
        self.problems += [f"worker {process.pid} is still alive" for process in alive]
        self.problems += [f"{path} was left behind" for path in self.run.rglob(".*.part")]
        run = Run.open(self.run)
        run.lock()
        run.unlock()


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def until(process: Process, happened: Callable[[], bool], *, pause_s: float = 0.0005, timeout_s: float = 300) -> bool:
    deadline = time.monotonic() + timeout_s
    while not happened():
        if process.poll() is not None:
            return False
        if time.monotonic() > deadline:
            raise TimeoutError("the training neither came there nor ended")
        time.sleep(pause_s)
    return process.poll() is None
