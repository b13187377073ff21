"""Gradients added up over the ranks by torch's DistributedDataParallel."""

# No `from __future__ import annotations`: DistributedDataParallel looks at those of its hook.

import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hotloop.distributed.comm_stats import CommMeter


class WrapperMarker:
    """Marks modules that stand around the user's model, which a profile passes over."""


class ModelWithLoss(WrapperMarker, nn.Module):
    """A model together with its objective as one module, so that all that the Task does with the model is inside.

    A step of the user's may call parts of the model, or the model several times; an engine that watches the forward pass
    of a module sees it whole.

    Args:
        compute: `(model, batch)` -> loss, output and further scalars.
    """

    def __init__(self, model: nn.Module, compute: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.model = model
        self._compute = compute

    def forward(self, batch: Any) -> Any:
        computed = self._compute(self.model, batch)
        # What doesn't lead to the loss must not look as if its parameters were to get gradients.
        return computed.loss, {name: value.detach() for name, value in computed.scalars.items()}


_DDP_OPTIONS = inspect.signature(DistributedDataParallel).parameters
_BUFFERS_STAY: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _DDP_OPTIONS else "broadcast_buffers": False  # until torch 2.12
}
"""Each rank works its buffers out by itself: the first rank's in their stead would hide that they differ."""


class _Engine(WrapperMarker, DistributedDataParallel):
    """torch's engine."""


class RankRowsModule:
    """Runs a module on the rank's rows; what becomes of its gradients is the affair of whoever asks.

    Attributes:
        counts: 0-dim bool tensor, or bool: whether the rank's part counts at all; the gradients of one that doesn't,
            such as those of a mean of nothing, are left out.
    """

    def __init__(self, module: ModelWithLoss) -> None:
        self.module: nn.Module = module
        self.counts: Tensor | bool = True

    def __call__(self, batch: Any) -> Any:
        return self.module(batch)

    def full_model(self) -> AbstractContextManager[None]:
        """All parameters whole on each rank, as they always are."""
        return nullcontext()

    def exclude(self, gradient: Tensor) -> Tensor:
        """A gradient of the rank's, zeros in place if it doesn't count."""
        if self.counts is False:
            return gradient.zero_()
        return gradient if self.counts is True else gradient.masked_fill_(~self.counts, 0)


FIGURES = 32
"""The most figures of a step that travel with its gradients."""


class DdpModel(RankRowsModule):
    """Its gradients are the sums of those of all ranks, once `end_backward` returns.

    A parameter of its own carries a step's figures in the last bucket of gradients, and counts for each parameter the ranks
    on which it has a gradient. So a step needs no message but those of its gradients. torch's `find_unused_parameters`
    would send one more.

    Args:
        meter: of the time from a sum's first gradients on their way to its last ones back.
    """

    def __init__(self, module: ModelWithLoss, meter: CommMeter) -> None:
        super().__init__(module)
        self.meter = meter
        self._trained = [value for value in module.parameters() if value.requires_grad]
        widest = max((value.dtype for value in self._trained), key=lambda dtype: dtype.itemsize)
        dtype = torch.promote_types(widest, torch.float32)
        self.carrier = nn.Parameter(self._trained[0].new_zeros(FIGURES + len(self._trained), dtype=dtype))
        module.carrier = self.carrier
        engine = _Engine(module, **_BUFFERS_STAY)
        # The engine is its owner's, and what it keeps of its hook no garbage collector sees.
        engine.register_comm_hook(weakref.ref(self), _sum_bucket)
        self._fix_buckets(engine)
        self.module = engine

    def _fix_buckets(self, engine: _Engine) -> None:
        """Has the engine form its final buckets now, with the carrier in the last one.

        torch 2.13 forms them anew after the first backward pass. With three or more ranks the rounding of a sum depends on the
        place in a bucket, so the first step of a resumed run would differ.
        """
        engine.reducer.prepare_for_forward()
        engine.reducer.prepare_for_backward([])
        for value in (*reversed(self._trained), self.carrier):
            torch.autograd.backward([value], [torch.zeros_like(value)])
        for value in (*self._trained, self.carrier):
            value.grad = None
        engine.reducer._rebuild_buckets()

    def end_backward(self, figures: Tensor) -> Tensor:
        """Sends the last gradients of this rank; returns the sums of the figures over the ranks.

        A parameter that had a part in no rank's loss has no gradient, as in one process.

        Args:
            figures: shape (n,), n at most `FIGURES`, of any floating dtype.
        """
        unused = [place for place, value in enumerate(self._trained) if value.grad is None]
        carried = torch.ones_like(self.carrier)
        carried[: len(figures)] = figures
        for place in unused:
            carried[FIGURES + place] = 0
        missing = [self._trained[place] for place in unused]
        # The engine waits for the gradient of each parameter.
        torch.autograd.backward([self.carrier, *missing], [carried, *map(torch.zeros_like, missing)])
        sums = self.carrier.grad
        assert sums is not None
        self.carrier.grad = None
        if unused:
            for place, count in zip(unused, sums[FIGURES:][unused].tolist(), strict=True):
                if not count:
                    self._trained[place].grad = None
        return sums[: len(figures)].to(figures.dtype)


def _sum_bucket(of: "weakref.ref[DdpModel]", bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Adds up a bucket of gradients over the ranks; torch's own hooks divide by their number."""
    owner = of()
    assert owner is not None
    if owner.counts is not True:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter is not owner.carrier:
                owner.exclude(gradient)
    owner.meter.begin(last=bucket.is_last())
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None

    def arrived(future: torch.futures.Future[Any]) -> Tensor:
        owner.meter.end()
        return future.value()[0]

    return work.get_future().then(arrived)
