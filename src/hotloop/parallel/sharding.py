"""Parameters, gradients and optimizer state spread over the ranks by torch's fully_shard (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from hotloop.parallel.summing import Whole


class Sharded:
    """Runs a module whose parameters come together for as long as they are needed, and whose gradients are sums.

    The members of each `nn.ModuleList`, which is where large models have their blocks, come together one by one; all
    else does for the whole step.
    """

    counts: Tensor | bool = True
    """Not looked at: nothing stands between backward and the sum, so what counts nothing must have gradients of 0."""

    def __init__(self, module: Whole, device: torch.device) -> None:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for blocks in [one for one in module.modules() if isinstance(one, nn.ModuleList)]:
            for block in blocks:
                if next(block.parameters(), None) is not None:
                    fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
        self.module = module
        for one in self._units():
            one.set_gradient_divide_factor(1.0)  # the loss has its share already
            one.set_force_sum_reduction_for_comms(True)  # gloo can't divide on the way

    def __call__(self, batch: Any) -> Any:
        return self.module(batch)

    @contextmanager
    def together(self) -> Iterator[None]:
        """All parameters whole on each rank, so that each can compute what it likes."""
        blocks = self._units()[1:]
        for unit in self._units():
            unit.unshard()
        for block in blocks:
            block.set_reshard_after_forward(False)
        try:
            yield
        finally:
            for block in blocks:
                block.set_reshard_after_forward(True)
            for unit in self._units():
                unit.reshard()

    def _units(self) -> list[FSDPModule]:
        """The root first."""
        return [one for one in self.module.modules() if isinstance(one, FSDPModule)]
