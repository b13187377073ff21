"""The accumulation axis: processes a batch in pieces, whose gradients add up to the gradient of the whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hotloop.core.task_parts.losses import weight_mean
from hotloop.core.task_parts.models import NotCopiedError, copy_model, set_training
from hotloop.core.torch_private import TorchDispatchMode, tree_leaves
from hotloop.data.batch_tree import map_tensors, tree_tensors
from hotloop.data.row_count import count_rows
from hotloop.errors import HotloopError, PlanError, describe_error
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.grouped_mm import float64_operation
from hotloop.lowering.losses.loss_calls import watch_losses
from hotloop.lowering.losses.loss_copy import Float64Mode, LossNotCopied, to_float64, widen_model
from hotloop.task import StepResult

Backward = Callable[[Tensor], Any]


def accumulate(parts: LoweringContext, model: nn.Module, batch: Any, samples: int, backward: Backward) -> StepResult:
    """Runs `backward` on each piece's share of the loss; returns the loss and scalars of the whole batch."""
    cut = list(split_batch(batch, count_rows(batch, samples).number, parts.plan.accumulation))
    weights = [float(parts.weigh(piece, size)) for piece, size in cut]
    loss: Any = 0.0
    scalars: dict[str, Any] = {}
    for (piece, _), weight in zip(cut, weights, strict=True):
        if not weight and any(weights):
            continue  # without counted targets the loss is a mean of nothing
        computed = parts.compute(model, piece)
        share = weight / (sum(weights) or 1.0)
        backward(computed.loss * share)
        loss = loss + computed.loss.detach() * share
        for name, value in computed.scalars.items():
            scalars[name] = scalars.get(name, 0.0) + value.detach() * share
    return StepResult(loss, None, scalars)


def accumulate_on_device(
    parts: LoweringContext, model: nn.Module, batch: Any, samples: int, backward: Callable[..., None]
) -> StepResult:
    """Like `accumulate`, but never reads a tensor's value, so that a step can be captured.

    Args:
        backward: gets also a 0-dim bool tensor if a piece's weight depends on its values; False means that the piece
            has no weight, so that its gradients, of a mean of nothing, must be dropped.
    """
    cut = list(split_batch(batch, count_rows(batch, samples).number, parts.plan.accumulation))
    weights = [parts.weigh(piece, size) for piece, size in cut]
    total: Any = sum(weights)
    loss: Any = 0.0
    scalars: dict[str, Any] = {}
    for (piece, _), weight in zip(cut, weights, strict=True):
        computed = parts.compute(model, piece)
        share = weight / total
        backward(computed.loss * share, weight > 0 if isinstance(weight, Tensor) else None)
        loss = loss + weight_mean(computed.loss.detach(), share)
        for name, value in computed.scalars.items():
            scalars[name] = scalars.get(name, 0.0) + weight_mean(value.detach(), share)
    return StepResult(loss, None, scalars)


def split_batch(batch: Any, samples: int, pieces: int) -> Iterator[tuple[Any, int]]:
    """Splits `batch` along its first dimension into at most `pieces` pieces of nearly equal size.

    Raises:
        PlanError: a part of the batch can't be split.
    """
    if uncut := part_without_rows(batch, samples):
        raise PlanError(
            f"accumulation={pieces}, and a batch holds {uncut}",
            expected=f"tensors whose first dimension counts the {samples} samples",
            fix="leave accumulation out, or give such a tensor that dimension",
        )
    for first, last in itertools.pairwise(piece_bounds(samples, pieces)):
        if first < last:
            yield map_tensors(lambda value, a=first, b=last: value[a:b], batch), last - first  # type: ignore[misc]


def part_without_rows(batch: Any, samples: int) -> str:
    """Describes the first tensor of a batch that can't be split; empty if there is none."""
    uncut = (value for value in tree_tensors(batch) if not value.ndim or len(value) != samples)
    return next((f"a tensor of shape {tuple(value.shape)} that has no row per sample" for value in uncut), "")


def piece_bounds(samples: int, pieces: int) -> list[int]:
    """Returns the start of each piece, and the end of the last; with few samples some pieces are empty."""
    return [samples * number // pieces for number in range(pieces + 1)]


def check_accumulation(parts: LoweringContext, batch: Any, samples: int) -> None:
    """Refuses a Task whose gradients change in the plan's pieces; see `check_pieces`."""
    pieces = parts.plan.accumulation
    check_pieces(parts, batch, samples, pieces, f"accumulation={pieces}", "leave accumulation out")


class ComparisonError(PlanError):
    """The gradients of a whole batch can't be computed for a comparison."""


def check_pieces(
    parts: LoweringContext, batch: Any, samples: int, pieces: int, asked: str, instead: str, wide: bool = True
) -> None:
    """Compares the gradients of one batch in pieces with those of the whole, with draws replaced by their means.

    Args:
        asked: the plan's setting that needs pieces.
        instead: what to do if the check fails.
        wide: in float64; else in the model's own dtypes, which any model supports, but which show less.

    Raises:
        PlanError: gradients differ, or a piece fails: a layer or the loss depends on the batch as a whole; or the
            model doesn't run in float64.
        NotCopied: the loss can't be copied.
    """
    whole: dict[str, Tensor] = {}
    roundings = RoundingBound()
    try:
        with roundings:
            whole = _copy_gradients(parts, batch, samples, 1, wide)
            cut = _copy_gradients(parts, batch, samples, pieces, wide)
    except NotCopiedError as error:
        raise PlanError(f"{asked} can't be checked: {error.given}", fix=instead) from error
    except (HotloopError, LossNotCopied):
        raise
    except Exception as error:
        if whole:
            what = f"{asked} fails in a piece of a batch ({describe_error(error)})"
            raise pieces_error(what, instead, _find_norms(parts)) from error
        raise ComparisonError(
            f"{asked} can't be checked{' in float64' * wide}: {describe_error(error)}",
            expected="a model that also runs in float64, without casts to a fixed dtype" if wide else "",
            fix=instead,
        ) from error
    if not all(bool(value.isfinite().all()) for value in whole.values()):
        return  # training itself reports gradients that aren't finite, with their place
    if (name := find_differing_parameter(whole, cut, None if wide else roundings.eps)) is not None:
        raise pieces_error(f"{asked} changes the gradient of {name!r}", instead, _find_norms(parts))


def find_differing_parameter(whole: dict[str, Tensor], cut: dict[str, Tensor], eps: float | None) -> str | None:
    """Returns the parameter whose gradients differ most, if the difference exceeds the error of another order of sums.

    Args:
        eps: the relative precision of the computation; None for float64.
    """

    def distance(name: str) -> float:
        norm = float((whole[name] - cut.get(name, torch.zeros_like(whole[name]))).norm())
        return math.inf if math.isnan(norm) else norm

    scale = max((float(value.norm()) for value in whole.values()), default=0.0)
    worst = max(whole, key=distance, default=None)
    # In float64 the order of a sum causes errors of about 1e-14; a dependence on the whole batch is far larger.
    close = 1e-8 if eps is None else min(0.1, _ROUNDING_FACTOR * eps)
    return None if worst is None or distance(worst) <= close * scale else worst


_NormModules = Sequence[tuple[str, nn.Module]]


def _find_norms(parts: LoweringContext) -> _NormModules:
    return [(name, module) for name, module in parts.model.named_modules() if isinstance(module, _BatchNorm)]


def pieces_error(what: str, instead: str, norms: _NormModules) -> PlanError:
    """Returns the error for a result that differs in pieces.

    Args:
        norms: batch norms of the model, which are the likely reason.
    """
    reason = (
        f"the layer {norms[0][0]!r} ({type(norms[0][1]).__name__}) normalises over the samples of its input"
        if norms
        else "the loss or a layer divides by a number that a piece counts differently than the whole batch"
    )
    return PlanError(
        f"{what}: {reason}",
        expected="a loss that is a mean over samples, and layers that compute each sample on its own",
        fix=instead + ("" if norms else ", or give the Task a weight(batch): what its loss divides by"),
    )


_ROUNDING_FACTOR = 1e4
"""Permitted error by the order of a sum, in units of eps."""


def _copy_gradients(parts: LoweringContext, batch: Any, samples: int, pieces: int, wide: bool) -> dict[str, Tensor]:
    model = set_training(copy_model(parts.model), parts.in_eval)
    if wide:
        widen_model(model)
        batch = map_tensors(lambda value: value.double() if value.is_floating_point() else to_float64(value), batch)
    plan, classes = parts.plan.with_axes(accumulation=pieces), bool(parts.task.classes or parts.splits.classes)
    with parts.with_copied_loss() as copied:
        copied = replace(copied, plan=plan)
        with MeanDraws(), Float64Mode() if wide else nullcontext(), watch_losses(model, batch, classes=classes):
            accumulate(copied, model, batch, samples, lambda loss: loss.backward())
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


class RoundingBound(TorchDispatchMode):
    """Records the lowest precision of a computation; a step may cast to bf16 and back.

    Attributes:
        eps: the relative precision of the lowest floating-point dtype that an operator returned.
    """

    eps = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                self.eps = max(self.eps, torch.finfo(value.dtype).eps)
        return result


class MeanDraws(TorchDispatchMode):
    """Replaces random draws by their means, so that computations with different draws can be compared.

    Attributes:
        unknown: an operator that draws without a known mean; empty if there was none.
    """

    unknown = ""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name == "bernoulli":
            return torch.full_like(args[0], args[1]) if len(args) > 1 else args[0].clone()
        if name == "bernoulli_":
            share = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            return args[0].copy_(share) if isinstance(share, Tensor) else args[0].fill_(share)
        if name == "normal_":
            return args[0].fill_(args[1] if len(args) > 1 else kwargs.get("mean", 0.0))
        if name == "uniform_":
            low = args[1] if len(args) > 1 else kwargs.get("from", 0.0)
            high = args[2] if len(args) > 2 else kwargs.get("to", 1.0)
            return args[0].fill_((low + high) / 2)
        result = float64_operation(function, args)(*args, **kwargs)
        if name in _DRAW_MEANS:
            return result.fill_(_DRAW_MEANS[name])
        if torch.Tag.nondeterministic_seeded in function.tags:
            self.unknown = name
        return result


_DRAW_MEANS = {"rand": 0.5, "rand_like": 0.5, "randn": 0.0, "randn_like": 0.0}
