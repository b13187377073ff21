"""Towers: a replica on each device; parameters and optimizer state with the first rank, on the CPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hotloop.core.task_parts.model_copy import copy_model
from hotloop.distributed.comm_stats import CommMeter
from hotloop.distributed.world import World
from hotloop.distributed.wrappers.ddp import ModelWithLoss, RankRowsModule
from hotloop.errors import call_user_code

_Pair = tuple[nn.Parameter, nn.Parameter]
"""A parameter of the replica, and the one that is held for it."""


class ParameterHost(RankRowsModule):
    """One rank's replica. Gradients are added up on the CPU, by gloo, and what was updated there comes back to all.

    Attributes:
        held: the model whose parameters are updated: on the first rank a copy on the CPU; on the others the replica
            itself, whose parameters have no gradients when the update comes.
    """

    def __init__(self, module: ModelWithLoss, world: World, meter: CommMeter) -> None:
        super().__init__(module)
        self.first, self.meter = world.is_rank_zero, meter
        replica = self._replica = module.model
        self.held: nn.Module = call_user_code("copying the model", _to_host, replica) if world.is_rank_zero else replica
        pairs = zip(replica.parameters(), self.held.parameters(), strict=True)
        learning = [pair for pair in pairs if pair[0].requires_grad]
        dtypes = dict.fromkeys(own.dtype for own, _ in learning)
        self._alike = [[pair for pair in learning if pair[0].dtype == dtype] for dtype in dtypes]

    def collect(self) -> None:
        """Moves the sums of the ranks' gradients to what is held on the first rank, and leaves none elsewhere.

        A parameter that no rank has a gradient of gets none: an optimizer may do something else with one of zeros.
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
        """Of one parameter, flat, on the CPU."""
        if own.grad is None:
            return torch.zeros(own.numel(), dtype=own.dtype)
        return self.exclude(own.grad).reshape(-1).cpu()

    @torch.no_grad()
    def broadcast(self) -> None:
        """Brings the first rank's parameters to all replicas."""
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
    def zero_gradients(self) -> None:
        """Holds what the replica has, after a State was restored into that."""
        for own, held in zip(self._replica.parameters(), self.held.parameters(), strict=True):
            held.copy_(own)


def _to_host(model: nn.Module) -> nn.Module:
    return copy_model(model).to("cpu")


def _sizes(pairs: list[_Pair]) -> list[int]:
    return [own.numel() for own, _ in pairs]
