"""Advice for a script: its second training step is recorded in the script's own process, as a Task's step is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hotloop.advisor.parallel_ways import at_batch
from hotloop.core.hardware.machine_load import wait_until_quiet
from hotloop.core.records.advice import HardwareAdvice, MeasuredStep
from hotloop.core.records.step_costs import StepCosts
from hotloop.core.reporter import Progress, Say
from hotloop.errors import TaskError
from hotloop.hardware_advice.task_advice import AdviceRequest, Subject, advise_subject, request_machines_here
from hotloop.scripts.script_process import run_script

_UNKNOWN_BATCHES = 1000
_LEAST_TIMES = 2


def advise_script(
    path: Path | str,
    arguments: Sequence[str],
    steps: int,
    epochs: int | None,
    request: AdviceRequest,
    *,
    stdout: int | None = None,
    say: Say = lambda line: None,
    progress: Progress = lambda doing, share: None,
) -> HardwareAdvice:
    """Returns the advice for a script, which is stopped as by Ctrl-C after `steps` timed steps.

    Args:
        epochs: complete rounds of the script's data in the whole run; None for the lengths of the script's loops.
        stdout: a file number for the script's output.

    Raises:
        TaskError: no training step was recognised.
    """
    request.machines()
    here, busy = request_machines_here(request, progress)
    wait_until_quiet()
    inside, settings = "hotloop.profiler.step_costs.script_step:wait_for_torch", {"steps": steps}
    end = run_script(path, arguments, inside=inside, settings=settings, stdout=stdout)
    found = end.result or {}
    if "costs" not in found:
        reason = found.get("note", f"exit code {end.exit_code}, and fewer than two updates by an optimizer")
        raise TaskError(
            f"no training step of {path} was recognised ({reason})",
            expected="a script that trains a torch model: a backward pass and an optimizer's step",
        )
    costs, times_ms = StepCosts.from_dict(found["costs"]), found["times_ms"]
    size, busy = costs.batch_size, found["busy"] or busy
    notes = [
        f"{len(times_ms)} steps of the script were timed, then it was stopped",
        "the time of loading batches isn't in the predictions",
    ]
    batches = _steps_of_epoch(found)
    if batches is None:
        notes.append(f"the length of the data is unknown: an epoch is taken as {_UNKNOWN_BATCHES:,} batches")
    if epochs is None and (epochs := _epochs(found)) is None:
        epochs = 1
        notes.append("the number of the script's epochs is unknown, and taken as 1: --epochs sets another")
    sizes = list(dict.fromkeys(request.batch_sizes)) or [size]
    sizes.sort(key=lambda one: (one != size, one))
    device = "cpu" if found["device"] == "cpu" else found["device"]
    is_measured = len(times_ms) >= _LEAST_TIMES and size in sizes and not found["busy"]
    subject = Subject(
        name=Path(str(path)).name,
        costs={one: at_batch(costs, one) for one in sizes},
        steps={one: epochs * math.ceil((batches or _UNKNOWN_BATCHES) * size / one) for one in sizes},
        epochs=epochs,
        measured={(size, device): MeasuredStep.from_times(times_ms)} if is_measured else {},
        notes=tuple(notes),
        busy=busy,
    )
    return advise_subject(subject, here, request, say=say)


def _steps_of_epoch(found: dict[str, Any]) -> int | None:
    """Returns the steps in a round of the loader, else in the innermost loop; None where neither length is known."""
    innermost = found["loops"][-1] if found["loops"] else None
    return found["steps_of_epoch"] or innermost


def _epochs(found: dict[str, Any]) -> int | None:
    """Returns how often the loops around the innermost run it; None where a length isn't known."""
    outer = found["loops"][:-1]
    return None if None in outer or not found["loops"] else math.prod(outer)
