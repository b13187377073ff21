"""Check, in the first step and in later ones, that ranks compute the step of one process on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hotloop.core.random.rng import preserve_generators
from hotloop.core.task_parts.models import copy_model, set_training
from hotloop.data.batch_tree import flatten_tree, to_device
from hotloop.distributed.wrappers.global_batch_rng import DrawPattern
from hotloop.distributed.wrappers.sync_batch_norm import backward_in_modes
from hotloop.errors import PartsDifferError, PlanError, describe_error
from hotloop.lowering.checks.batch_rows import later_difference_error
from hotloop.lowering.checks.later_batches import LaterBatches
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.object_state.attributes import preserve_attributes
from hotloop.lowering.steps.gradient_check import SEPARATE_LOSS_NOTE, find_difference
from hotloop.lowering.transforms.accumulation import RoundingBound, find_differing_parameter, pieces_error

_FIRST_DECISIONS = 64
"""Number of first steps before which the ranks decide together whether to compare the batch."""
_DECISION_INTERVAL = 16
"""Later steps between two such decisions, so that decisions take less than a hundredth of the time."""


@dataclass(frozen=True)
class WholeStep:
    """What one process computes from the whole batch of a step, before the update.

    Attributes:
        step: the number of the step.
        loss, gradients, buffers: of the whole batch; gradients and buffers by name.
        eps: the relative precision of the computation.
        before: the buffers before the step.
    """

    step: int
    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    eps: float
    before: dict[str, Tensor]


class LaterGradients:
    """Compares batches that ranks share; all ranks call `check` and `compare` together.

    `check` compares shares of the batch by themselves before the step, which shows what a loss divides by. `compare`
    compares the ranks' own step, before its update, with the step of one process.

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
        self._sizes: set[int] = set()

    def check(
        self,
        batch: Any,
        sizes: tuple[int, int],
        step: int,
        together: Callable[[], AbstractContextManager[None]],
        seed: Callable[[], None] | None,
    ) -> WholeStep | None:
        """Compares a batch if a comparison is due; returns the whole step if the ranks' step must be compared, too.

        Args:
            batch: this rank's rows of the batch.
            sizes: the numbers of these rows and of the whole batch.
            step: the number of the step; an optimizer may call the loss several times in a step.
            together: a context in which the model has the parameters of all ranks.
            seed: seeds the generators for the step; None if ranks draw other numbers than one process.

        Raises:
            PartsDifferError: the ranks' rows aren't the batch, or their gradients don't add up to that of the batch.
        """
        if self._later is None or step == self._step:
            return None
        rows, samples = sizes
        self._step, self._steps = step, self._steps + 1
        is_new = samples not in self._sizes and self._parts.plan.parallel != "local"
        self._sizes.add(samples)
        self._due = self._later.is_due(batch) or self._due
        if not is_new and not (self._is_decision_step and self._all_due()):
            return None
        whole: WholeStep | None = None
        with self._later.time_comparison(), self._parts.meter.measure_waiting(), preserve_attributes(self._parts.task):
            cut = self._gather(batch, rows)
            if (found := sum(map(_rows, cut))) != samples:
                setting = f"parallel={self._parts.plan.parallel}"
                raise _step_error(f"{setting}: the ranks have {found} of the batch's {samples} samples", step)
            with together():
                model = self._parts.model if self._form is None else _with_values_of(self._form, self._parts.model)
                name = self._compare(cut, model) if self._steps > 1 else ""
                if not name and seed is not None and self._later is not None:
                    whole = self._whole_step(cut, model, step, seed)
        if name and self._parts.plan.parallel == "local":
            self._later = None
            self._parts.say(SEPARATE_LOSS_NOTE)
        elif name:
            what = f"parallel={self._parts.plan.parallel} changes the gradient of {name!r}"
            raise later_difference_error(pieces_error(what, "use parallel=none", norms=()), step)
        return whole

    def _whole_step(
        self, cut: Sequence[Any], model: nn.Module, step: int, seed: Callable[[], None]
    ) -> WholeStep | None:
        """Computes the step of one process on a copy of the model; None if that fails on any rank."""
        parts, result, why = self._parts, None, ""
        try:
            with preserve_generators(*parts.devices), parts.with_copied_loss() as own, RoundingBound() as rounding:
                one = set_training(copy_model(model) if self._form is None else model, parts.in_eval)
                before = {name: value.clone() for name, value in one.named_buffers()}
                batch = to_device(_join_rows(cut), parts.device)
                seed()
                loss = own.compute(one, batch).loss
                backward_in_modes(loss)
                gradients = {n: value.grad for n, value in one.named_parameters() if value.grad is not None}
                buffers = dict(one.named_buffers())
                result = WholeStep(step, loss.detach(), gradients, buffers, rounding.eps, before)
        except Exception as error:
            why = describe_error(error)
        whys = [one for one in parts.world.all_gather(why) if one]
        if whys:
            self._later = None
            parts.say(f"parallel={parts.plan.parallel}: steps aren't compared with those of one process: {whys[0]}")
            return None
        return result

    def compare(self, whole: WholeStep, holder: nn.Module, loss: Tensor, scale: float) -> None:
        """Compares the ranks' step, before clipping and update, with that of one process; a collective call.

        Args:
            holder: the module that has the gradients.
            scale: the factor of the gradients, as of fp16.

        Raises:
            PartsDifferError: loss, gradients or buffers differ by more than the rounding of another order of sums.
        """
        gradients = {
            name: _full(value.grad).to(whole.gradients[name].device) / scale
            for name, value in holder.named_parameters()
            if value.grad is not None and name in whole.gradients
        }
        buffers = {name: value for name, value in self._parts.model.named_buffers() if value.is_floating_point()}
        expected = {name: value for name, value in whole.buffers.items() if name in buffers}
        differs = ""
        if all(bool(value.isfinite().all()) for value in (whole.loss, *whole.gradients.values())):
            eps = None if whole.eps < _FLOAT64_EPS else whole.eps
            name = find_differing_parameter(whole.gradients, gradients, eps)
            share = _distance(gradients.get(name), whole.gradients[name]) if name else 0.0
            if name:
                differs = f"the gradient of {name!r} differs by {100 * share:.2g}% from that of one process"
            elif find_differing_parameter({"": whole.loss}, {"": loss.to(whole.loss)}, eps) is not None:
                differs = f"the loss is {float(loss):.6g}, and {float(whole.loss):.6g} in one process"
            else:
                changed = (n for n in expected if find_differing_parameter({n: expected[n]}, {n: buffers[n]}, eps))
                if buffer := next(changed, None):
                    differs = f"the buffer {buffer!r} differs from that of one process"
        if differs := self._parts.world.broadcast_object(lambda: differs):
            with torch.no_grad():
                for name, value in self._parts.model.named_buffers():
                    value.copy_(whole.before[name])
            raise _step_error(f"parallel={self._parts.plan.parallel}: {differs}", whole.step)

    @property
    def _is_decision_step(self) -> bool:
        """Whether the ranks decide before this step; under `parallel=local` they decide at the beginning alone."""
        later = self._steps % _DECISION_INTERVAL == 0 and self._parts.plan.parallel != "local"
        return self._steps <= _FIRST_DECISIONS or later

    def _all_due(self) -> bool:
        with self._parts.meter.measure_waiting():  # the first ranks that arrive wait for the slowest one
            due, self._due = self._parts.world.all_reduce_max([int(self._due)])[0], False
        return bool(due)

    def _gather(self, batch: Any, rows: int) -> list[Any]:
        """Returns the rows of each rank that has some, on the CPU."""
        rank_rows = to_device(batch, torch.device("cpu")) if rows else None
        return [part for part in self._parts.world.all_gather(rank_rows) if part is not None]

    def _compare(self, cut: Sequence[Any], model: nn.Module) -> str:
        """Returns the parameter whose gradient differs most; empty if none differs."""
        result = self._difference(cut, model)  # on each rank, since a step may communicate
        untried, name = self._parts.world.broadcast_object(lambda: result)
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
    memo: dict[int, Any] = {}
    for named in (nn.Module.named_parameters, nn.Module.named_buffers):
        values = dict(named(model))
        for name, value in named(form):
            new = values[name].detach().clone()
            memo[id(value)] = nn.Parameter(new, value.requires_grad) if isinstance(value, nn.Parameter) else new
    return copy.deepcopy(form, memo)


_FLOAT64_EPS = 1e-12
"""An eps below this is float64's."""


def _full(gradient: Tensor) -> Tensor:
    """Returns the whole of a gradient that ranks share by parts."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _distance(found: Tensor | None, expected: Tensor) -> float:
    return 1.0 if found is None else float((found - expected).norm() / expected.norm())


def _step_error(what: str, step: int) -> PartsDifferError:
    error = PlanError(what, expected="the step of one process, within rounding", fix="use parallel=none")
    return later_difference_error(error, step)
