"""Predictions in the user's cache folder, which later runs of the same Task on the same chip measure.

One file per prediction. A prediction that was measured stays for the score; a later one of the same Task gets a file of its
own.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hotloop import __version__
from hotloop.advisor.this_machine import chip_name
from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.files.user_folders import cache_folder, key_digest
from hotloop.core.format import format_digits
from hotloop.core.records.advice import NORMAL_90, Correction, Prediction
from hotloop.core.records.race import Verdict
from hotloop.core.records.training import SourceRecord
from hotloop.errors import HotloopError
from hotloop.plan import Plan
from hotloop.task_file import LoadedTask

_PLAN_AXES = ("compile", "graphs", "precision", "parallel", "accumulation")
"""Axes of a plan that change a predicted step; others change little."""


def ledger_folder() -> Path:
    return cache_folder() / "predictions"


def prediction_key(
    name: str, batch_size: int, source: SourceRecord | None, plan: Plan, precision: str = "fp32"
) -> dict[str, Any]:
    """Returns what identifies a Task and its way of running; a Task without a file is known by its name alone."""
    axes = {axis: getattr(plan, axis) for axis in _PLAN_AXES}
    if axes["precision"] == "default":
        axes["precision"] = precision
    return {
        "task": name,
        "batch_size": batch_size,
        "source": source.digest if source else "",
        "parameters": dict(source.parameters) if source else {},
        "plan": axes,
        "versions": {"hotloop": __version__, "torch": metadata.version("torch")},
    }


def store_prediction(
    key: Mapping[str, Any],
    chip: str,
    raw: tuple[float, float, float],
    shown: tuple[float, float, float],
) -> None:
    """Stores a prediction; an earlier one that no run has measured is replaced.

    Args:
        raw: milliseconds of a step and its 90 % interval without this user's measurements.
        shown: the same as the user reads them.

    Raises:
        DiskError: the file can't be written.
    """
    measured = sum(one.measured is not None for one in _of(key, chip))
    new = Prediction(
        key=dict(key),
        chip=chip,
        raw_ms=raw[0],
        raw_spread=math.log(raw[2] / raw[1]) / (2 * NORMAL_90) if raw[1] > 0 else 1.0,
        step_ms=shown[0],
        low_ms=shown[1],
        high_ms=shown[2],
        created=time.strftime("%Y-%m-%d"),
    )
    write_atomic(_path(key, chip, measured), new.model_dump_json(indent=2))


def measure_prediction(key: Mapping[str, Any], chip: str, step_ms: float, busy: str = "") -> str | None:
    """Adds a measured step to the latest prediction of the Task on the chip, unless the machine was `busy`.

    Returns:
        A line with both, or the reason why the measurement isn't stored; None without a prediction.
    """
    found = _of(key, chip)
    if not found or not step_ms > 0:
        return None
    last = found[-1]
    line = (
        f"predicted {format_digits(last.step_ms)} ms a step "
        f"({format_digits(last.low_ms)} to {format_digits(last.high_ms)}), measured {format_digits(step_ms)}"
    )
    if busy:
        return f"{line}; {busy}"
    new = last.model_copy(update={"measured_ms": [*last.measured_ms, step_ms]})
    try:
        write_atomic(_path(key, chip, len(found) - 1), new.model_dump_json(indent=2))
    except HotloopError as error:
        return f"{line}; the measurement couldn't be stored: {error.given}"
    return line


def load_predictions() -> tuple[list[Prediction], list[str]]:
    """Returns all predictions, the oldest first, and a note for each file that can't be used."""
    found, notes = [], []
    for path in sorted(ledger_folder().glob("*.json")):
        try:
            found.append(_read(path))
        except (OSError, ValueError) as error:  # pydantic's ValidationError is a ValueError
            reason = "hotloop didn't write its content" if isinstance(error, ValidationError) else error
            notes.append(f"the prediction in {path} can't be used ({reason}), and is left out")
    return sorted(found, key=lambda one: one.created), notes


def correction(predictions: Sequence[Prediction], chip: str) -> Correction:
    """Returns the correction from this version's predictions on the chip."""
    own = [one for one in predictions if one.chip == chip and one.key["versions"]["hotloop"] == __version__]
    return Correction.from_predictions(own)


def _read(path: Path) -> Prediction:
    stored = Prediction.model_validate_json(path.read_text(encoding="utf-8"))
    if not path.stem.startswith(_stem(stored.key, stored.chip)) or not isinstance(stored.key.get("versions"), dict):
        raise ValueError("its content is not what its name says")
    return stored


def _of(key: Mapping[str, Any], chip: str) -> list[Prediction]:
    """Returns the predictions of a Task on a chip in their order, up to the first file that can't be used."""
    found: list[Prediction] = []
    while True:
        try:
            found.append(_read(_path(key, chip, len(found))))
        except (OSError, ValueError):
            return found


def _path(key: Mapping[str, Any], chip: str, number: int) -> Path:
    return ledger_folder() / f"{_stem(key, chip)}-{number}.json"


def _stem(key: Mapping[str, Any], chip: str) -> str:
    return key_digest({"key": json.loads(json.dumps(key)), "chip": chip})


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
