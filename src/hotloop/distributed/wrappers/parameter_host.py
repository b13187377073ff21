"""Towers: a replica on each device; parameters and optimizer state with the first rank, on the CPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hotloop.core.task_parts.model_copy import copied
from hotloop.distributed.comm_stats import Meter
from hotloop.distributed.world import World
from hotloop.distributed.wrappers.ddp import Own, Whole
from hotloop.errors import calling

_Pair = tuple[nn.Parameter, nn.Parameter]
"""A parameter of the replica, and the one that is held for it."""


class Towers(Own):
    """One rank's replica. Gradients are added up on the CPU, by gloo, and what was updated there comes back to all.

    Attributes:
        held: the model whose parameters are updated: on the first rank a copy on the CPU; on the others the replica
            itself, whose parameters have no gradients when the update comes.
    """

    def __init__(self, module: Whole, world: World, meter: Meter) -> None:
        super().__init__(module)
        self.first, self.meter = world.first, meter
        replica = self._replica = module.model
        self.held: nn.Module = calling("copying the model", _on_host, replica) if world.first else replica
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
            with self.meter.communicating():
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
        return self.leave_out(own.grad).reshape(-1).cpu()

    @torch.no_grad()
    def spread(self) -> None:
        """Brings the first rank's parameters to all replicas."""
        for pairs in self._alike:
            if self.first:
                values = torch.cat([held.reshape(-1) for _, held in pairs])
            else:
                values = torch.empty(sum(_sizes(pairs)), dtype=pairs[0][0].dtype)
            with self.meter.communicating():
                dist.broadcast(values, 0)
            for (own, _), value in zip(pairs, values.split(_sizes(pairs)), strict=True):
                own.copy_(value.view(own.shape))

    @torch.no_grad()
    def hold(self) -> None:
        """Holds what the replica has, after a State was restored into that."""
        for own, held in zip(self._replica.parameters(), self.held.parameters(), strict=True):
            held.copy_(own)


def _on_host(model: nn.Module) -> nn.Module:
    return copied(model).to("cpu")


def _sizes(pairs: list[_Pair]) -> list[int]:
    return [own.numel() for own, _ in pairs]
