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

from hotloop.core.random.rng import Streams, preserved
from hotloop.core.task_parts.model_copy import copied
from hotloop.core.task_parts.module_modes import set_training
from hotloop.data.batch_tree import map_tensors
from hotloop.data.feeds.feed import Treatment, open_feed
from hotloop.data.feeds.rank_rows import others_in
from hotloop.distributed.wrappers.global_batch_rng import Pattern, WholeDraws
from hotloop.distributed.wrappers.sync_batch_norm import backward_within
from hotloop.errors import TaskError, blame, kind
from hotloop.lowering.context import Ingredients
from hotloop.lowering.losses.float64_copy import Widening, widen_model, widened
from hotloop.lowering.losses.loss_calls import watched_losses
from hotloop.lowering.transforms.accumulation import Means, Roundings, farthest, not_in_pieces, pieces_of, without_rows
from hotloop.task import Computed

Share = tuple[Any, int]
"""A batch, and how many rows it has."""

APART = "parallel=local: the loss or a layer looks at the batch as a whole, and each rank's at its rows alone"
"""What is said of ranks that train by themselves, each towards something else."""

_SAMPLES = 5
"""As few as make two shares of different sizes, each of several."""


def check_shares(parts: Ingredients, draws: Pattern) -> bool:
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
    found = _tried(parts, draws)  # on each rank, since a step may have something to say to the others
    untried, name = parts.world.from_first(lambda: found)
    if untried:
        parts.say(f"{asked}: whether the ranks' gradients add up to that of one process couldn't be tried: {untried}")
    elif name and parts.plan.parallel == "local":
        parts.say(APART)
    elif name:
        raise not_in_pieces(f"{asked} changes the gradient of {name!r}", "use parallel=none", norms=())
    return not untried and not name


def _tried(parts: Ingredients, draws: Pattern) -> tuple[str, str]:
    """Why it couldn't be tried, and else the parameter whose gradient differs; both empty where none does."""
    try:
        if any(isinstance(module, nn.SyncBatchNorm) for module in parts.model.modules()):
            return "a SyncBatchNorm looks at other ranks", ""
        with preserved(parts.device):
            batch, samples = _few(parts)
            if samples < 2:
                return "", ""
            if uncut := without_rows(batch, samples) or next(map(kind, others_in(batch)), ""):
                return f"a batch holds {uncut}", ""
            return _compared(parts, batch, samples, draws)
    except _Told:
        return "", ""
    except Exception as error:
        return blame(error), ""


def _few(parts: Ingredients) -> Share:
    """The first samples of the first batch, read once: a data set may give others when it is asked again."""
    order = parts.roles.order
    assert order is not None
    samples = min(order.batch_size, _SAMPLES)
    samples -= samples > 2 and samples % 2 == 0
    treatment = Treatment(parts.device, parts.task.seed, parts.roles.prepare)
    few = replace(order, batch_size=samples)
    return next(open_feed(parts.roles.train, few, treatment, workers=0, endless=False).epoch(0))


def _compared(parts: Ingredients, batch: Any, samples: int, draws: Pattern) -> tuple[str, str]:
    """What `_tried` returns, of a batch that can be cut."""
    means, seen = Means() if draws.odd else None, _Seen()
    whole, cut = [(batch, samples)], list(pieces_of(batch, samples, 2))
    one = _gradients(parts, whole, draws, means, seen)
    elsewhere = Streams(parts.task.seed, parts.device).drawn("look")
    again, several = (_gradients(parts, shares, draws, means, seen) for shares in (whole, cut))
    if not all(bool(value.isfinite().all()) for value in one.values()):
        return "a gradient is NaN or infinite", ""
    if farthest(one, again, seen.eps):
        return "the same samples give another gradient each time", ""
    name = farthest(one, several, seen.eps) or ""
    if name and means is not None and means.unknown:
        return f"it draws by {means.unknown}", ""
    if name and elsewhere:
        return "it draws from NumPy's or Python's generator", ""
    if name and seen.own:
        return "it draws from a generator of its own", ""
    return "", name


def differing(parts: Ingredients, draws: Pattern, batch: Any, samples: int, pieces: int) -> tuple[str, str]:
    """What `_tried` returns, of a later batch in so many pieces.

    In float64 with draws at their means; where the model can't do that, in its own numbers with those of the whole.
    """
    whole, cut = [(batch, samples)], list(pieces_of(batch, samples, pieces))
    if len(cut) < 2:
        return "", ""
    means, seen, eps = Means(), _Seen(), None
    try:
        with Widening():
            one, several = (_gradients(parts, shares, draws, means, seen, wide=True) for shares in (whole, cut))
    except _Told:
        return "", ""
    except Exception:  # it casts to a dtype of its own
        means.unknown = means.unknown or "a dtype of its own"
    if means.unknown:
        means = Means() if draws.odd else None  # type: ignore[assignment]
        one, several = (_gradients(parts, shares, draws, means, seen) for shares in (whole, cut))
        eps = seen.eps
    if means is not None and means.unknown:
        return f"it draws by {means.unknown}", ""
    if not all(bool(value.isfinite().all()) for value in one.values()):
        return "", ""  # training itself reports what isn't finite
    return "", farthest(one, several, eps) or ""


def _gradients(
    parts: Ingredients,
    shares: Sequence[Share],
    draws: Pattern,
    means: Means | None,
    seen: _Seen,
    *,
    wide: bool = False,
) -> dict[str, Tensor]:
    """What the shares' gradients add up to under the plan's weights, by parameter, in the model's own numbers.

    Args:
        wide: in float64 instead.
    """
    weights = [float(parts.weigh(*share)) for share in shares]
    samples = sum(rows for _, rows in shares)
    whole = draws.any and means is None
    total: dict[str, Tensor] = {}
    for number, ((batch, _), weight) in enumerate(zip(shares, weights, strict=True)):
        if not weight and any(weights):
            continue
        # Each has its own, since a forward pass may change a model, a loss or a batch.
        model = set_training(copied(parts.model), parts.in_eval)
        compute = _with_a_copy_of_the_loss(parts)
        rows = map_tensors(torch.clone, batch)
        if wide:
            model, rows = widen_model(model), map_tensors(widened, rows)
        for_all = partial(WholeDraws, draws, samples, number, len(shares)) if whole else _nothing
        Streams(parts.task.seed, parts.device).reseed("look")
        with seen, means or nullcontext():
            with for_all(in_order=True), _FixedNorms():
                loss = _loss(compute, model, rows)
            with for_all(in_order=False), _FixedNorms():
                backward_within(loss * (weight / (sum(weights) or 1.0)))
        for name, value in model.named_parameters():
            if value.grad is not None:
                total[name] = total[name] + value.grad if name in total else value.grad
    return total


def _nothing(**_: Any) -> AbstractContextManager[Any]:
    return nullcontext()


def _with_a_copy_of_the_loss(parts: Ingredients) -> Callable[[nn.Module, Any], Computed]:
    """The Task's forward pass, in the model's own numbers; a loss may have buffers that training changes."""
    loss = parts.task.loss
    return (replace(parts.task, loss=copy.deepcopy(loss)) if isinstance(loss, nn.Module) else parts.task).compute


class _Told(Exception):
    """Something is wrong with the loss, of which the first step says what."""


def _loss(compute: Callable[[nn.Module, Any], Computed], model: nn.Module, batch: Any) -> Tensor:
    try:
        with watched_losses(model, batch, classes=False):
            loss = compute(model, batch).loss
    except TaskError as error:
        raise _Told from error
    if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
        raise _Told
    return loss


class _Seen(Roundings):
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


def nodes_below(values: Iterable[Tensor]) -> set[Any]:
    """The nodes of the graph from some tensors to the leaves that they depend on; none of tensors that need no gradient."""
    found: set[Any] = set()
    ahead: list[Any] = [value.grad_fn for value in values]
    while ahead:
        if (node := ahead.pop()) is not None and node not in found:
            found.add(node)
            ahead += [following for following, _ in node.next_functions]
    return found
