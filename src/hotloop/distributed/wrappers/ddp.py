"""Replicas of a model on several ranks: gradients summed by DistributedDataParallel, or updated by rank 0 on the CPU."""

# No `from __future__ import annotations`: DistributedDataParallel checks the annotations of its hook.

import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hotloop.core.task_parts.models import copy_model
from hotloop.distributed.comm_stats import CommMeter
from hotloop.distributed.world import World
from hotloop.errors import call_user_code


class WrapperMarker:
    """Marks modules around the user's model, which a profile skips."""


class ModelWithLoss(WrapperMarker, nn.Module):
    """A model and its loss as one module, so that an engine sees one forward pass for each step.

    The user's step may call parts of the model, or the model several times.

    Args:
        compute: `(model, batch)` -> loss, output and further scalars.
    """

    def __init__(self, model: nn.Module, compute: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.model = model
        self._compute = compute

    def forward(self, batch: Any) -> Any:
        computed = self._compute(self.model, batch)
        # The engine must not expect gradients from outputs other than the loss.
        return computed.loss, {name: value.detach() for name, value in computed.scalars.items()}


_DDP_OPTIONS = inspect.signature(DistributedDataParallel).parameters
_LOCAL_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _DDP_OPTIONS else "broadcast_buffers": False  # until torch 2.12
}
"""Each rank computes its own buffers: copies of rank 0's would hide differences."""


class _Engine(WrapperMarker, DistributedDataParallel): ...


class RankRowsModule:
    """Runs a module on the rank's rows.

    Attributes:
        counts: bool or 0-dim bool tensor: whether the rank's gradients count; those of a mean of nothing don't.
    """

    def __init__(self, module: ModelWithLoss) -> None:
        self.module: nn.Module = module
        self.counts: Tensor | bool = True

    def __call__(self, batch: Any) -> Any:
        return self.module(batch)

    def full_model(self) -> AbstractContextManager[None]:
        """Each rank has all parameters already."""
        return nullcontext()

    def exclude(self, gradient: Tensor) -> Tensor:
        """Returns the rank's gradient, set to zeros in place if it doesn't count."""
        if self.counts is False:
            return gradient.zero_()
        return gradient if self.counts is True else gradient.masked_fill_(~self.counts, 0)


FIGURES = 32
"""Largest number of a step's figures that travel with its gradients."""


class DdpModel(RankRowsModule):
    """A model whose gradients are sums over all ranks after `end_backward`.

    An extra parameter, the carrier, transports a step's figures in the last bucket of gradients, and counts for each
    parameter the ranks with a gradient. torch's `find_unused_parameters` would need a further message.

    Args:
        meter: measures the time from the first gradients of a sum to the last.
    """

    def __init__(self, module: ModelWithLoss, meter: CommMeter) -> None:
        super().__init__(module)
        self.meter = meter
        self._trained = [value for value in module.parameters() if value.requires_grad]
        widest = max((value.dtype for value in self._trained), key=lambda dtype: dtype.itemsize)
        dtype = torch.promote_types(widest, torch.float32)
        self.carrier = nn.Parameter(self._trained[0].new_zeros(FIGURES + len(self._trained), dtype=dtype))
        module.carrier = self.carrier
        engine = _Engine(module, **_LOCAL_BUFFERS)
        # A weak reference: the garbage collector doesn't find the engine's reference to its hook.
        engine.register_comm_hook(weakref.ref(self), _sum_bucket)
        self._fix_buckets(engine)
        self.module = engine

    def _fix_buckets(self, engine: _Engine) -> None:
        """Builds the engine's final buckets now, with the carrier in the last bucket.

        torch 2.13 rebuilds the buckets after the first backward pass. With three or more ranks the rounding of a sum
        depends on the place in a bucket, so the first step of a resumed run would differ.
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

        A parameter without a gradient on any rank gets none, as in one process.

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
            for value, count in zip(missing, sums[FIGURES:][unused].tolist(), strict=True):
                if not count:
                    value.grad = None
        return sums[: len(figures)].to(figures.dtype)


def _sum_bucket(of: "weakref.ref[DdpModel]", bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sums a bucket of gradients over the ranks; torch's own hooks divide by the number of ranks."""
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


_Pair = tuple[nn.Parameter, nn.Parameter]
"""A parameter of the replica, and its counterpart in `ParameterHost.held`."""


class ParameterHost(RankRowsModule):
    """One rank's replica: gloo sums gradients on the CPU, and all ranks receive the updated parameters.

    Attributes:
        held: the updated model: on rank 0 a copy on the CPU, on other ranks the replica itself, without gradients.
    """

    def __init__(self, module: ModelWithLoss, world: World, meter: CommMeter) -> None:
        super().__init__(module)
        self.first, self.meter = world.is_rank_zero, meter
        replica = self._replica = module.model
        self.held: nn.Module = replica
        if world.is_rank_zero:
            self.held = call_user_code("copying the model", lambda: copy_model(replica).to("cpu"))
        pairs = zip(replica.parameters(), self.held.parameters(), strict=True)
        learning = [pair for pair in pairs if pair[0].requires_grad]
        dtypes = dict.fromkeys(own.dtype for own, _ in learning)
        self._alike = [[pair for pair in learning if pair[0].dtype == dtype] for dtype in dtypes]

    def collect(self) -> None:
        """Moves the summed gradients to rank 0's model, and clears them elsewhere.

        A parameter without a gradient on any rank gets none: an optimizer treats a gradient of zeros otherwise.
        """
        for pairs in self._alike:
            there = torch.tensor([own.grad is not None for own, _ in pairs], dtype=pairs[0][0].dtype)
            total = torch.cat([*(self._gradient(own) for own, _ in pairs), there])
            with self.meter.measure_communication():
                dist.reduce(total, 0)
            for own, _ in pairs:
                own.grad = None
            if self.first:
                *gradients, there = total.split([*_sizes(pairs), len(pairs)])
                for (_, held), gradient, ranks in zip(pairs, gradients, there.tolist(), strict=True):
                    held.grad = torch.empty_like(held).copy_(gradient.view(held.shape)) if ranks else None

    def _gradient(self, own: nn.Parameter) -> Tensor:
        if own.grad is None:
            return torch.zeros(own.numel(), dtype=own.dtype)
        return self.exclude(own.grad).reshape(-1).cpu()

    @torch.no_grad()
    def broadcast(self) -> None:
        """Copies rank 0's parameters to all replicas."""
        for pairs in self._alike:
            if self.first:
                values = torch.cat([held.reshape(-1) for _, held in pairs])
            else:
                values = torch.empty(sum(_sizes(pairs)), dtype=pairs[0][0].dtype)
            with self.meter.measure_communication():
                dist.broadcast(values, 0)
            for (own, _), value in zip(pairs, values.split(_sizes(pairs)), strict=True):
                own.copy_(value.view(own.shape))

    @torch.no_grad()
    def load_replica(self) -> None:
        """Copies the replica's parameters to the updated model, after a State was restored."""
        for own, held in zip(self._replica.parameters(), self.held.parameters(), strict=True):
            held.copy_(own)


def _sizes(pairs: list[_Pair]) -> list[int]:
    return [own.numel() for own, _ in pairs]
