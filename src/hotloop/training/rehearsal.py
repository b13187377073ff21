"""Rehearsals: a fresh process resumes a run that goes on, and its steps are compared with those of the run.

After some checkpoints the run records its next steps, and then starts the process. The process loads the run's files as a
resume does, takes the same steps, and compares sums and State bit by bit. The run never waits for the process,
which `rehearsal_process` describes. In all methods `loop` is the run's TrainingLoop.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from hotloop.core.callback import has_user_callbacks
from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.state import State
from hotloop.errors import DiskError, PlanError, RunError, describe_error, shorten
from hotloop.plan import Plan
from hotloop.training.checkpoint import best_file
from hotloop.training.repeated_steps import StepRecord
from hotloop.training.run import Run

_FOLDER = ".rehearsal"
_MOST_STEPS = 16
_STEPS_S = 0.5
"""Seconds of the run that a rehearsal repeats at most, if more than two steps fit into them."""

_SHARE = 0.01
"""Largest share of the run's time that rehearsals may cost."""

_SLOWDOWN = 1.5
"""Seconds by which a rehearsal delays a training on the same cores, for each CPU second of its start (claim rehearsal-cost)."""

_PROGRAM = """
import os, sys
os.nice(19)
if hasattr(os, "SCHED_IDLE"):
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
from hotloop.training.rehearsal_process import main
main(*sys.argv[1:])
"""
"""The process has the lowest priority before it imports torch, which takes most of its time."""

_LEAST_LIMIT_S = 120.0
_LIMIT_FACTOR = 30.0
"""A rehearsal that takes so many times its predicted seconds is ended."""

_REMEDY = "a resumed run ends with other bits. Name what your code changes in Task(state=...), or go on without an exact resume"


@dataclass(frozen=True)
class RehearsalRequest:
    """How often to rehearse: `limit` times whatever it costs; None for as often as 1 % of the time allows."""

    limit: int | None = None

    @classmethod
    def parse(cls, text: str) -> RehearsalRequest:
        """Reads `auto`, `no`, or a number.

        Raises:
            PlanError: the text is something else.
        """
        if text in ("auto", "no"):
            return cls(0 if text == "no" else None)
        if text.isascii() and text.isdigit() and len(text) < 7:
            return cls(int(text))
        raise PlanError(f"rehearse={shorten(text)}", expected="auto, no, or a number of rehearsals such as 3")


@dataclass
class _Recording:
    """The steps after a checkpoint, which a process will repeat."""

    plan: Plan
    start: int
    until: int
    steps: StepRecord


class Rehearsals:
    """The rehearsals of one training.

    Args:
        started_s: CPU seconds of this process before training: a fresh process needs about as many.
    """

    def __init__(self, run: Run, request: RehearsalRequest, say: Callable[[str], None], started_s: float) -> None:
        self._run, self._request, self._say, self._start_s = run, request, say, max(1.0, started_s)
        self._folder = run.path / _FOLDER
        self._began = time.monotonic()
        self._recording: _Recording | None = None
        self._process: subprocess.Popen | None = None
        self._started, self._limit_s, self._spent_s = 0.0, 0.0, 0.0
        self._rehearsed, self._epochs_used = 0, set[int]()
        self._modes: Any = None
        self._why_not = ""
        shutil.rmtree(self._folder, ignore_errors=True)  # of a killed run

    def steps_left(self, loop: Any) -> int | None:
        """Returns the largest span that still stops at each step that a rehearsal needs; None for any span."""
        if self._recording is not None:
            return 1
        crossing = self._crossing(loop)
        left = None if crossing is None else crossing - loop.program.position.batch
        return left if left else None

    def wants_checkpoint(self, loop: Any) -> bool:
        """Whether a rehearsal needs a checkpoint here: shortly before the end of an epoch, which it then repeats."""
        return self._crossing(loop) == loop.program.position.batch and self._recording is None

    def _crossing(self, loop: Any) -> int | None:
        """Returns the batch of this epoch before which a rehearsal should start; None for no rehearsal in this epoch."""
        position, batches = loop.program.position, loop.program.feed.batches
        if batches is None or self._process is not None or position.epoch in self._epochs_used:
            return None
        if has_user_callbacks(loop.callbacks) or not _is_power_of_four(position.epoch + 1):
            return None
        batch = batches - min(batches, self._steps(loop) // 2)
        return batch if batch >= max(1, position.batch) and self._is_worthwhile(loop) else None

    def _steps(self, loop: Any) -> int:
        return max(2, min(_MOST_STEPS, int(_STEPS_S / max(loop.pacer.step_s or _STEPS_S, 1e-6))))

    def _cost_s(self, loop: Any) -> float:
        """Returns the predicted seconds by which a process delays a training on the same cores, even at the lowest priority:
        threads of a step that wait for each other wait for the slowest.
        """
        return _SLOWDOWN * self._start_s + 2 * self._steps(loop) * (loop.pacer.step_s or 0.0)

    def _is_worthwhile(self, loop: Any) -> bool:
        if self._request.limit is not None:
            return self._rehearsed < self._request.limit
        left = loop.remaining_s()
        whole_s = time.monotonic() - self._began + (left or 0.0)
        if self._spent_s + self._cost_s(loop) <= _SHARE * whole_s:
            return True
        self._why_not = "a rehearsal would take more than 1 % of the time of so short a run"
        return False

    def begin(self, loop: Any, state: State, path: Path) -> None:
        """Begins to record steps after the checkpoint `path`, if a rehearsal from there is due."""
        modes, before = (state.in_eval, state.trainable), self._modes
        self._modes = modes
        position = state.position
        is_due = self._rehearsed == 0 or before not in (None, modes) or self._crossing(loop) == position.batch
        if self._recording is not None or self._process is not None or not is_due:
            return
        if why := self._obstacle(loop):
            self._why_not = why
            return
        if not self._is_worthwhile(loop):
            return
        until = position.step + self._steps(loop)
        if (batches := loop.program.feed.batches) is not None:
            is_within = has_user_callbacks(loop.callbacks)
            epochs = position.epoch + 1 if is_within else loop.task.epochs
            until = min(until, position.step + (epochs - position.epoch) * batches - position.batch)
        if until <= position.step:
            return
        self._epochs_used.add(position.epoch)
        try:
            shutil.rmtree(self._folder, ignore_errors=True)
            _link(path, self._folder / "checkpoints" / path.name)
            if (best := best_file(path)) is not None:
                _link(path.parent / "best" / best, self._folder / "checkpoints" / "best" / best)
        except OSError as error:
            self._why_not = f"the checkpoint can't be copied ({error.strerror})"
            return
        plan = loop.program.parts.plan
        self._recording = _Recording(plan, position.step, until, StepRecord(self._folder))

    def _obstacle(self, loop: Any) -> str:
        """Returns why no process can rehearse this run; empty if one can."""
        facts, device = self._run.record.facts, loop.program.device
        if self._request.limit == 0:
            return "no rehearsal was asked for"
        if not loop.world.is_single or loop.program.parts.plan.parallel != "none":
            return "several processes share the training"
        if self._run.record.source is None:
            return "the Task was made in Python, and no other process can make it"
        if not facts.exact:
            return "the run is known to resume inexactly"
        needed, free = psutil.Process().memory_info().rss, psutil.virtual_memory().available
        if needed > 0.8 * free:
            return f"a second process needs about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
        if device.type == "cuda":
            needed, free = torch.cuda.max_memory_reserved(device), torch.cuda.mem_get_info(device)[0]
            if needed > 0.8 * free:
                return (
                    f"a second process needs about {needed / 1e9:.1f} GB of {device}, and {free / 1e9:.1f} GB are free"
                )
        return ""

    def after_span(self, loop: Any, sums: dict[str, float]) -> None:
        """Records a step, or starts the process after the last one; reports a process that has ended."""
        if self._process is not None and (self._process.poll() is not None or self._is_late()):
            self._report()
        recording, step = self._recording, loop.program.position.step
        if recording is None or step <= recording.start:
            return
        if loop.program.parts.plan != recording.plan:
            self._recording, self._why_not = None, "the plan changed during the recorded steps"
            return
        is_last = step >= recording.until
        started = time.perf_counter()
        try:
            recording.steps.add(step, sums, loop.program.state(lent=True) if is_last else None)
            if is_last:
                self._start(recording)
        except (OSError, RunError, DiskError) as error:
            self._recording, self._why_not = None, f"the process can't be started: {describe_error(error)}"
        if is_last:
            self._spent_s += time.perf_counter() - started + self._cost_s(loop)
            self._limit_s = max(_LEAST_LIMIT_S, _LIMIT_FACTOR * self._cost_s(loop))

    def _start(self, recording: _Recording) -> None:
        recording.steps.close()
        self._recording = None
        write_atomic(self._folder / "plan.toml", recording.plan.to_toml())
        arguments = [str(self._folder), str(os.getpid()), str(torch.get_num_threads())]
        command = [sys.executable, "-c", _PROGRAM, *arguments]
        with open(self._folder / "errors.txt", "wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
            )
        self._started = time.monotonic()

    def _is_late(self) -> bool:
        return time.monotonic() - self._started > self._limit_s

    def _report(self) -> None:
        """Reports the result of the process, which is ended if it hasn't ended."""
        assert self._process is not None
        is_late = self._process.poll() is None
        if is_late:
            _end(self._process)
        code, self._process = self._process.returncode, None
        found: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            found = json.loads((self._folder / "result.json").read_text())
        errors = ""
        with suppress(OSError):
            errors = (self._folder / "errors.txt").read_text(errors="replace").strip().rpartition("\n")[2]
        shutil.rmtree(self._folder, ignore_errors=True)
        self._rehearsed += 1
        if is_late:
            self._note(f"not rehearsed: the process did not end within {self._limit_s:.0f} s")
        elif "different" not in found:
            why = found.get("failure") or f"the process ended with exit code {code}: {shorten(errors)}".rstrip(": ")
            self._note(f"not rehearsed: {why}")
        elif not found["different"]:
            line = f"resume rehearsed: {found['steps']} steps from step {found['start']:,}, same bits"
            self._note(line, is_said=self._rehearsed == 1)
        else:
            callbacks = " (the rehearsal calls no callbacks)" * bool(found.get("skips_callbacks"))
            line = (
                f"resume rehearsed: different, from step {found['start']:,}: {found['different']}{callbacks}; {_REMEDY}"
            )
            self._note(line, is_said=False)
            self._run.note_all_inexact([line], self._say)

    def _note(self, line: str, *, is_said: bool = True) -> None:
        record = self._run.record
        self._run.keep(record=record.model_copy(update={"rehearsals": [*record.rehearsals, line][-20:]}))
        if is_said:
            self._say(line)

    def close(self, loop: Any, *, is_interrupted: bool) -> None:
        """Ends the process, or waits for it where the user asked for rehearsals; records why there was none."""
        is_asked = bool(self._request.limit)
        if self._process is not None:
            if is_asked and not is_interrupted:
                self._say("waiting for the rehearsal of the resume")
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(max(0.0, self._limit_s - (time.monotonic() - self._started)))
            if self._process.poll() is not None or is_asked:
                self._report()
            else:
                _end(self._process)
                self._process, self._why_not = None, "the training ended before the rehearsal"
        shutil.rmtree(self._folder, ignore_errors=True)
        if (
            loop.is_ended
            and not self._rehearsed
            and (why := self._obstacle(loop) or self._why_not or "the training ended first")
        ):
            self._note(f"not rehearsed: {why}", is_said=is_asked)


def _is_power_of_four(number: int) -> bool:
    return number & (number - 1) == 0 and number.bit_length() % 2 == 1


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def _end(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)  # with the workers of its data loader
    process.wait()
