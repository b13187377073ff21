"""Whether the gradients of the ranks' rows add up to that of the batch: tried on a few samples, before training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hotloop.data.feed import Treatment, open_feed
from hotloop.data.order import Order, Parted
from hotloop.errors import HotloopError, blame
from hotloop.lowering.accumulation import Means, farthest, not_in_pieces
from hotloop.lowering.ingredients import Ingredients
from hotloop.parallel.draws import Pattern, WholeDraws
from hotloop.parallel.norms import backward_within
from hotloop.rng import Streams, preserved
from hotloop.task import Computed

Share = tuple[Any, int]
"""A batch, and how many rows it has."""


def check_shares(parts: Ingredients, draws: Pattern) -> None:
    """Compares, on the first rank, the gradient of a few samples with what two shares of them add up to.

    Batch norms keep to their running statistics, and random numbers are those of the whole, since ranks have both in
    common; where they draw numbers of their own, these are at their means. Where each rank trains by itself, and so
    towards something else, a line does.

    Args:
        draws: how the model draws random numbers.

    Raises:
        PlanError: the loss, or a layer, looks at the batch as a whole.
    """
    asked = f"parallel={parts.plan.parallel}"
    untried, name = parts.world.from_first(lambda: _tried(parts, draws))
    if untried:
        parts.say(f"{asked}: whether the ranks' gradients add up to that of one process couldn't be tried: {untried}")
    elif name and parts.plan.parallel == "local":
        parts.say(f"{asked}: the loss or a layer looks at the batch as a whole, and each rank's at its rows alone")
    elif name:
        raise not_in_pieces(f"{asked} changes the gradient of {name!r}", "use parallel=none", norms=())


def _tried(parts: Ingredients, draws: Pattern) -> tuple[str, str]:
    """Why it couldn't be tried, and else the parameter whose gradient differs; both empty where none does."""
    means = Means() if draws.odd else None
    try:
        with preserved(parts.device):
            whole, cut = _shared(parts)
            if len(cut) < 2:
                return "", ""
            one, several = (_gradients(parts, shares, draws, means) for shares in (whole, cut))
    except HotloopError:
        raise
    except Exception as error:
        return blame(error), ""
    if not all(bool(value.isfinite().all()) for value in one.values()):
        return "a gradient is NaN or infinite", ""
    name = farthest(one, several, wide=False)
    if name and means is not None and means.unknown:
        return f"it draws by {means.unknown}", ""
    return "", name or ""


def _shared(parts: Ingredients) -> tuple[list[Share], list[Share]]:
    """As many samples as a rank has at once, or a few more: whole, and in two shares, one of them larger."""
    order = parts.roles.order
    assert order is not None
    samples = max(-(-order.batch_size // parts.world.ranks), min(order.batch_size, 5))
    samples -= samples > 2 and samples % 2 == 0
    few = replace(order, batch_size=samples)
    cut = [Parted(**vars(few), rank=rank, ranks=2) for rank in range(2)] if samples > 1 else []
    return [_first(parts, few)], [_first(parts, rows) for rows in cut]


def _first(parts: Ingredients, rows: Order) -> Share:
    treatment = Treatment(parts.device, parts.task.seed, parts.roles.prepare)
    return next(open_feed(parts.roles.train, rows, treatment, workers=0, endless=False).epoch(0))


def _gradients(parts: Ingredients, shares: Sequence[Share], draws: Pattern, means: Means | None) -> dict[str, Tensor]:
    """What the shares' gradients add up to under the plan's weights, by parameter, in the model's own numbers."""
    model, compute = copy.deepcopy(parts.model).train(), _with_a_copy_of_the_loss(parts)
    weights = [float(parts.weigh(*share)) for share in shares]
    total = sum(rows for _, rows in shares)
    for number, ((batch, _), weight) in enumerate(zip(shares, weights, strict=True)):
        if not weight and any(weights):
            continue
        Streams(parts.task.seed, parts.device).reseed("look")
        for_all = partial(WholeDraws, draws, total, number, len(shares)) if means is None else _nothing
        with means or nullcontext():
            with for_all(in_order=True), _FixedNorms():
                loss = compute(model, batch).loss
            with for_all(in_order=False), _FixedNorms():
                backward_within(loss * (weight / (sum(weights) or 1.0)))
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def _nothing(**_: Any) -> AbstractContextManager[Any]:
    return nullcontext()


def _with_a_copy_of_the_loss(parts: Ingredients) -> Callable[[nn.Module, Any], Computed]:
    """The Task's forward pass, in the model's own numbers; a loss may have buffers that training changes."""
    loss = parts.task.loss
    return (replace(parts.task, loss=copy.deepcopy(loss)) if isinstance(loss, nn.Module) else parts.task).compute


class _FixedNorms(TorchFunctionMode):
    """Has batch norms keep to what they know of their input before they see it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.batch_norm:
            return function(*args, **(kwargs or {}))
        return self._batch_norm(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        mean = x.new_zeros(x.shape[1]) if running_mean is None else running_mean
        variance = torch.ones_like(mean) if running_var is None else running_var
        return F.batch_norm(x, mean, variance, weight, bias, False, momentum, eps)
