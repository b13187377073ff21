"""Schema of a checkpoint's document: the checksum shows that a document is unchanged, the schema that it is valid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter

from hotloop.core.files.run_folder import Count
from hotloop.core.records.training import EpochRecord
from hotloop.core.state import State


class PositionSchema(BaseModel):
    model_config = ConfigDict(extra="forbid")

    step: Count
    epoch: Count
    batch: Count


class BestSchema(BaseModel):
    model_config = ConfigDict(extra="forbid")

    epoch: Annotated[int, Field(strict=True, ge=1)]
    figure: float
    file: Annotated[str, StringConstraints(pattern=r"^[^/\x00]*$")]


class Metadata(BaseModel):
    """All fields of the document except the State; `check_state` checks the State."""

    position: PositionSchema
    history: list[EpochRecord]
    best: BestSchema | None
    epoch_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]


def check_state(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parts of a State unchanged, after each field was checked against its annotation.

    Raises:
        ValueError: a part has another type than its annotation, or parameters or buffers are absent.
    """
    types = _part_types()
    for name, value in given.items():
        if name in types:  # State's constructor rejects unknown names
            types[name].validate_python(value)
    return dict(given)


@cache
def _part_types() -> dict[str, TypeAdapter[Any]]:
    """The type checker of each part of a State."""
    hints = get_type_hints(State)
    arbitrary = ConfigDict(arbitrary_types_allowed=True, strict=True)
    return {
        field.name: TypeAdapter(hints[field.name], config=arbitrary)
        for field in fields(State)
        if field.name != "position"
    }


def position_contradiction(position: Mapping[str, int], history: Sequence[EpochRecord]) -> str:
    """Returns why the position contradicts the completed epochs; empty if it agrees with them."""
    done = history[-1].step if history else 0
    if position["epoch"] != len(history) or any(record.epoch != n for n, record in enumerate(history, 1)):
        return f"it is in epoch {position['epoch'] + 1}, and has {len(history)} epochs before it"
    if position["step"] != done + position["batch"]:
        return (
            f"it is {position['batch']} batches into an epoch that began at step {done}, and at step {position['step']}"
        )
    return ""
