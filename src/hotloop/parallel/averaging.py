"""The average of what ranks have come to by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hotloop.parallel.waiting import Meter
from hotloop.parallel.world import World

OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
"""DiLoCo's (arXiv 2311.08105, section 3)."""


class Average:
    """Parameters that ranks have changed since they last met, and what becomes of them when they meet again.

    What is averaged are the ways that they have gone, so that what none has moved stays as it is, bit by bit.

    Args:
        parameters: of the rank.
        momentum: one tensor for each, which this updates; empty to go on from the average itself.
    """

    def __init__(
        self, world: World, meter: Meter, parameters: Sequence[Tensor], momentum: Sequence[Tensor] = ()
    ) -> None:
        self._world, self._meter, self._parameters, self._momentum = world, meter, parameters, momentum
        self.begin()

    def begin(self) -> None:
        """Notes where the ranks, who are together now, set out from."""
        self._then = [value.detach().clone() for value in self._parameters]

    @torch.no_grad()
    def take(self, counted: Tensor, others: Iterable[Tensor] = ()) -> None:
        """Brings all ranks to the average.

        Args:
            counted: 0-dim, how much this rank's way counts; where nobody's does, all count alike.
            others: further tensors, averaged as they stand; of the same shapes on all ranks, in the same order.
        """
        share = self._share(counted)
        ways = [value - then for value, then in zip(self._parameters, self._then, strict=True)]
        others = list(others)
        self._add_up([*ways, *others], share)
        for place, (value, then, way) in enumerate(zip(self._parameters, self._then, ways, strict=True)):
            value.copy_(then + (self._outer(way, self._momentum[place]) if self._momentum else way))
        self.begin()

    def _outer(self, way: Tensor, momentum: Tensor) -> Tensor:
        """Nesterov's step along the average way, which stands for a gradient's opposite."""
        momentum.mul_(OUTER_MOMENTUM).add_(way)
        return OUTER_RATE * (way + OUTER_MOMENTUM * momentum)

    def _share(self, counted: Tensor) -> Tensor:
        """How much of the average is this rank's, 0-dim."""
        total = counted.clone()
        with self._meter.waiting():
            dist.all_reduce(total)
        return torch.where(total == 0, 1 / self._world.ranks, counted / total)

    def _add_up(self, values: Sequence[Tensor], share: Tensor) -> None:
        """Replaces each tensor by the sum of the ranks' shares of it; one message for all of a dtype."""
        for dtype in dict.fromkeys(value.dtype for value in values):
            alike = [value for value in values if value.dtype == dtype]
            flat = torch.cat([value.reshape(-1) for value in alike]) * share.to(dtype)
            with self._meter.communicating():
                dist.all_reduce(flat)
            for value, mean in zip(alike, flat.split([value.numel() for value in alike]), strict=True):
                value.copy_(mean.view(value.shape))
