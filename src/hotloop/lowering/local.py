"""Ranks that train by themselves, each on its rows of the batches, and average what they have come to now and then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hotloop.lowering.ingredients import Ingredients, counts_samples
from hotloop.lowering.shared import SharedStep
from hotloop.parallel.averaging import Average
from hotloop.parallel.norms import OwnNorms
from hotloop.parallel.summing import Own, Whole
from hotloop.task import Computed

SYNC_EVERY = 16
"""Steps between two meetings, where the plan names none."""


class LocalStep(SharedStep):
    """A step of this rank's own; after so many of them all ranks go on from the average of what they have.

    Local SGD (Stich 2018, arXiv 1805.09767, algorithm 1), with what each rank's losses counted since the last meeting
    as its weight. With `outer`, the average is the aim of a step with Nesterov's momentum (DiLoCo: Douillard et al.
    2023, arXiv 2311.08105, algorithm 1). The optimizer's state is averaged too, so that a checkpoint holds all there is.
    """

    def __init__(self, parts: Ingredients) -> None:
        super().__init__(parts)
        self._as_one = replace(self._as_one, norms=False)  # the norms of a step would be a meeting
        self._every = parts.plan.sync_every or SYNC_EVERY
        learning = {name: value for name, value in parts.model.named_parameters() if value.requires_grad}
        if parts.plan.outer == "nesterov":
            self.outer = {name: torch.zeros_like(value) for name, value in learning.items()}
        self._meeting = Average(parts.world, parts.meter, list(learning.values()), list(self.outer.values()))
        self._apart = False
        self._counted: Any = 0  # what the rank's losses did since the ranks last met
        self._begin()

    def _engine(self, whole: Whole, parts: Ingredients) -> Own:
        return Own(whole)

    @contextmanager
    def _of_the_whole(self, *, in_order: bool = True) -> Iterator[None]:
        with super()._of_the_whole(in_order=in_order), OwnNorms(bool(self._rows)):
            yield

    def __call__(self, batch: Any, samples: int, step: int) -> Tensor:
        loss = super().__call__(batch, samples, step)
        self._apart = True
        if (step + 1) % self._every == 0:
            self.meet()
        return loss

    def _differentiate(self, computed: Computed, batch: Any, samples: int) -> Computed:
        weight = self._own_weight(batch)
        self._module.counts = weight != 0
        self._backward_of(torch.where(weight == 0, 0.0, computed.loss))
        for value in self._filled:
            if value.grad is not None:
                self._module.leave_out(value.grad)
        self._total = weight
        self._counted = self._counted + weight
        return computed

    def _own_weight(self, batch: Any) -> Tensor:
        """What the rank's loss counts, 0-dim."""
        weight = self.parts.weigh(batch, self._rows) if self._rows else 0
        return torch.as_tensor(weight, device=self.parts.device)

    def meet(self) -> None:
        """Averages, unless nothing was done since the last time."""
        if self._apart:
            self._meeting.take(self._counted, self._others())
            self._settle(self.totals())
            self._begin()

    def _others(self) -> Iterator[Tensor]:
        """What moves beside the parameters: averages of these, buffers, and what the optimizer keeps for each."""
        yield from self.average.values()
        yield from (value for value in self.parts.model.buffers() if value.is_floating_point())
        kept: dict[Any, Any] = self.optimizer.state
        for holder, values in kept.items():
            if not isinstance(holder, Tensor):
                continue
            yield from (value for key, value in values.items() if key != "step" and _is_moving(value))

    def _begin(self) -> None:
        self._apart = False
        self._counted = torch.zeros((), dtype=self.sums["loss"].dtype, device=self.parts.device)

    def totals(self) -> dict[str, Any]:
        """Each rank has added up its own; the samples are those of whole batches."""
        wide = self.sums["loss"].dtype
        names = [name for name in self.sums if name != "samples"]
        whole = torch.stack([torch.as_tensor(self.sums[name], device=self.parts.device).to(wide) for name in names])
        with self.parts.meter.waiting():
            dist.all_reduce(whole)
        found: dict[str, Any] = dict(zip(names, whole.unbind(), strict=True))
        if counts_samples(self.parts):
            found["weight"] = int(found["weight"])  # as one process counts them
        return self.sums | found

    def rebind(self) -> None:
        self._settle(self.sums)
        self._meeting.begin()
        self._begin()

    def _settle(self, whole: dict[str, Any]) -> None:
        """Leaves the sums of all ranks to the first, so that they count once."""
        if not self.parts.world.first:
            whole = {name: value if name == "samples" else value * 0 for name, value in whole.items()}
        self.sums = whole


def _is_moving(value: Any) -> bool:
    """Whether it may follow the samples, in whatever shape: Adafactor keeps sums of rows and of columns."""
    return isinstance(value, Tensor) and value.is_floating_point()
