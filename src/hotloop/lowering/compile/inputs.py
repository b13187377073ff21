"""The numbers of an optimizer's groups, such as learning rate and momentum: where they stand, and which of them change."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.core.state import tree_leaves
from hotloop.lowering.eager_step import EagerStep


class FixedScalarChanged(Exception):
    """A number of the optimizer's isn't what the captured step holds fixed; the message says which."""


class OptimizerScalars:
    """What a captured step takes of the optimizer's numbers.

    Args:
        cells: a float64 of shape () for each number that a schedule changes, by place, which the step reads.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, cells: dict[str, Tensor]) -> None:
        self.cells = cells
        self._optimizer = optimizer
        self._fixed = {place: value for place, value in scalars_by_place(optimizer).items() if place not in cells}
        self._seen: list[Any] = []

    def fill(self) -> None:
        """Gives the cells what the schedule says now; nothing to do where each setting is the very object that it was.

        Raises:
            Moved: it has changed what the step holds fixed.
        """
        groups = self._optimizer.param_groups
        now = [value for group in groups for key, value in group.items() if key != "params"]
        if len(now) == len(self._seen) and all(map(operator.is_, now, self._seen)):
            return
        for place, value in self.current_values().items():
            self.cells[place].fill_(value)
        self._seen = [] if any(map(_may_change, now)) else now

    def current_values(self) -> dict[str, float]:
        """What the schedule says now, by place, in the order of the cells.

        Raises:
            Moved: it has changed what the step holds fixed.
        """
        now = scalars_by_place(self._optimizer)
        varying = {place: now.pop(place) for place in self.cells}
        if now != self._fixed:
            place = next(place for place in now | self._fixed if now.get(place) != self._fixed.get(place))
            raise FixedScalarChanged(
                f"the optimizer's {place} is {now.get(place)}, and {self._fixed.get(place)} in the compiled step"
            )
        return varying


def scalars_by_place(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The numbers of an optimizer's groups by place, such as `0/lr` and `1/betas/0`, tensors of one element among them."""
    return {place: held.item() if isinstance(held, Tensor) else held for place, held in group_numbers(optimizer)}


def group_numbers(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """By place, what an optimizer's groups hold as one number: that, or a tensor of one element."""
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            several = isinstance(value, tuple | list) and key != "params"
            for place, item in enumerate(value) if several else [(None, value)]:
                if _is_one_number(item):
                    yield (f"{number}/{key}" if place is None else f"{number}/{key}/{place}"), item


def put_value(optimizer: torch.optim.Optimizer, place: str, value: Any) -> None:
    """Puts another value at a place."""
    number, key, *rest = place.split("/")
    group = optimizer.param_groups[int(number)]
    if rest:
        value = tuple(value if at == int(rest[0]) else item for at, item in enumerate(group[key]))
    group[key] = value


def _is_one_number(item: Any) -> bool:
    if isinstance(item, Tensor):
        return item.numel() == 1 and item.dtype != torch.bool and not item.is_complex()
    return isinstance(item, float) or (isinstance(item, int) and not isinstance(item, bool))


def _may_change(value: Any) -> bool:
    """Whether a setting may change and stay the object that it is."""
    return isinstance(value, list | Tensor) or (isinstance(value, tuple) and any(map(_may_change, value)))


StepTensors = dict[str, Any]


def step_tensors(step: EagerStep, hyper: dict[str, Tensor], *, whole: bool) -> StepTensors:
    """What a step reads and changes, by name: of the whole step, or of forward and backward alone."""
    model, loss = step.parts.model, step.parts.task.loss
    values: StepTensors = {
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


def tensors_by_place(values: StepTensors) -> dict[str, Tensor]:
    """The tensors of a step by place, such as `/state/fc.weight/exp_avg`, in the order of the step's."""
    return dict(tree_leaves(values))


def describe_mismatch(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """In what the tensors of a step aren't those that a program was made for; None where they are."""
    for place in {**expected, **found}:
        name = place.removeprefix("/")
        if place not in found:
            return f"there is no {name}, which the compiled step works on"
        if place not in expected:
            return f"there is {name}, of which the compiled step knows nothing"
        if not is_same_layout(found[place], expected[place]):
            return f"{name} has another shape, dtype or stride than in the compiled step"
    return None


def is_same_layout(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.stride() == other.stride()
