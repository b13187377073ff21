"""The process of a rehearsal: resumes a copy of a run that goes on, and compares a few steps with those of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from hotloop.core.callback import has_user_callbacks
from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.files.source_files import files_of
from hotloop.core.float32_switches import apply_switches
from hotloop.core.hardware.devices import resolve_device
from hotloop.core.processes import end_with_parent
from hotloop.errors import describe_error
from hotloop.lowering.build import lower
from hotloop.plan import Plan
from hotloop.training.early_stopping import PAUSED, RunOutcome
from hotloop.training.loop import TrainingLoop, train_loop
from hotloop.training.repeated_steps import FILE
from hotloop.training.resume import task_of_run
from hotloop.training.run import Run


def rehearse(folder: Path) -> dict[str, Any]:
    """Resumes the run around `folder` from its checkpoint there, and compares its steps with the recorded ones."""
    original, plan = Run.open(folder.parent), Plan.read(folder / "plan.toml")
    run = Run.create(folder / "run", original.record, plan, files_of(original.source))
    for name in ("checkpoints", FILE):
        (folder / name).rename(run.path / name)
    task = task_of_run(run, trust=True)
    found: dict[str, Any] = {"skips_callbacks": has_user_callbacks(task.callbacks)}

    def drive(loop: TrainingLoop) -> RunOutcome:
        loop.cadence.seconds, loop.cadence.steps = float("inf"), None
        found["start"] = loop.expected.start
        reason, steps = loop.next_span()
        while reason is None and loop.program.position.step < loop.expected.last and not loop.difference:
            loop.run_span(steps)
            reason, steps = loop.next_span()
        found["different"], found["steps"] = loop.difference, loop.expected.equal - loop.expected.start
        if not loop.difference and loop.expected.equal < loop.expected.last:
            found["failure"] = f"the process stopped before step {loop.expected.last} ({reason})"
            del found["different"]
        return RunOutcome(PAUSED, False, [], None)

    with apply_switches(original.record.switches, resolve_device(plan).device.partition(":")[0]):
        train_loop(lambda: lower(task, plan), run, resume=True, compares=True, drive=drive)
    return found


def main(folder: str, parent: str, threads: str) -> None:
    """Writes the result of `rehearse` to `result.json` in the folder; the run `parent` reads the file."""
    end_with_parent(int(parent))
    torch.set_num_threads(int(threads))
    try:
        found = rehearse(Path(folder))
    except Exception as error:  # whatever the Task raises: the run goes on, and its record has the reason
        found = {"failure": f"the resumed process ended with an error: {describe_error(error)}"}
    write_atomic(Path(folder) / "result.json", json.dumps(found))
