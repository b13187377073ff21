"""Loss and metrics of a data set under a model in evaluation mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from hotloop.core.processes import StopRequested
from hotloop.core.random.generators import OwnedGenerators
from hotloop.core.random.rng import RandomStreams
from hotloop.core.records.training import Figures
from hotloop.core.task_parts.losses import LossReads, count_correct, has_class_shapes, weight_mean
from hotloop.data.feeds.feed import BatchTransform, SamplesFeed, StreamFeed, open_feed
from hotloop.data.order import DealtBatches
from hotloop.data.row_count import count_rows
from hotloop.data.sources import Source, Stream, Table
from hotloop.distributed.watchdog import RANK_PROGRESS
from hotloop.distributed.world import SINGLE_RANK, World
from hotloop.errors import TaskError, call_user_code
from hotloop.lowering.program import Program
from hotloop.task import StepResult

_INPUT_BYTES = 1 << 20
"""Bytes of input per batch from which the overhead of a batch no longer matters."""


BatchObserver = Callable[[Any, int, Any], None]
"""Called with each batch of an evaluation: `(batch, samples, computed)`, on the device; `computed` is None if another
rank has the result.
"""


def evaluate(program: Program, source: Source, watch: BatchObserver | None = None) -> Figures:
    """Returns loss and metrics over `source`, each averaged with its own weights.

    The figures follow from the model and the data alone: the generators are seeded for each batch.
    """
    sums = _WeightedSums(program)
    parts, stopped = program.parts, ""
    world = SINGLE_RANK if isinstance(source, Stream) else parts.evaluation_ranks
    try:
        with RANK_PROGRESS.within("evaluation"), program.inference():
            for batch, samples in evaluation_batches(program, source, world):
                computed = sums.add(batch, samples)
                if watch is not None:
                    watch(batch, samples, computed)
    except StopRequested as error:
        stopped = error.reason
    together = parts.world if parts.is_pipelined else world
    # a stopped rank takes part, too: the others wait for its contribution
    gathered = together.all_gather((stopped, sums.plain()))
    if reasons := [reason for reason, _ in gathered if reason]:
        raise StopRequested(reasons[0])
    return merge_figures([rank_sums for _, rank_sums in gathered])


def evaluation_batches(program: Program, source: Source, world: World = SINGLE_RANK) -> Iterator[tuple[Any, int]]:
    """Yields prepared `(batch, samples)` of `source` on the device in the source's order; several ranks take turns."""
    roles = program.parts.splits
    treatment = BatchTransform(program.device, roles.seed, roles.prepare)
    order = None
    if not isinstance(source, Stream):
        sums_samples, drop_last = program.parts.task.objective.sums_samples, source.batching.drop_last
        size = min(evaluation_batch_size(source, roles.batch_size, sums_samples), len(source))
        ranks = {"rank": world.rank, "ranks": world.ranks}
        order = DealtBatches(len(source), size, roles.seed, shuffle=False, drop_last=drop_last, **ranks)
    feed = open_feed(source, order, treatment, workers=program.parts.plan.workers, endless=False)
    if isinstance(feed, SamplesFeed | StreamFeed):
        feed.check = program.check
    streams = RandomStreams(roles.seed, *program.devices)
    owned = OwnedGenerators(program.parts.task.owners(program.model))
    try:
        for number, (batch, samples) in enumerate(feed.epoch(0)):
            RANK_PROGRESS.begin_batch()
            owned.refresh()
            owned.seed(streams.reseed("evaluate", world.rank + number * world.ranks))
            yield batch, samples
    finally:
        feed.close()


def evaluation_batch_size(source: Source, batch_size: int, sums_samples: bool) -> int:
    """Returns the DataLoader's batch size, or one larger than in training for arrays of small inputs.

    A data set has the training's batch size, read into memory or not: the last bits of a figure depend on the size.

    Args:
        batch_size: the training's.
        sums_samples: whether the loss is a mean over samples, independent of the rest of the batch.
    """
    if not isinstance(source, Stream) and source.batching.batch_size is not None:
        return source.batching.batch_size
    if not isinstance(source, Table) or source.is_read or not sums_samples:
        return batch_size
    return inference_batch_size(batch_size, source.nbytes() // len(source))


def inference_batch_size(batch_size: int, sample_bytes: int) -> int:
    """Returns a batch size for inference with inputs of `sample_bytes` each."""
    return max(batch_size, min(_INPUT_BYTES // max(1, sample_bytes), 4096))


class _WeightedSums:
    """Weighted sums on the device, which are read once, at the end."""

    def __init__(self, program: Program) -> None:
        self.program, self.task = program, program.parts.task
        self.wide = torch.float32 if program.device.type == "mps" else torch.float64  # mps has no float64
        self.samples = 0
        self.classifies: bool | None = None if self.task.metrics is None else False
        self.totals: dict[str, Any] = {}
        self.counts: dict[str, Any] = {}

    def add(self, batch: Any, samples: int) -> StepResult | None:
        computed = self._compute(batch, samples)
        if computed is None:
            return None
        weight = self.task.weight_of(batch, samples)
        rows, doubt = count_rows(batch, samples)
        if doubt and self.task.weight is None:
            self.program.checks.say_uncounted(doubt)
        self._add("loss", weight_mean(computed.loss.detach().to(self.wide), weight), weight)
        for name, value in computed.scalars.items():
            self._add(name, weight_mean(value.to(self.wide), weight), weight)
        if computed.output is not None:
            for name, metric in self._metrics(computed).items():
                self._add(name, *self._count(name, metric, computed.output, batch[-1], rows))
        self.samples += rows
        return computed

    def _compute(self, batch: Any, samples: int) -> StepResult | None:
        """Computes the forward pass, and whether the task is a classification, which the first batch shows."""
        if self.classifies is None and not self.task.objective.cross_entropy:
            with LossReads() as reads:
                computed = self.program.evaluation_model(batch, samples)
            if computed is not None and computed.output is not None:
                self.classifies = reads.as_classes(computed.output, batch[-1])
        else:
            computed = self.program.evaluation_model(batch, samples)
        if computed is None or computed.output is None:
            return computed
        certain = self.task.objective.cross_entropy or bool(self.classifies)
        return computed._replace(classified=certain and has_class_shapes(computed.output, batch[-1]))

    def _add(self, name: str, total: Any, count: Any) -> None:
        self.totals[name] = self.totals.get(name, 0) + total
        self.counts[name] = self.counts.get(name, 0) + count

    def _metrics(self, computed: StepResult) -> dict[str, Callable[[Any, Any], Any]]:
        if self.task.metrics is not None:
            return dict(self.task.metrics)
        if not computed.classified:
            return {}
        ignored = self.task.objective.ignore_index
        return {"accuracy": lambda output, target: count_correct(output, target, ignored)}

    def _count(self, name: str, metric: Callable, output: Any, target: Any, rows: int) -> tuple[Any, Any]:
        value = call_user_code(f"the metric {name!r}", metric, output, target)
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

    def plain(self) -> FigureSums:
        """Returns the sums as numbers; waits for the device."""
        return self.samples, {name: (float(self.totals[name]), float(self.counts[name])) for name in self.totals}


FigureSums = tuple[int, dict[str, tuple[float, float]]]
"""Number of samples, and (sum, count) by name of a figure."""


def merge_figures(parts: Sequence[FigureSums]) -> Figures:
    """Returns the figures of a data set that was evaluated in parts."""
    values = {}
    for name in dict.fromkeys(name for _, sums in parts for name in sums):
        total, count = (sum(sums.get(name, (0.0, 0.0))[place] for _, sums in parts) for place in (0, 1))
        values[name] = total / (count or math.nan)  # a mean of nothing is NaN
    return Figures(samples=sum(samples for samples, _ in parts), values=values)
