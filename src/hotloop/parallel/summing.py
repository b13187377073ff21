"""Gradients added up over the ranks by torch's DistributedDataParallel."""

# No `from __future__ import annotations`: DistributedDataParallel looks at those of its hook.

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Whole(nn.Module):
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
        loss, _, scalars = self._compute(self.model, batch)
        # What doesn't lead to the loss must not look as if its parameters were to get gradients.
        return loss, {name: value.detach() for name, value in scalars.items()}


_KNOWN = inspect.signature(DistributedDataParallel).parameters
_BUFFERS_STAY: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _KNOWN else "broadcast_buffers": False  # until torch 2.12
}
"""Each rank works its buffers out by itself: the first rank's in their stead would hide that they differ."""


class Summed:
    """Runs a module whose gradients, once backward is through, are the sums of those of all ranks.

    Attributes:
        counts: 0-dim bool tensor, or bool: whether the rank's part counts at all; the gradients of one that doesn't,
            such as those of a mean of nothing, are left out.
    """

    def __init__(self, module: Whole) -> None:
        self.counts: Tensor | bool = True
        # Looked for in vain at each step: torch warns where all that it is told to look for is there.
        module.never = nn.Parameter(next(module.parameters()).new_zeros(()).float())
        # A parameter may take part on one rank alone, or on none: then it must be found, at the price of a look.
        self.module = DistributedDataParallel(module, find_unused_parameters=True, **_BUFFERS_STAY)
        self.module.register_comm_hook(self, _summed)

    def __call__(self, batch: Any) -> Any:
        return self.module(batch)

    def together(self) -> AbstractContextManager[None]:
        """All parameters whole on each rank, as they always are."""
        return nullcontext()


def _summed(owner: Summed, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Adds up a bucket of gradients over the ranks; torch's own hooks divide by their number."""
    gradients = bucket.buffer()
    if owner.counts is False:
        gradients.zero_()
    elif isinstance(owner.counts, Tensor):
        gradients.masked_fill_(~owner.counts, 0)
    work = dist.all_reduce(gradients, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])
