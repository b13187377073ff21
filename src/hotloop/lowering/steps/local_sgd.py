"""Local SGD: ranks train by themselves on their rows of the batches, and average their parameters every few steps."""

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


class WeightAverage:
    """Averages the changes of the ranks' parameters since the last average.

    Averaging changes keeps parameters that no rank changed equal, bit by bit.

    Args:
        parameters: of this rank.
    """

    def __init__(self, world: World, meter: CommMeter, parameters: Sequence[Tensor]) -> None:
        self._world, self._meter, self._parameters = world, meter, parameters
        self.begin()

    def begin(self) -> None:
        """Copies the parameters, which are equal on all ranks at this time."""
        self._start = [value.detach().clone() for value in self._parameters]

    @torch.no_grad()
    def take(self, counted: Tensor, others: Iterable[Tensor] = ()) -> None:
        """Sets all ranks to the average.

        Args:
            counted: 0-dim, weight of this rank's change; if all are 0, ranks have equal weights.
            others: further tensors, whose values are averaged; of equal shapes and order on all ranks.
        """
        share = self._share(counted)
        changes = [value - start for value, start in zip(self._parameters, self._start, strict=True)]
        self._add_up([*changes, *others], share)
        for value, start, change in zip(self._parameters, self._start, changes, strict=True):
            value.copy_(start + change)
        self.begin()

    def _share(self, counted: Tensor) -> Tensor:
        """Returns this rank's share of the average, 0-dim."""
        total = counted.clone()
        with self._meter.measure_waiting():
            dist.all_reduce(total)
        return torch.where(total == 0, 1 / self._world.ranks, counted / total)

    def _add_up(self, values: Sequence[Tensor], share: Tensor) -> None:
        """Replaces each tensor by the weighted sum over the ranks, in one message for each dtype."""
        for dtype in dict.fromkeys(value.dtype for value in values):
            group = [value for value in values if value.dtype == dtype]
            flat = torch.cat([value.reshape(-1) for value in group]) * share.to(dtype)
            with self._meter.measure_communication():
                dist.all_reduce(flat)
            for value, mean in zip(group, flat.split([value.numel() for value in group]), strict=True):
                value.copy_(mean.view(value.shape))


SYNC_EVERY = 16
"""Steps between two averages, if the plan sets none."""


_RESUME_NOTE = (
    "parallel=local: ranks average at each checkpoint and stop, too, so a run that is stopped and resumed ends with "
    "other weights; use sync_every=1, or parallel=data"
)


class LocalSgdStep(DataParallelStep):
    """A step of this rank alone; every few steps all ranks continue from their average.

    Local SGD (Stich 2018, arXiv 1805.09767, algorithm 1); a rank's weight is that of its losses since the last average.
    The optimizer's state is averaged, too, so that one checkpoint holds the whole state.
    """

    def __init__(self, parts: LoweringContext) -> None:
        super().__init__(parts)
        self._joint = replace(self._joint, norms=False)  # global norms would need communication in each step
        self._every = parts.plan.sync_every or SYNC_EVERY
        if self._every > 1:
            self.inexact = (_RESUME_NOTE,)
        trainable = [value for value in parts.model.parameters() if value.requires_grad]
        self._mean = WeightAverage(parts.world, parts.meter, trainable)
        self._counted: Any = 0  # weight of the rank's losses since the last average
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
        weight = torch.as_tensor(self.parts.weigh(batch, self._rows) if self._rows else 0, device=self.parts.device)
        self._module.counts = weight != 0
        self._backward_of(torch.where(weight == 0, 0.0, computed.loss))
        for value in self._filled:
            if value.grad is not None:
                self._module.exclude(value.grad)
        self._total = weight
        self._counted = self._counted + weight
        return computed

    def sync_ranks(self) -> None:
        """Averages, unless no step ran since the last average."""
        if self._apart:
            self._mean.take(self._counted, self._others())
            self._restore_average(self.totals())
            self._begin()

    def _others(self) -> Iterator[Tensor]:
        """Yields further tensors to average: averaged weights, buffers, and the optimizer's state."""
        yield from self.average.values()
        yield from (value for value in self.parts.model.buffers() if value.is_floating_point())
        state: dict[Any, Any] = self.optimizer.state
        for owner, values in state.items():
            if isinstance(owner, Tensor):
                yield from (value for key, value in values.items() if key != "step" and _is_running_mean(value))

    def _begin(self) -> None:
        self._apart = False
        self._counted = torch.zeros((), dtype=self.sums["loss"].dtype, device=self.parts.device)

    def totals(self) -> dict[str, Any]:
        """Sums the ranks' sums; all ranks count the samples of whole batches."""
        wide = self.sums["loss"].dtype
        names = [name for name in self.sums if name != "samples"]
        whole = torch.stack([torch.as_tensor(self.sums[name], device=self.parts.device).to(wide) for name in names])
        with self.parts.meter.measure_waiting():
            dist.all_reduce(whole)
        totals: dict[str, Any] = dict(zip(names, whole.unbind(), strict=True))
        if counts_samples(self.parts):
            totals["weight"] = int(totals["weight"])  # an int, as in a single process
        return self.sums | totals

    def on_state_restored(self) -> None:
        self._restore_average(self.sums)
        self._mean.begin()
        self._begin()

    def _restore_average(self, whole: dict[str, Any]) -> None:
        """Leaves the sums of all ranks to rank 0, so that they count once."""
        if not self.parts.world.is_rank_zero:
            whole = {name: value if name == "samples" else value * 0 for name, value in whole.items()}
        self.sums = whole


def _is_running_mean(value: Any) -> bool:
    """Whether a value of the optimizer's state may depend on samples; any shape: Adafactor has row and column sums."""
    return isinstance(value, Tensor) and value.is_floating_point()
