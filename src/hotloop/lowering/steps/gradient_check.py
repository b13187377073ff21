"""Whether the gradients of the ranks' rows add up to that of the batch: tried on a few samples, before training."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hotloop.core.random.rng import RandomStreams, preserve_generators
from hotloop.core.task_parts.model_copy import copy_model
from hotloop.core.task_parts.module_modes import set_training
from hotloop.data.batch_tree import map_tensors
from hotloop.data.feeds.feed import BatchTransform, open_feed
from hotloop.data.feeds.rank_rows import non_tensor_parts
from hotloop.distributed.wrappers.global_batch_rng import DrawPattern, GlobalBatchRng
from hotloop.distributed.wrappers.sync_batch_norm import backward_in_modes
from hotloop.errors import TaskError, describe_error, type_name
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.losses.float64_copy import Float64Mode, to_float64, widen_model
from hotloop.lowering.losses.loss_calls import watch_losses
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
"""A batch, and how many rows it has."""

SEPARATE_LOSS_NOTE = (
    "parallel=local: the loss or a layer looks at the batch as a whole, and each rank's at its rows alone"
)
"""What is said of ranks that train by themselves, each towards something else."""

_SAMPLES = 5
"""As few as make two shares of different sizes, each of several."""


def check_shares(parts: LoweringContext, draws: DrawPattern) -> bool:
    """Compares the gradient of a few samples with what two shares of them add up to; all ranks call it together.

    Batch norms keep to their running statistics, and random numbers are those of the whole, since ranks have both in
    common; where they draw numbers of their own, these are at their means. Where each rank trains by itself, and so
    towards something else, a line does.

    Args:
        draws: how the model draws random numbers.

    Returns:
        Whether they could be compared, and agree.

    Raises:
        PlanError: the loss, or a layer, looks at the batch as a whole.
    """
    asked = f"parallel={parts.plan.parallel}"
    found = _try_shares(parts, draws)  # on each rank, since a step may have something to say to the others
    untried, name = parts.world.broadcast_object(lambda: found)
    if untried:
        parts.say(f"{asked}: whether the ranks' gradients add up to that of one process couldn't be tried: {untried}")
    elif name and parts.plan.parallel == "local":
        parts.say(SEPARATE_LOSS_NOTE)
    elif name:
        raise pieces_error(f"{asked} changes the gradient of {name!r}", "use parallel=none", norms=())
    return not untried and not name


def _try_shares(parts: LoweringContext, draws: DrawPattern) -> tuple[str, str]:
    """Why it couldn't be tried, and else the parameter whose gradient differs; both empty where none does."""
    try:
        if any(isinstance(module, nn.SyncBatchNorm) for module in parts.model.modules()):
            return "a SyncBatchNorm looks at other ranks", ""
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
    """The first samples of the first batch, read once: a data set may give others when it is asked again."""
    order = parts.splits.order
    assert order is not None
    samples = min(order.batch_size, _SAMPLES)
    samples -= samples > 2 and samples % 2 == 0
    treatment = BatchTransform(parts.device, parts.task.seed, parts.splits.prepare)
    few = replace(order, batch_size=samples)
    return next(open_feed(parts.splits.train, few, treatment, workers=0, endless=False).epoch(0))


def _compare_shares(parts: LoweringContext, batch: Any, samples: int, draws: DrawPattern) -> tuple[str, str]:
    """What `_try_shares` returns, of a batch that can be cut."""
    means, seen = MeanDraws() if draws.odd else None, _DrawChecks()
    whole, cut = [(batch, samples)], list(split_batch(batch, samples, 2))
    one = _sum_gradients(parts, whole, draws, means, seen)
    elsewhere = RandomStreams(parts.task.seed, parts.device).has_drawn("look")
    again, several = (_sum_gradients(parts, shares, draws, means, seen) for shares in (whole, cut))
    if not all(bool(value.isfinite().all()) for value in one.values()):
        return "a gradient is NaN or infinite", ""
    if find_differing_parameter(one, again, seen.eps):
        return "the same samples give another gradient each time", ""
    name = find_differing_parameter(one, several, seen.eps) or ""
    if name and means is not None and means.unknown:
        return f"it draws by {means.unknown}", ""
    if name and elsewhere:
        return "it draws from NumPy's or Python's generator", ""
    if name and seen.own:
        return "it draws from a generator of its own", ""
    return "", name


def find_difference(
    parts: LoweringContext, draws: DrawPattern, batch: Any, samples: int, pieces: int
) -> tuple[str, str]:
    """What `_try_shares` returns, of a later batch in so many pieces.

    In float64 with draws at their means; where the model can't do that, in its own numbers with those of the whole.
    """
    whole, cut = [(batch, samples)], list(split_batch(batch, samples, pieces))
    if len(cut) < 2:
        return "", ""
    means, seen, eps = MeanDraws(), _DrawChecks(), None
    try:
        with Float64Mode():
            one, several = (_sum_gradients(parts, shares, draws, means, seen, wide=True) for shares in (whole, cut))
    except _LossFault:
        return "", ""
    except Exception:  # it casts to a dtype of its own
        means.unknown = means.unknown or "a dtype of its own"
    if means.unknown:
        means = MeanDraws() if draws.odd else None  # type: ignore[assignment]
        one, several = (_sum_gradients(parts, shares, draws, means, seen) for shares in (whole, cut))
        eps = seen.eps
    if means is not None and means.unknown:
        return f"it draws by {means.unknown}", ""
    if not all(bool(value.isfinite().all()) for value in one.values()):
        return "", ""  # training itself reports what isn't finite
    return "", find_differing_parameter(one, several, eps) or ""


def _sum_gradients(
    parts: LoweringContext,
    shares: Sequence[BatchShare],
    draws: DrawPattern,
    means: MeanDraws | None,
    seen: _DrawChecks,
    *,
    wide: bool = False,
) -> dict[str, Tensor]:
    """What the shares' gradients add up to under the plan's weights, by parameter, in the model's own numbers.

    Args:
        wide: in float64 instead.
    """
    weights = [float(parts.weigh(*share)) for share in shares]
    samples = sum(rows for _, rows in shares)
    whole = draws.has_draws and means is None
    total: dict[str, Tensor] = {}
    for number, ((batch, _), weight) in enumerate(zip(shares, weights, strict=True)):
        if not weight and any(weights):
            continue
        # Each has its own, since a forward pass may change a model, a loss or a batch.
        model = set_training(copy_model(parts.model), parts.in_eval)
        compute = _with_copied_loss(parts)
        rows = map_tensors(torch.clone, batch)
        if wide:
            model, rows = widen_model(model), map_tensors(to_float64, rows)
        for_all = partial(GlobalBatchRng, draws, samples, number, len(shares)) if whole else _no_context
        RandomStreams(parts.task.seed, parts.device).reseed("look")
        with seen, means or nullcontext():
            with for_all(in_order=True), _FixedNorms():
                loss = _check_loss_value(compute, model, rows)
            with for_all(in_order=False), _FixedNorms():
                backward_in_modes(loss * (weight / (sum(weights) or 1.0)))
        for name, value in model.named_parameters():
            if value.grad is not None:
                total[name] = total[name] + value.grad if name in total else value.grad
    return total


def _no_context(**_: Any) -> AbstractContextManager[Any]:
    return nullcontext()


def _with_copied_loss(parts: LoweringContext) -> Callable[[nn.Module, Any], StepResult]:
    """The Task's forward pass, in the model's own numbers; a loss may have buffers that training changes."""
    loss = parts.task.loss
    return (replace(parts.task, loss=copy.deepcopy(loss)) if isinstance(loss, nn.Module) else parts.task).compute


class _LossFault(Exception):
    """Something is wrong with the loss, of which the first step says what."""


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
    """Notes also whether anything is drawn from a generator that isn't one of torch's global ones."""

    own = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        generator = (kwargs or {}).get("generator")
        self.own = self.own or (generator is not None and generator is not torch.default_generator)
        return super().__torch_dispatch__(function, types, args, kwargs)


class _FixedNorms(TorchFunctionMode):
    """Has batch norms keep to what they know of their input before they see it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.batch_norm:
            return function(*args, **(kwargs or {}))
        given = inspect.signature(F.batch_norm).bind(*args, **(kwargs or {})).arguments
        channels = given["input"].new_ones(given["input"].shape[1])
        known = given | {"training": False}
        if given["running_mean"] is None:
            known |= {"running_mean": torch.zeros_like(channels), "running_var": channels}
        return F.batch_norm(**known)


def autograd_ancestors(values: Iterable[Tensor]) -> set[Any]:
    """The nodes of the graph from some tensors to the leaves that they depend on; none of tensors that need no gradient."""
    found: set[Any] = set()
    ahead: list[Any] = [value.grad_fn for value in values]
    while ahead:
        if (node := ahead.pop()) is not None and node not in found:
            found.add(node)
            ahead += [following for following, _ in node.next_functions]
    return found
