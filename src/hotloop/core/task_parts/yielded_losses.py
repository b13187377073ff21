"""The losses that the `step` of a Task with several optimizers yields, one per update."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotloop.errors import TaskError, type_name

_FORM = "(name, loss) or (name, loss, {'figure': value}), with the name of an optimizer"


class YieldedLoss(NamedTuple):
    """One yielded update: the optimizer's name, the loss (0-dim) and further scalars."""

    name: str
    loss: Tensor
    scalars: dict[str, Tensor]


class YieldedLosses:
    """Runs a step's generator from loss to loss, and collects the yielded and returned scalars."""

    def __init__(self, generator: Generator[Any, Any, Any]) -> None:
        self._generator = generator
        self._losses: dict[str, list[Tensor]] = {}
        self._scalars: dict[str, list[Tensor]] = {}

    def __iter__(self) -> Iterator[YieldedLoss]:
        while True:
            try:
                yielded = next(self._generator)
            except StopIteration as end:
                self._note(named_scalars({} if end.value is None else end.value))
                return
            turn = _parse_yield(yielded)
            yield turn
            self._losses.setdefault(turn.name, []).append(turn.loss.detach())
            self._note(turn.scalars)

    def _note(self, scalars: Mapping[str, Tensor]) -> None:
        for name, value in scalars.items():
            self._scalars.setdefault(name, []).append(value.detach())

    def figures(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the batch's loss and its scalars.

        The scalars are `<name>_loss`, the mean of the losses of each optimizer, and the step's own scalars. The batch's
        loss is the sum of the means.

        Raises:
            TaskError: the step yielded no loss, or gave a scalar the name of an optimizer's loss.
        """
        if not self._losses:
            raise TaskError("step yielded no loss", expected=_FORM, fix="yield one for each update")
        losses = {f"{name}_loss": _mean_scalars(values) for name, values in self._losses.items()}
        for name in losses.keys() & self._scalars.keys():
            raise TaskError(f"step gave {name!r}, which hotloop reports itself", expected="another name")
        others = {name: _mean_scalars(values) for name, values in self._scalars.items()}
        return sum(losses.values(), start=torch.zeros_like(next(iter(losses.values())))), losses | others


def sum_for_evaluation(generator: Generator[Any, Any, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Runs a step's generator without updates; returns the loss and the scalars.

    Gradients are enabled, because a loss may contain the gradient of another loss.
    """
    turns = YieldedLosses(generator)
    with torch.enable_grad(), closing(generator):
        for _ in turns:
            pass
    return turns.figures()


def named_scalars(figures: Any) -> dict[str, Tensor]:
    """Returns a step's own scalars as 0-dim tensors.

    Raises:
        TaskError: `figures` is no mapping of single numbers, or a name is reserved for hotloop.
    """
    if not isinstance(figures, Mapping):
        raise TaskError(f"step gave {type_name(figures)} beside the losses", expected="a dict of name -> number")
    scalars = {name: torch.as_tensor(value) for name, value in figures.items()}
    for name, value in scalars.items():
        if value.ndim:
            raise TaskError(
                f"step returned {name!r} of shape {tuple(value.shape)}", expected="single numbers beside the loss"
            )
        if name in ("loss", "weight", "samples"):
            fix = f"give it another name, such as 'mean_{name}'"
            raise TaskError(f"step returned {name!r}, which hotloop counts itself", expected="another name", fix=fix)
    return scalars


def _parse_yield(yielded: Any) -> YieldedLoss:
    if not isinstance(yielded, tuple) or len(yielded) not in (2, 3) or not isinstance(yielded[0], str):
        what = f"({', '.join(map(type_name, yielded))})" if isinstance(yielded, tuple) else type_name(yielded)
        raise TaskError(f"step yielded {what}", expected=_FORM)
    name, loss, *more = yielded
    if not isinstance(loss, Tensor) or loss.ndim:
        raise TaskError(
            f"the loss yielded for {name!r} is "
            + (f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type_name(loss)),
            expected="a 0-dim tensor to differentiate",
            fix="yield the mean over the batch",
        )
    return YieldedLoss(name, loss, named_scalars(more[0]) if more else {})


def _mean_scalars(values: list[Tensor]) -> Tensor:
    if len(values) == 1:
        return values[0]
    whole = torch.stack(values)
    return whole.mean(dtype=None if whole.is_floating_point() else torch.get_default_dtype())
