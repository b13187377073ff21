"""Check, for later batches, that the gradients of the ranks' rows add up to the gradient of the batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.core.random.rng import preserve_generators
from hotloop.data.batch_tree import flatten_tree, to_device
from hotloop.distributed.wrappers.global_batch_rng import DrawPattern
from hotloop.errors import describe_error
from hotloop.lowering.checks.batch_rows import later_difference_error
from hotloop.lowering.checks.later_batches import LaterBatches
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.object_state.attributes import preserve_attributes
from hotloop.lowering.steps.gradient_check import SEPARATE_LOSS_NOTE, find_difference
from hotloop.lowering.transforms.accumulation import pieces_error

_FIRST_DECISIONS = 64
"""Number of first steps before which the ranks decide together whether to compare the batch."""
_DECISION_INTERVAL = 16
"""Later steps between two such decisions, so that decisions take less than a hundredth of the time."""


class LaterGradients:
    """Compares batches that ranks share, before their steps; all ranks call `check` together.

    Args:
        parts: the context, with the model before an engine for ranks changes it.
        draws: the pattern of the model's random numbers.
        tried: whether the first batch was compared.
    """

    def __init__(self, parts: LoweringContext, draws: DrawPattern, *, tried: bool) -> None:
        self._parts, self._draws = parts, draws
        self._later = LaterBatches() if tried and not parts.world.is_single else None
        self._form = _copy_on_meta(parts.model) if parts.plan.parallel == "sharded" else None
        self._step, self._steps, self._due = -1, 0, False

    def check(self, batch: Any, rows: int, step: int, together: Callable[[], AbstractContextManager[None]]) -> None:
        """Compares a batch if a comparison is due.

        Args:
            batch: this rank's rows of the batch.
            rows: the number of these rows.
            step: the number of the step; an optimizer may call the loss several times in a step.
            together: a context in which the model has the parameters of all ranks.

        Raises:
            PartsDifferError: the ranks' gradients don't add up to that of the batch.
        """
        if self._later is None or step == self._step:
            return
        self._step, self._steps = step, self._steps + 1
        self._due = self._later.is_due(batch) or self._due
        if not self._is_decision_step or not self._all_due():
            return
        with self._later.time_comparison(), self._parts.meter.measure_waiting(), preserve_attributes(self._parts.task):
            name = self._compare(batch, rows, together)
        if name and self._parts.plan.parallel == "local":
            self._later = None
            self._parts.say(SEPARATE_LOSS_NOTE)
        elif name:
            what = f"parallel={self._parts.plan.parallel} changes the gradient of {name!r}"
            raise later_difference_error(pieces_error(what, "use parallel=none", norms=()), step)

    @property
    def _is_decision_step(self) -> bool:
        """Whether the ranks decide before this step; under `parallel=local` they decide at the beginning alone."""
        later = self._steps % _DECISION_INTERVAL == 0 and self._parts.plan.parallel != "local"
        return self._steps <= _FIRST_DECISIONS or later

    def _all_due(self) -> bool:
        with self._parts.meter.measure_waiting():  # the first ranks that arrive wait for the slowest one
            due, self._due = self._parts.world.all_reduce_max([int(self._due)])[0], False
        return bool(due)

    def _compare(self, batch: Any, rows: int, together: Callable[[], AbstractContextManager[None]]) -> str:
        """Returns the parameter whose gradient differs most; empty if none differs."""
        world = self._parts.world
        rank_rows = to_device(batch, torch.device("cpu")) if rows else None
        cut = [part for part in world.all_gather(rank_rows) if part is not None]
        with together():
            model = self._parts.model if self._form is None else _with_values_of(self._form, self._parts.model)
            result = self._difference(cut, model)  # on each rank, since a step may communicate
        untried, name = world.broadcast_object(lambda: result)
        if untried:
            self._later = None
            self._parts.say(f"parallel={self._parts.plan.parallel}: batches after the first aren't compared: {untried}")
        return name

    def _difference(self, cut: Sequence[Any], model: nn.Module) -> tuple[str, str]:
        """Returns why the comparison failed, and the parameter whose gradient differs most; both may be empty."""
        parts = replace(self._parts, model=model)
        try:
            with preserve_generators(*parts.devices):
                whole = to_device(_join_rows(cut), parts.device)
                return find_difference(parts, self._draws, whole, sum(map(_rows, cut)), len(cut))
        except Exception as error:
            return describe_error(error), ""


def _rows(batch: Any) -> int:
    leaves, _ = flatten_tree(batch)
    return len(leaves[0])


def _join_rows(cut: Sequence[Any]) -> Any:
    """Returns the whole batch, joined from the ranks' rows."""
    columns = zip(*(flatten_tree(part)[0] for part in cut), strict=True)
    _, unflatten = flatten_tree(cut[0])
    return unflatten(torch.cat(column) for column in columns)


def _copy_on_meta(model: nn.Module) -> nn.Module:
    """Returns a copy of the model whose parameters and buffers are on the meta device."""
    meta = {id(value): _to_meta(value) for value in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, meta)


def _to_meta(value: Tensor) -> Tensor:
    empty = torch.empty_like(value, device="meta")
    return nn.Parameter(empty, value.requires_grad) if isinstance(value, nn.Parameter) else empty


def _with_values_of(form: nn.Module, model: nn.Module) -> nn.Module:
    """Returns a copy of `form` with the numbers of `model`, whose parameters are unsharded."""
    copied = copy.deepcopy(form)
    for named in (nn.Module.named_parameters, nn.Module.named_buffers):
        values = dict(named(model))
        for name, value in named(copied):
            new = values[name].detach().clone()
            is_parameter = named is nn.Module.named_parameters
            torch.utils.swap_tensors(value, nn.Parameter(new, value.requires_grad) if is_parameter else new)
    return copied
