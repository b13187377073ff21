"""The accumulation axis: a batch in pieces, whose gradients add up to those of the whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hotloop.core.task_parts.loss_info import weight_mean
from hotloop.core.task_parts.model_copy import NotCopiedError, copy_model
from hotloop.core.task_parts.module_modes import set_training
from hotloop.data.batch_tree import map_tensors, tree_tensors
from hotloop.data.row_count import count_rows
from hotloop.errors import HotloopError, PlanError, describe_error
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.grouped_mm import float64_operation
from hotloop.lowering.losses.float64_copy import Float64Mode, to_float64, widen_model
from hotloop.lowering.losses.loss_calls import watch_losses
from hotloop.lowering.losses.loss_copy import LossNotCopied
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
            continue  # none of its targets count: its loss is a mean of nothing
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
    """The same without asking for a tensor's value, so that it can be captured.

    Args:
        backward: also gets a 0-dim bool tensor where what a piece counts depends on the values in it; False if it
            counts nothing, so that its gradients, of a mean of nothing, are to be left out.
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
    """`batch` cut along its first dimension into at most so many pieces of nearly equal size.

    Raises:
        PlanError: it holds something that can't be cut.
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
    """The first tensor of a batch that can't be cut; empty if there is none."""
    uncut = (value for value in tree_tensors(batch) if not value.ndim or len(value) != samples)
    return next((f"a tensor of shape {tuple(value.shape)} that has no row per sample" for value in uncut), "")


def piece_bounds(samples: int, pieces: int) -> list[int]:
    """Where pieces begin, and the last one ends; some have no sample where there are too few."""
    return [samples * number // pieces for number in range(pieces + 1)]


def check_accumulation(parts: LoweringContext, batch: Any, samples: int) -> None:
    """Refuses what comes out otherwise in the plan's pieces, see `check_pieces`."""
    pieces = parts.plan.accumulation
    check_pieces(parts, batch, samples, pieces, f"accumulation={pieces}", "leave accumulation out")


class ComparisonError(PlanError):
    """The gradients of a batch as a whole can't be computed beside training."""


def check_pieces(
    parts: LoweringContext, batch: Any, samples: int, pieces: int, asked: str, instead: str, wide: bool = True
) -> None:
    """Compares the gradients of one batch in pieces with those of the whole, with draws at their means.

    Args:
        asked: for what, as the plan has it.
        instead: what to do where it can't be had.
        wide: in float64; else in the model's own numbers, which each model can, and which show less.

    Raises:
        PlanError: they differ, or a piece can't be run: a layer or the loss looks at the batch as a whole; or float64 is
            not for this model.
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
            expected="a model that runs in float64 too, which casts to no dtype of its own" if wide else "",
            fix=instead,
        ) from error
    if not all(bool(value.isfinite().all()) for value in whole.values()):
        return  # training itself reports what isn't finite, and where
    if (name := find_differing_parameter(whole, cut, None if wide else roundings.eps)) is not None:
        raise pieces_error(f"{asked} changes the gradient of {name!r}", instead, _find_norms(parts))


def find_differing_parameter(whole: dict[str, Tensor], cut: dict[str, Tensor], eps: float | None) -> str | None:
    """The parameter whose gradients differ most, if that is more than the order of a sum can make of it.

    Args:
        eps: the last bit of the numbers that they were computed in, relative to 1; None if all was in float64.
    """

    def distance(name: str) -> float:
        found = float((whole[name] - cut.get(name, torch.zeros_like(whole[name]))).norm())
        return math.inf if math.isnan(found) else found

    scale = max((float(value.norm()) for value in whole.values()), default=0.0)
    worst = max(whole, key=distance, default=None)
    # The order of a sum is worth some of the last bits, in float64 1e-14 or so; what looks at the whole batch shows orders
    # of magnitude above.
    close = 1e-8 if eps is None else min(0.1, _ROUNDING_FACTOR * eps)
    return None if worst is None or distance(worst) <= close * scale else worst


_NormModules = Sequence[tuple[str, nn.Module]]


def _find_norms(parts: LoweringContext) -> _NormModules:
    return [(name, module) for name, module in parts.model.named_modules() if isinstance(module, _BatchNorm)]


def pieces_error(what: str, instead: str, norms: _NormModules) -> PlanError:
    """The error for what comes out otherwise in pieces.

    Args:
        norms: batch norms that are to blame, if there are any.
    """
    reason = (
        f"the layer {norms[0][0]!r} ({type(norms[0][1]).__name__}) normalises over the samples that it sees"
        if norms
        else "the loss or a layer divides by something that a piece counts otherwise than the whole batch"
    )
    return PlanError(
        f"{what}: {reason}",
        expected="a loss that is a mean over samples, and layers that look at each sample alone",
        fix=instead + ("" if norms else ", or give the Task a weight(batch): what its loss divides by"),
    )


_ROUNDING_FACTOR = 1e4
"""Last bits of a number that the order of a sum may be worth."""


def _copy_gradients(parts: LoweringContext, batch: Any, samples: int, pieces: int, wide: bool) -> dict[str, Tensor]:
    model = set_training(copy_model(parts.model), parts.in_eval)
    if wide:
        widen_model(model)
        batch = map_tensors(lambda value: value.double() if value.is_floating_point() else to_float64(value), batch)
    plan, classes = parts.plan.with_axes(accumulation=pieces), bool(parts.task.classes or parts.splits.classes)
    with parts.with_copied_loss() as own:
        cut = LoweringContext(**{**vars(own), "plan": plan})
        with MeanDraws(), Float64Mode() if wide else nullcontext(), watch_losses(model, batch, classes=classes):
            accumulate(cut, model, batch, samples, lambda loss: loss.backward())
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


class RoundingBound(TorchDispatchMode):
    """Notes how narrow the numbers are that something is computed in; a step may cast to bf16 within, and back.

    Attributes:
        eps: the last bit of the narrowest floating-point dtype that an operator put out, relative to 1.
    """

    eps = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                self.eps = max(self.eps, torch.finfo(value.dtype).eps)
        return result


class MeanDraws(TorchDispatchMode):
    """Random draws at their means, so that two computations which draw differently can be compared.

    Attributes:
        unknown: an operator that draws, and whose mean isn't known here; empty if there was none.
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
