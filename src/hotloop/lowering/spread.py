"""The parallel axis, where linear layers are split: each rank has a part of them, and computes the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.copies import copied
from hotloop.data.feed import peek
from hotloop.data.tree import to_device
from hotloop.errors import PlanError, blame
from hotloop.lowering.columns import Found, splittable
from hotloop.lowering.ingredients import Ingredients
from hotloop.lowering.step import EagerStep
from hotloop.modes import set_training
from hotloop.parallel import spreading
from hotloop.rng import Streams, preserved
from hotloop.state import whole
from hotloop.task import Computed

_SHOWN = 3
"""Layers named in a line."""
_ROUNDING = 1e4
"""Times a dtype's epsilon that gradients of a split model may be off: a hundredth part of what any mistake makes."""


class TensorStep(EagerStep):
    """One training step of all ranks, each of which computes all of it but for its parts of the split layers."""

    def __init__(self, parts: Ingredients) -> None:
        found = _found(parts)
        _try(parts, found)
        _split(parts.model, found, parts.device)  # before the optimizer looks at it
        super().__init__(parts)
        for group in self.optimizer.param_groups:
            group.update({key: False for key in ("foreach", "fused") if key in group})  # one list can't hold both kinds
        self.draws.always = True
        parts.say(_told(found))

    def _compute(self, batch: Any) -> Computed:
        with spreading.as_one(self.parts.device):
            return super()._compute(batch)

    def _backward_of(self, loss: Tensor) -> None:
        with spreading.as_one(self.parts.device):
            super()._backward_of(loss)

    def clip(self, parameters: list[Tensor]) -> None:
        task = self.parts.task
        if task.clip_norm is not None:
            spreading.clip_norm(parameters, task.clip_norm)
        if task.clip_value is not None:
            spreading.clip_value(parameters, task.clip_value)

    @contextmanager
    def together(self) -> Iterator[None]:
        with spreading.as_one(self.parts.device):
            yield


def _found(parts: Ingredients) -> Found:
    """What can be split.

    Raises:
        PlanError: nothing, naming the layers and why.
    """
    if parts.task.average is not None:
        raise PlanError("parallel=tensor with an average of the weights", fix="use parallel=data, or leave average out")
    with preserved(parts.device):
        model = copied(parts.model)
        found = splittable(model, parts.world.ranks)
    if not found.groups:
        raise PlanError(
            f"parallel=tensor finds nothing to split: {_reasons(parts.model, found) or 'there is no linear layer'}",
            expected="two linear layers with pointwise operations between, or an attention with layers of its own for q, k"
            " and v, by a forward that doesn't look at numbers",
            fix="use parallel=data or sharded",
        )
    return found


def _reasons(model: nn.Module, found: Found) -> str:
    shown = [f"{name!r} ({type(model.get_submodule(name)).__name__}): {why}" for name, why in found.whole.items()]
    left = len(shown) - _SHOWN
    return "; ".join(shown[:_SHOWN]) + (f"; and {left} more" if left > 0 else "")


def _told(found: Found) -> str:
    split = [name for group in found.groups for name in (*group.columns, group.rows)]
    more = f" and {len(split) - _SHOWN} more" if len(split) > _SHOWN else ""
    kept = f"; whole on each rank: {', '.join(list(found.whole)[:_SHOWN])}" if found.whole else ""
    return f"split over the ranks: {', '.join(split[:_SHOWN])}{more}{kept}{', ...' * (len(found.whole) > _SHOWN)}"


def _split(model: nn.Module, found: Found, device: torch.device) -> None:
    columns = [name for group in found.groups for name in group.columns]
    spreading.spread(model, columns, [group.rows for group in found.groups], device)


def _try(parts: Ingredients, found: Found) -> None:
    """Holds a split copy against a whole one: loss and gradients of two samples; nothing of it stays.

    Raises:
        PlanError: it can't be run, or comes to something else.
    """
    names = ", ".join(repr(group.rows) for group in found.groups[:_SHOWN])
    with preserved(parts.device):
        expected = _gradients(parts, copied(parts.model))
        model = copied(parts.model)
        try:
            _split(model, found, parts.device)
            with spreading.as_one(parts.device):
                given = _gradients(parts, model)
        except Exception as error:
            raise PlanError(
                f"parallel=tensor can't run the model with {names} split: {blame(error)}", fix="use parallel=data"
            ) from error
    size = sum(float(value.norm()) ** 2 for value in expected.values()) ** 0.5
    for name, value in expected.items():
        off = float((given[name] - value).norm())
        if not off <= _ROUNDING * torch.finfo(value.dtype).eps * (float(value.norm()) + 0.01 * size):
            raise PlanError(
                f"the model comes to something else with {names} split: the gradient of {name!r} is off by {off:.2g}",
                expected="the same but for rounding",
                fix="use parallel=data",
            )


def _gradients(parts: Ingredients, model: nn.Module) -> dict[str, Tensor]:
    """Of each parameter that has one, whole, and the loss as `loss`."""
    batch = to_device(peek(parts.roles), parts.device)
    Streams(parts.task.seed, parts.device).reseed("look")
    loss = parts.compute(set_training(model, parts.in_eval), batch).loss
    loss.backward()
    of = {name: whole(value.grad) for name, value in model.named_parameters() if value.grad is not None}
    return of | {"loss": whole(loss.detach())}
