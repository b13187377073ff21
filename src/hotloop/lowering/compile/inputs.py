"""The inputs of a captured step: its tensors by name, and the numbers of the optimizer's groups."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.core.state import tree_leaves
from hotloop.lowering.eager_step import EagerStep


class FixedScalarChanged(Exception):
    """A number of the optimizer differs from the constant in the captured step; the message names the number."""


class OptimizerScalars:
    """The optimizer's numbers that a captured step reads.

    Args:
        cells: a float64 of shape () for each number that a schedule changes, by place.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, cells: dict[str, Tensor]) -> None:
        self.cells = cells
        self._optimizer = optimizer
        self._fixed = {place: value for place, value in scalars_by_place(optimizer).items() if place not in cells}
        self._settings: list[Any] = []

    def fill(self) -> None:
        """Writes the schedule's current numbers into the cells; does nothing if each setting is the same object.

        Raises:
            FixedScalarChanged: a number that is a constant in the step has changed.
        """
        groups = self._optimizer.param_groups
        now = [value for group in groups for key, value in group.items() if key != "params"]
        if len(now) == len(self._settings) and all(map(operator.is_, now, self._settings)):
            return
        for place, value in self.current_values().items():
            self.cells[place].fill_(value)
        self._settings = [] if any(map(_may_change, now)) else now

    def current_values(self) -> dict[str, float]:
        """Returns the schedule's current numbers by place, in the order of the cells.

        Raises:
            FixedScalarChanged: a number that is a constant in the step has changed.
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
    """Returns the numbers of an optimizer's groups by place, such as `0/lr` and `1/betas/0`."""
    return {place: value.item() if isinstance(value, Tensor) else value for place, value in group_numbers(optimizer)}


def group_numbers(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Yields place and value of each number in an optimizer's groups; the value may be a tensor of one element."""
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            several = isinstance(value, tuple | list) and key != "params"
            for place, item in enumerate(value) if several else [(None, value)]:
                if _is_one_number(item):
                    yield (f"{number}/{key}" if place is None else f"{number}/{key}/{place}"), item


def put_value(optimizer: torch.optim.Optimizer, place: str, value: Any) -> None:
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
    """Whether a setting is mutable."""
    return isinstance(value, list | Tensor) or (isinstance(value, tuple) and any(map(_may_change, value)))


StepTensors = dict[str, Any]


def step_tensors(step: EagerStep, hyper: dict[str, Tensor], *, whole: bool) -> StepTensors:
    """Returns the tensors that a step reads and changes, by name: of the whole step, or of forward and backward."""
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
    """Returns the state in the order of the model and of sorted keys: the optimizer's order may change on resume."""
    state, model = step.optimizer.state, step.parts.model
    by_name = {name: state[value] for name, value in model.named_parameters() if value in state}
    return {
        name: {key: entry[key] for key in sorted(entry, key=str) if isinstance(entry[key], Tensor)}
        for name, entry in by_name.items()
    }


def tensors_by_place(values: StepTensors) -> dict[str, Tensor]:
    """Returns the tensors of a step by place, such as `/state/fc.weight/exp_avg`, in the step's order."""
    return dict(tree_leaves(values))


def describe_mismatch(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """Returns how the tensors of a step differ from those of the compiled program; None if they fit."""
    for place in {**expected, **found}:
        name = place.removeprefix("/")
        if place not in found:
            return f"there is no {name}, which the compiled step uses"
        if place not in expected:
            return f"there is {name}, which the compiled step doesn't have"
        if not is_same_layout(found[place], expected[place]):
            return f"{name} has another shape, dtype or stride than in the compiled step"
    return None


def is_same_layout(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.stride() == other.stride()
