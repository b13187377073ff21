"""Data-parallel replicas whose parameters and optimizer state rank 0 updates on the CPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hotloop.core.task_parts.models import copy_model
from hotloop.distributed.comm_stats import CommMeter
from hotloop.distributed.world import World
from hotloop.distributed.wrappers.ddp import ModelWithLoss, RankRowsModule
from hotloop.errors import call_user_code

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
