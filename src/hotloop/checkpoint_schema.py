"""What a checkpoint's document must hold: its checksum tells that it was not changed, not that it was ever right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter

from hotloop.journal import Count
from hotloop.records import EpochRecord
from hotloop.state import State


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
    """All but the State's tensors; the State itself is `checked_state`'s."""

    position: PositionSchema
    history: list[EpochRecord]
    best: BestSchema | None
    epoch_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


def checked_state(given: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a State as they are, once each is known to be what its annotation says.

    Raises:
        ValueError: one isn't, or it lacks parameters or buffers.
    """
    types = _types()
    for name, value in given.items():
        if name in types:  # State itself refuses others
            types[name].validate_python(value)
    return dict(given)


@cache
def _types() -> dict[str, TypeAdapter[Any]]:
    """For each part of a State what checks it."""
    hints = get_type_hints(State)
    arbitrary = ConfigDict(arbitrary_types_allowed=True, strict=True)
    return {one.name: TypeAdapter(hints[one.name], config=arbitrary) for one in fields(State) if one.name != "position"}


def unbelievable(position: Mapping[str, int], history: Sequence[EpochRecord]) -> str:
    """Why a position can't be true beside the epochs that led to it; empty if it can."""
    done = history[-1].step if history else 0
    if position["epoch"] != len(history) or any(record.epoch != n for n, record in enumerate(history, 1)):
        return f"it is in epoch {position['epoch'] + 1}, and has {len(history)} epochs before it"
    if position["step"] != done + position["batch"]:
        return (
            f"it is {position['batch']} batches into an epoch that began at step {done}, and at step {position['step']}"
        )
    return ""
