"""The tensors that a compiled step works on, by name, and whether those that are there are the ones it was made for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hotloop.lowering.step import EagerStep
from hotloop.state import leaves

Values = dict[str, Any]


def step_tensors(step: EagerStep, hyper: dict[str, Tensor], *, whole: bool) -> Values:
    """What a step reads and changes, by name: of the whole step, or of forward and backward alone."""
    model, loss = step.parts.model, step.parts.task.loss
    values: Values = {
        "parameters": {name: value.detach() for name, value in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
        "loss": dict(loss.named_buffers()) if isinstance(loss, nn.Module) else {},
    }
    if whole:
        values["state"] = _optimizer_state(step)
        values["average"] = step.average
        values["hyper"] = hyper
    if step.scale is not None:
        values["scale"] = step.scale
    return values


def _optimizer_state(step: EagerStep) -> dict[str, dict[str, Tensor]]:
    """In the order of the model and of the keys: that of the optimizer's own is of whoever filled it, a resume say."""
    state, model = step.optimizer.state, step.parts.model
    kept = {name: state[value] for name, value in model.named_parameters() if value in state}
    return {
        name: {key: own[key] for key in sorted(own, key=str) if isinstance(own[key], Tensor)}
        for name, own in kept.items()
    }


def by_place(values: Values) -> dict[str, Tensor]:
    """The tensors of a step by place, such as `/state/fc.weight/exp_avg`, in the order of the step's."""
    return dict(leaves(values))


def misfit(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """In what the tensors of a step aren't those that a program was made for; None where they are."""
    for place in {**expected, **found}:
        name = place.removeprefix("/")
        if place not in found:
            return f"there is no {name}, which the compiled step works on"
        if place not in expected:
            return f"there is {name}, of which the compiled step knows nothing"
        if not alike(found[place], expected[place]):
            return f"{name} has another shape, dtype or stride than in the compiled step"
    return None


def alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.stride() == other.stride()
