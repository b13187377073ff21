"""Ranks that train by themselves, each on its rows of the batches, and average what they have come to now and then."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hotloop.distributed.comm_stats import CommMeter
from hotloop.distributed.world import World
from hotloop.distributed.wrappers.ddp import ModelWithLoss, RankRowsModule
from hotloop.distributed.wrappers.sync_batch_norm import RankBatchNorm
from hotloop.lowering.context import LoweringContext, counts_samples
from hotloop.lowering.steps.data_parallel import DataParallelStep
from hotloop.task import StepResult

OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
"""DiLoCo's (arXiv 2311.08105, section 3)."""


class WeightAverage:
    """Parameters that ranks have changed since they last met, and what becomes of them when they meet again.

    What is averaged are the ways that they have gone, so that what none has moved stays as it is, bit by bit.

    Args:
        parameters: of the rank.
        momentum: one tensor for each, which this updates; empty to go on from the average itself.
    """

    def __init__(
        self, world: World, meter: CommMeter, parameters: Sequence[Tensor], momentum: Sequence[Tensor] = ()
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
        with self._meter.measure_waiting():
            dist.all_reduce(total)
        return torch.where(total == 0, 1 / self._world.ranks, counted / total)

    def _add_up(self, values: Sequence[Tensor], share: Tensor) -> None:
        """Replaces each tensor by the sum of the ranks' shares of it; one message for all of a dtype."""
        for dtype in dict.fromkeys(value.dtype for value in values):
            alike = [value for value in values if value.dtype == dtype]
            flat = torch.cat([value.reshape(-1) for value in alike]) * share.to(dtype)
            with self._meter.measure_communication():
                dist.all_reduce(flat)
            for value, mean in zip(alike, flat.split([value.numel() for value in alike]), strict=True):
                value.copy_(mean.view(value.shape))


SYNC_EVERY = 16
"""Steps between two meetings, where the plan names none."""


class LocalSgdStep(DataParallelStep):
    """A step of this rank's own; after so many of them all ranks go on from the average of what they have.

    Local SGD (Stich 2018, arXiv 1805.09767, algorithm 1), with what each rank's losses counted since the last meeting
    as its weight. With `outer`, the average is the aim of a step with Nesterov's momentum (DiLoCo: Douillard et al.
    2023, arXiv 2311.08105, algorithm 1). The optimizer's state is averaged too, so that a checkpoint holds all there is.
    """

    def __init__(self, parts: LoweringContext) -> None:
        super().__init__(parts)
        self._as_one = replace(self._as_one, norms=False)  # the norms of a step would be a meeting
        self._every = parts.plan.sync_every or SYNC_EVERY
        learning = {name: value for name, value in parts.model.named_parameters() if value.requires_grad}
        if parts.plan.outer == "nesterov":
            self.outer = {name: torch.zeros_like(value) for name, value in learning.items()}
        self._meeting = WeightAverage(parts.world, parts.meter, list(learning.values()), list(self.outer.values()))
        self._apart = False
        self._counted: Any = 0  # what the rank's losses did since the ranks last met
        self._begin()

    def _engine(self, whole: ModelWithLoss, parts: LoweringContext) -> RankRowsModule:
        return RankRowsModule(whole)

    @contextmanager
    def _global_result(self, *, in_order: bool = True) -> Iterator[None]:
        with super()._global_result(in_order=in_order), RankBatchNorm(bool(self._rows)):
            yield

    def __call__(self, batch: Any, samples: int, step: int) -> Tensor:
        loss = super().__call__(batch, samples, step)
        self._apart = True
        if (step + 1) % self._every == 0:
            self.sync_ranks()
        return loss

    def _differentiate(self, computed: StepResult, batch: Any, samples: int) -> StepResult:
        weight = self._own_weight(batch)
        self._module.counts = weight != 0
        self._backward_of(torch.where(weight == 0, 0.0, computed.loss))
        for value in self._filled:
            if value.grad is not None:
                self._module.exclude(value.grad)
        self._total = weight
        self._counted = self._counted + weight
        return computed

    def _own_weight(self, batch: Any) -> Tensor:
        """What the rank's loss counts, 0-dim."""
        weight = self.parts.weigh(batch, self._rows) if self._rows else 0
        return torch.as_tensor(weight, device=self.parts.device)

    def sync_ranks(self) -> None:
        """Averages, unless nothing was done since the last time."""
        if self._apart:
            self._meeting.take(self._counted, self._others())
            self._restore_average(self.totals())
            self._begin()

    def _others(self) -> Iterator[Tensor]:
        """What moves beside the parameters: averages of these, buffers, and what the optimizer keeps for each."""
        yield from self.average.values()
        yield from (value for value in self.parts.model.buffers() if value.is_floating_point())
        kept: dict[Any, Any] = self.optimizer.state
        for holder, values in kept.items():
            if not isinstance(holder, Tensor):
                continue
            yield from (value for key, value in values.items() if key != "step" and _is_running_mean(value))

    def _begin(self) -> None:
        self._apart = False
        self._counted = torch.zeros((), dtype=self.sums["loss"].dtype, device=self.parts.device)

    def totals(self) -> dict[str, Any]:
        """Each rank has added up its own; the samples are those of whole batches."""
        wide = self.sums["loss"].dtype
        names = [name for name in self.sums if name != "samples"]
        whole = torch.stack([torch.as_tensor(self.sums[name], device=self.parts.device).to(wide) for name in names])
        with self.parts.meter.measure_waiting():
            dist.all_reduce(whole)
        found: dict[str, Any] = dict(zip(names, whole.unbind(), strict=True))
        if counts_samples(self.parts):
            found["weight"] = int(found["weight"])  # as one process counts them
        return self.sums | found

    def on_state_restored(self) -> None:
        self._restore_average(self.sums)
        self._meeting.begin()
        self._begin()

    def _restore_average(self, whole: dict[str, Any]) -> None:
        """Leaves the sums of all ranks to the first, so that they count once."""
        if not self.parts.world.is_rank_zero:
            whole = {name: value if name == "samples" else value * 0 for name, value in whole.items()}
        self.sums = whole


def _is_running_mean(value: Any) -> bool:
    """Whether it may follow the samples, in whatever shape: Adafactor keeps sums of rows and of columns."""
    return isinstance(value, Tensor) and value.is_floating_point()
