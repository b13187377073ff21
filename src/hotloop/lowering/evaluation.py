"""Loss and metrics of a data set under a model in evaluation mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from hotloop.core.processes.signals import Stopped
from hotloop.core.random.generators import OwnedGenerators
from hotloop.core.random.rng import Streams
from hotloop.core.records.training import Figures
from hotloop.core.task_parts.classification_check import LossReads, correct, has_class_shapes
from hotloop.core.task_parts.loss_info import weighted
from hotloop.data.feeds.feed import SamplesFeed, StreamFeed, Treatment, open_feed
from hotloop.data.order import Dealt
from hotloop.data.row_count import count_rows
from hotloop.data.sources import Source, Stream, Table
from hotloop.distributed.rank_progress import PROGRESS
from hotloop.distributed.world import ALONE, World
from hotloop.errors import TaskError, calling
from hotloop.lowering.program import Program
from hotloop.task import Computed

_INPUT_BYTES = 1 << 20
"""Inputs of this size make a batch large enough that its overhead no longer matters."""


Watch = Callable[[Any, int, Any], None]
"""Sees each batch of an evaluation: `(batch, samples, computed)`, on the device; None where another rank has it."""


def evaluate(program: Program, source: Source, watch: Watch | None = None) -> Figures:
    """Loss and metrics over `source`, each averaged over all that they count.

    The figures follow from the model and the data alone: random draws are reseeded batch by batch.
    """
    sums = _Sums(program)
    parts, stopped = program.parts, ""
    world = ALONE if isinstance(source, Stream) else parts.dealt
    try:
        with PROGRESS.within("evaluation"), program.inference():
            for batch, samples in batches(program, source, world):
                computed = sums.add(batch, samples)
                if watch is not None:
                    watch(batch, samples, computed)
    except Stopped as error:
        stopped = error.reason
    together = parts.world if parts.relayed else world
    everyone = together.gathered((stopped, sums.plain()))  # also by one that was stopped: the others wait for its word
    if reasons := [reason for reason, _ in everyone if reason]:
        raise Stopped(reasons[0])
    return figures_of([own for _, own in everyone])


def batches(program: Program, source: Source, world: World = ALONE) -> Iterator[tuple[Any, int]]:
    """`(batch, samples)` of `source` in its own order, prepared, on the device; of several ranks' in turn, this one's."""
    roles = program.parts.roles
    treatment = Treatment(program.device, roles.seed, roles.prepare)
    order = None
    if not isinstance(source, Stream):
        sums_samples = program.parts.task.objective.sums_samples
        size = min(evaluation_batch_size(source, roles.batch_size, sums_samples), len(source))
        drops = source.batching.drop_last
        order = Dealt(len(source), size, roles.seed, shuffle=False, drop_last=drops, rank=world.rank, ranks=world.ranks)
    feed = open_feed(source, order, treatment, workers=program.parts.plan.workers, endless=False)
    if isinstance(feed, SamplesFeed | StreamFeed):
        feed.check = program.check
    streams, owned = Streams(roles.seed, *program.devices), OwnedGenerators(program.parts.task.owners(program.model))
    try:
        for number, (batch, samples) in enumerate(feed.epoch(0)):
            PROGRESS.begin_batch()
            owned.refresh()
            owned.seed(streams.reseed("evaluate", world.rank + number * world.ranks))
            yield batch, samples
    finally:
        feed.close()


def evaluation_batch_size(source: Source, batch_size: int, sums_samples: bool) -> int:
    """A DataLoader's own; of arrays larger than in training where inputs are small, since no activations are kept.

    For a data set that of training, read into memory or not: the last bits of a figure depend on it.

    Args:
        batch_size: of training.
        sums_samples: whether the loss is known to be a mean over samples, whatever else is in the batch.
    """
    if not isinstance(source, Stream) and source.batching.batch_size is not None:
        return source.batching.batch_size
    if not isinstance(source, Table) or source.read or not sums_samples:
        return batch_size
    return enlarged(batch_size, source.nbytes() // len(source))


def enlarged(batch_size: int, sample_bytes: int) -> int:
    """A batch size for inference with inputs of this size."""
    return max(batch_size, min(_INPUT_BYTES // max(1, sample_bytes), 4096))


class _Sums:
    """Weighted sums on the device; they are read once, at the end."""

    def __init__(self, program: Program) -> None:
        self.program, self.task = program, program.parts.task
        self.wide = torch.float32 if program.device.type == "mps" else torch.float64  # mps has no float64
        self.samples = 0
        self.classifies: bool | None = None if self.task.metrics is None else False
        self.totals: dict[str, Any] = {}
        self.counts: dict[str, Any] = {}

    def add(self, batch: Any, samples: int) -> Computed | None:
        computed = self._computed(batch, samples)
        if computed is None:
            return None
        weight = self.task.weight_of(batch, samples)
        rows, doubt = count_rows(batch, samples)
        if doubt and self.task.weight is None:
            self.program.checks.say_uncounted(doubt)
        self._add("loss", weighted(computed.loss.detach().to(self.wide), weight), weight)
        for name, value in computed.scalars.items():
            self._add(name, weighted(value.to(self.wide), weight), weight)
        if computed.output is not None:
            for name, metric in self._metrics(computed).items():
                self._add(name, *self._counted(name, metric, computed.output, batch[-1], rows))
        self.samples += rows
        return computed

    def _computed(self, batch: Any, samples: int) -> Computed | None:
        """The forward pass, with a word on whether it is of a classification, which the first batch shows."""
        if self.classifies is None and not self.task.objective.cross_entropy:
            with LossReads() as reads:
                computed = self.program.evaluated(batch, samples)
            if computed is not None and computed.output is not None:
                self.classifies = reads.as_classes(computed.output, batch[-1])
        else:
            computed = self.program.evaluated(batch, samples)
        if computed is None or computed.output is None:
            return computed
        certain = self.task.objective.cross_entropy or bool(self.classifies)
        return computed._replace(classified=certain and has_class_shapes(computed.output, batch[-1]))

    def _add(self, name: str, total: Any, count: Any) -> None:
        self.totals[name] = self.totals.get(name, 0) + total
        self.counts[name] = self.counts.get(name, 0) + count

    def _metrics(self, computed: Computed) -> dict[str, Callable[[Any, Any], Any]]:
        if self.task.metrics is not None:
            return dict(self.task.metrics)
        ignored = self.task.objective.ignore_index
        if computed.classified:
            return {"accuracy": lambda output, target: correct(output, target, ignored)}
        return {}

    def _counted(self, name: str, metric: Callable, output: Any, target: Any, rows: int) -> tuple[Any, Any]:
        value = calling(f"the metric {name!r}", metric, output, target)
        if isinstance(value, tuple):
            return value[0], value[1]
        if isinstance(value, Tensor) and value.ndim == 1:
            return value.to(self.wide).sum(), len(value)
        if isinstance(value, Real) or (isinstance(value, Tensor) and value.ndim == 0):
            return value * rows, rows
        raise TaskError(
            f"the metric {name!r} returned {type(value).__name__}",
            expected="a number, a value per sample, or (sum, count)",
        )

    def plain(self) -> Sums:
        """The sums as numbers; waits for the device."""
        return self.samples, {name: (float(self.totals[name]), float(self.counts[name])) for name in self.totals}


Sums = tuple[int, dict[str, tuple[float, float]]]
"""Samples, and by name of a figure what was added up and what it counts."""


def figures_of(parts: Sequence[Sums]) -> Figures:
    """The figures of a data set that was evaluated in parts."""
    values = {}
    for name in dict.fromkeys(name for _, own in parts for name in own):
        total, count = (sum(own.get(name, (0.0, 0.0))[place] for _, own in parts) for place in (0, 1))
        values[name] = total / (count or math.nan)  # a mean of nothing is NaN
    return Figures(samples=sum(samples for samples, _ in parts), values=values)
