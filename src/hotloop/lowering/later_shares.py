"""Whether the gradients of the ranks' rows add up to that of the batch, for batches after the first."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.data.tree import flatten, to_device
from hotloop.errors import blame
from hotloop.lowering.accumulation import not_in_pieces
from hotloop.lowering.batch_checks import differs_later
from hotloop.lowering.ingredients import Ingredients
from hotloop.lowering.later_batches import LaterBatches
from hotloop.lowering.shares import differing
from hotloop.rng import preserved

_AGREED = 64
"""Steps at the beginning before each of which the ranks agree whether to compare its batch."""
_AGREED_EVERY = 16
"""Steps between two such agreements later, so that they take no hundredth of the time."""


class LaterShares:
    """Compares batches that ranks share, before their steps; all ranks call it together.

    Args:
        parts: with the model before an engine for ranks changes it.
        tried: whether the first batch could be compared.
    """

    def __init__(self, parts: Ingredients, *, tried: bool) -> None:
        self._parts = parts
        self._later = LaterBatches() if tried and not parts.world.alone else None
        self._form = _without_numbers(parts.model) if parts.plan.parallel == "sharded" else None
        self._step, self._seen, self._due = -1, 0, False

    def check(self, batch: Any, rows: int, step: int, together: Callable[[], AbstractContextManager[None]]) -> None:
        """Compares the batch of which this rank has so many rows, if that is due.

        Args:
            step: number of the step; an optimizer may call the loss several times in one.
            together: brings the parameters of all ranks together.

        Raises:
            PartsDifferError: the ranks' gradients don't add up to that of the batch.
        """
        if self._later is None or step == self._step:
            return
        self._step, self._seen = step, self._seen + 1
        self._due = self._later.is_due(batch) or self._due
        if self._parts.plan.parallel == "local":
            self._check_own(batch, rows)
        elif (self._seen <= _AGREED or self._seen % _AGREED_EVERY == 0) and self._all_due():
            with self._later.comparing(), self._parts.meter.waiting():
                name = self._compared(batch, rows, together)
            if name:
                error = not_in_pieces(self._what(name), "use parallel=none", norms=())
                raise differs_later(error, step)

    def _all_due(self) -> bool:
        due, self._due = self._parts.world.largest([int(self._due)])[0], False
        return bool(due)

    def _what(self, name: str) -> str:
        return f"parallel={self._parts.plan.parallel} changes the gradient of {name!r}"

    def _check_own(self, batch: Any, rows: int) -> None:
        """Of ranks that train by themselves each has a batch of its own, so that a difference is said and no more."""
        if not self._due or rows < 2 or self._later is None:
            return
        self._due = False
        with self._later.comparing():
            found = self._difference([batch], self._parts.model, pieces=2)
        if found:
            self._later = None
            self._parts.say(
                "parallel=local: the loss or a layer looks at the batch as a whole, and each rank's at its rows alone"
            )

    def _compared(self, batch: Any, rows: int, together: Callable[[], AbstractContextManager[None]]) -> str:
        """The parameter whose gradient differs most; empty where none does."""
        world = self._parts.world
        cut = [
            part for part in world.gathered(to_device(batch, torch.device("cpu")) if rows else None) if part is not None
        ]
        if self._form is None:
            return world.from_first(lambda: self._difference(cut, self._parts.model, len(cut)))
        with together():
            model = _filled(self._form, self._parts.model) if world.first else None
            found = self._difference(cut, model, len(cut)) if model is not None else ""
        return world.from_first(lambda: found)

    def _difference(self, cut: Sequence[Any], model: nn.Module, pieces: int) -> str:
        parts = replace(self._parts, model=model)
        try:
            with preserved(*parts.devices):
                whole = to_device(_joined(cut), parts.device)
                untried, name = differing(parts, whole, sum(map(_rows, cut)), pieces)
        except Exception as error:
            untried, name = blame(error), ""
        if untried:
            self._later = None
            parts.say(f"parallel={parts.plan.parallel}: batches after the first aren't compared: {untried}")
        return name


def _rows(batch: Any) -> int:
    leaves, _ = flatten(batch)
    return len(leaves[0])


def _joined(cut: Sequence[Any]) -> Any:
    """The batch of which each rank has some rows."""
    columns = zip(*(flatten(part)[0] for part in cut), strict=True)
    _, unflatten = flatten(cut[0])
    return unflatten(torch.cat(column) for column in columns)


def _without_numbers(model: nn.Module) -> nn.Module:
    """The model without memory for its parameters and buffers."""
    meta = {id(value): _on_meta(value) for value in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, meta)


def _on_meta(value: Tensor) -> Tensor:
    empty = torch.empty_like(value, device="meta")
    return nn.Parameter(empty, value.requires_grad) if isinstance(value, nn.Parameter) else empty


def _filled(form: nn.Module, model: nn.Module) -> nn.Module:
    """A model with the numbers of another one, whose parameters are whole."""
    made = copy.deepcopy(form)
    for named in (nn.Module.named_parameters, nn.Module.named_buffers):
        values = dict(named(model))
        for name, value in named(made):
            own = values[name].detach().clone()
            torch.utils.swap_tensors(
                value, nn.Parameter(own, value.requires_grad) if named is nn.Module.named_parameters else own
            )
    return made
