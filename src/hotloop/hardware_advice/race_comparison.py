"""Compares a race's measured steps with stored predictions."""

from __future__ import annotations

from hotloop.core.records.race import Verdict
from hotloop.hardware_advice.ledger import measure_prediction, prediction_key
from hotloop.hardware_advice.this_machine import chip_name
from hotloop.task_file import LoadedTask


def compare_with_predictions(loaded: LoadedTask, verdict: Verdict, batch_size: int | None = None) -> list[str]:
    """Returns a line for each raced plan whose step `hotloop advise` predicted for this machine's chip.

    Args:
        batch_size: rows of a step; the Task's by default.
    """
    size = batch_size or loaded.task.roles.batch_size
    lines: dict[str, str] = {}
    for timing in verdict.plans:
        plan = timing.as_plan
        key, chip = prediction_key(loaded.task.name, size, loaded.record, plan), chip_name(plan.device)
        if timing.step_ms is None or f"{key} {chip}" in lines:
            continue  # plans that a prediction doesn't distinguish count once, the first
        line = measure_prediction(key, chip, timing.step_ms, verdict.busy)
        if line is not None:
            lines[f"{key} {chip}"] = f"{timing.name}: {line}"
    return list(lines.values())
