"""Checks that ranks compute the step of one process on the whole batch.

Before training, the gradients of two shares of a few samples must add up to the gradient of the samples. In the first step and
in later ones, the step of all ranks is compared with the same step of one process.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from hotloop.core.random.rng import RandomStreams, preserve_generators
from hotloop.core.task_parts.models import copy_model, set_training
from hotloop.data.batch_tree import flatten_tree, map_tensors, to_device
from hotloop.data.feeds.feed import BatchTransform, open_feed
from hotloop.data.feeds.rank_rows import non_tensor_parts
from hotloop.distributed.wrappers.global_batch_rng import DrawPattern, GlobalBatchRng
from hotloop.distributed.wrappers.sync_batch_norm import backward_in_modes
from hotloop.errors import PartsDifferError, PlanError, TaskError, describe_error, type_name
from hotloop.lowering.checks.batch_rows import LaterBatches, later_difference_error
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.losses.loss_calls import watch_losses
from hotloop.lowering.losses.loss_copy import Float64Mode, to_float64, widen_model
from hotloop.lowering.object_state.attributes import preserve_attributes
from hotloop.lowering.transforms.accumulation import (
    MeanDraws,
    RoundingBound,
    find_differing_parameter,
    part_without_rows,
    pieces_error,
    split_batch,
)
from hotloop.task import StepResult

BatchShare = tuple[Any, int]
"""A batch, and its number of rows."""

SEPARATE_LOSS_NOTE = (
    "parallel=local: the loss or a layer computes with the whole batch, and each rank computes it on its own rows"
)
"""Note for ranks that train by themselves, each on another objective."""

_SAMPLES = 5
"""The fewest samples that make two shares of different sizes, each of several."""


def check_shares(parts: LoweringContext, draws: DrawPattern) -> bool:
    """Compares the gradient of a few samples with the sum over two shares of them; a collective call.

    Batch norms use running statistics, and random numbers are those of the whole batch, since ranks share both; other
    draws are replaced by their means. With parallel=local a difference is only a note.

    Args:
        draws: the pattern of the model's random draws.

    Returns:
        Whether the comparison worked, and the gradients agree.

    Raises:
        PlanError: the loss, or a layer, depends on the batch as a whole.
    """
    setting = f"parallel={parts.plan.parallel}"
    result = _try_shares(parts, draws)  # on each rank, since a step may communicate
    untried, name = parts.world.broadcast_object(lambda: result)
    if untried:
        parts.say(
            f"{setting}: the comparison of the ranks' gradients with that of one process failed to run: {untried}"
        )
    elif name and parts.plan.parallel == "local":
        parts.say(SEPARATE_LOSS_NOTE)
    elif name:
        raise pieces_error(f"{setting} changes the gradient of {name!r}", "use parallel=none", norms=())
    return not untried and not name


def _try_shares(parts: LoweringContext, draws: DrawPattern) -> tuple[str, str]:
    """Returns why the comparison failed, and the parameter whose gradient differs; both empty if gradients agree."""
    try:
        if any(isinstance(module, nn.SyncBatchNorm) for module in parts.model.modules()):
            return "a SyncBatchNorm reads the batches of other ranks", ""
        with preserve_generators(parts.device):
            batch, samples = _first_samples(parts)
            if samples < 2:
                return "", ""
            if uncut := part_without_rows(batch, samples) or next(map(type_name, non_tensor_parts(batch)), ""):
                return f"a batch holds {uncut}", ""
            return _compare_shares(parts, batch, samples, draws)
    except _LossFault:
        return "", ""
    except Exception as error:
        return describe_error(error), ""


def _first_samples(parts: LoweringContext) -> BatchShare:
    """Returns the first samples of the first batch, read once: a second read may give others."""
    order = parts.splits.order
    assert order is not None
    samples = min(order.batch_size, _SAMPLES)
    samples -= samples > 2 and samples % 2 == 0
    treatment = BatchTransform(parts.device, parts.task.seed, parts.splits.prepare)
    few = replace(order, batch_size=samples)
    return next(open_feed(parts.splits.train, few, treatment, workers=0, endless=False).epoch(0))


def _compare_shares(parts: LoweringContext, batch: Any, samples: int, draws: DrawPattern) -> tuple[str, str]:
    """Returns the same as `_try_shares`, for a batch that can be split."""
    means, checks = MeanDraws() if draws.odd else None, _DrawChecks()
    whole, cut = [(batch, samples)], list(split_batch(batch, samples, 2))
    first = _sum_gradients(parts, whole, draws, means, checks)
    draws_outside_torch = RandomStreams(parts.task.seed, parts.device).has_drawn("look")
    second, split = (_sum_gradients(parts, shares, draws, means, checks) for shares in (whole, cut))
    if not all(bool(value.isfinite().all()) for value in first.values()):
        return "a gradient is NaN or infinite", ""
    if find_differing_parameter(first, second, checks.eps):
        return "the same samples give another gradient each time", ""
    name = find_differing_parameter(first, split, checks.eps) or ""
    if name and means is not None and means.unknown:
        return f"it draws by {means.unknown}", ""
    if name and draws_outside_torch:
        return "it draws from NumPy's or Python's generator", ""
    if name and checks.has_own_generator:
        return "it draws from a generator of its own", ""
    return "", name


def find_difference(
    parts: LoweringContext, draws: DrawPattern, batch: Any, samples: int, pieces: int
) -> tuple[str, str]:
    """Returns the same as `_try_shares`, for a later batch in `pieces` pieces.

    In float64 with draws at their means; if the model can't run so, in its own dtype with the whole batch's draws.
    """
    whole, cut = [(batch, samples)], list(split_batch(batch, samples, pieces))
    if len(cut) < 2:
        return "", ""
    means, checks, eps = MeanDraws(), _DrawChecks(), None
    try:
        with Float64Mode():
            joint, split = (_sum_gradients(parts, shares, draws, means, checks, wide=True) for shares in (whole, cut))
    except _LossFault:
        return "", ""
    except Exception:  # the model casts to a fixed dtype
        means.unknown = means.unknown or "a dtype of its own"
    if means.unknown:
        means = MeanDraws() if draws.odd else None  # type: ignore[assignment]
        joint, split = (_sum_gradients(parts, shares, draws, means, checks) for shares in (whole, cut))
        eps = checks.eps
    if means is not None and means.unknown:
        return f"it draws by {means.unknown}", ""
    if not all(bool(value.isfinite().all()) for value in joint.values()):
        return "", ""  # training itself reports gradients that aren't finite
    return "", find_differing_parameter(joint, split, eps) or ""


def _sum_gradients(
    parts: LoweringContext,
    shares: Sequence[BatchShare],
    draws: DrawPattern,
    means: MeanDraws | None,
    checks: _DrawChecks,
    *,
    wide: bool = False,
) -> dict[str, Tensor]:
    """Returns the weighted sum of the shares' gradients by parameter, in the model's own dtypes or in float64."""
    weights = [float(parts.weigh(*share)) for share in shares]
    samples = sum(rows for _, rows in shares)
    shares_draws = draws.has_draws and means is None
    total: dict[str, Tensor] = {}
    for number, ((batch, _), weight) in enumerate(zip(shares, weights, strict=True)):
        if not weight and any(weights):
            continue
        # a forward pass may change model, loss and batch
        model = set_training(copy_model(parts.model), parts.in_eval)
        compute = _with_copied_loss(parts)
        rows = map_tensors(torch.clone, batch)
        if wide:
            model, rows = widen_model(model), map_tensors(to_float64, rows)
        rng = partial(GlobalBatchRng, draws, samples, number, len(shares)) if shares_draws else _no_context
        RandomStreams(parts.task.seed, parts.device).reseed("look")
        with checks, means or nullcontext():
            with rng(in_order=True), _FixedNorms():
                loss = _check_loss_value(compute, model, rows)
            with rng(in_order=False), _FixedNorms():
                backward_in_modes(loss * (weight / (sum(weights) or 1.0)))
        for name, value in model.named_parameters():
            if value.grad is not None:
                total[name] = total[name] + value.grad if name in total else value.grad
    return total


def _no_context(**_: Any) -> AbstractContextManager[Any]:
    return nullcontext()


def _with_copied_loss(parts: LoweringContext) -> Callable[[nn.Module, Any], StepResult]:
    """Returns the Task's forward pass in the model's dtypes, with a copied loss, whose buffers may change."""
    loss = parts.task.loss
    return (replace(parts.task, loss=copy.deepcopy(loss)) if isinstance(loss, nn.Module) else parts.task).compute


class _LossFault(Exception):
    """The loss is faulty; the first step reports the error."""


def _check_loss_value(compute: Callable[[nn.Module, Any], StepResult], model: nn.Module, batch: Any) -> Tensor:
    try:
        with watch_losses(model, batch, classes=False):
            loss = compute(model, batch).loss
    except TaskError as error:
        raise _LossFault from error
    if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
        raise _LossFault
    return loss


class _DrawChecks(RoundingBound):
    """Records also draws from a generator other than torch's global ones."""

    has_own_generator = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (kwargs or {}).get("generator") not in (None, torch.default_generator):
            self.has_own_generator = True
        return super().__torch_dispatch__(function, types, args, kwargs)


class _FixedNorms(TorchFunctionMode):
    """Makes batch norms use running statistics, or mean 0 and variance 1 if they have none."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.batch_norm:
            return function(*args, **(kwargs or {}))
        arguments = inspect.signature(F.batch_norm).bind(*args, **(kwargs or {})).arguments | {"training": False}
        if arguments["running_mean"] is None:
            ones = arguments["input"].new_ones(arguments["input"].shape[1])
            arguments |= {"running_mean": torch.zeros_like(ones), "running_var": ones}
        return F.batch_norm(**arguments)


def autograd_ancestors(values: Iterable[Tensor]) -> set[Any]:
    """Returns all nodes of the autograd graph from some tensors back to the leaves."""
    ancestors: set[Any] = set()
    pending: list[Any] = [value.grad_fn for value in values]
    while pending:
        if (node := pending.pop()) is not None and node not in ancestors:
            ancestors.add(node)
            pending += [function for function, _ in node.next_functions]
    return ancestors


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
