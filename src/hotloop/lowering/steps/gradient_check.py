"""Checks on a few samples, before training, that the gradients of the ranks' rows add up to the batch's gradient."""

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
from hotloop.core.task_parts.models import copy_model, set_training
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
