"""Loss and metrics of a data set under a model in evaluation mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.data.feed import Treatment, open_feed
from hotloop.data.order import Order
from hotloop.data.source import Source, Stream, Table
from hotloop.errors import TaskError, calling
from hotloop.lowering import Program
from hotloop.objective import weighted
from hotloop.records import Figures
from hotloop.rng import Streams
from hotloop.task import Computed, Task

_INPUT_BYTES = 1 << 20
"""Inputs of this size make a batch large enough that its overhead no longer matters."""


Watch = Callable[[Any, int, Computed], None]
"""Sees each batch of an evaluation: `(batch, samples, computed)`, on the device."""


def evaluate(program: Program, source: Source, watch: Watch | None = None) -> Figures:
    """Loss and metrics over `source`, each averaged over all that they count.

    The figures follow from the model and the data alone: random draws are reseeded batch by batch.
    """
    sums = _Sums(program.parts.task, program.device)
    with program.inference() as model:
        for batch, samples in batches(program, source):
            computed = sums.add(model, batch, samples)
            if watch is not None:
                watch(batch, samples, computed)
    return sums.figures()


def batches(program: Program, source: Source) -> Iterator[tuple[Any, int]]:
    """`(batch, samples)` of `source` in its own order, prepared, on the device."""
    roles = program.parts.roles
    treatment = Treatment(program.device, roles.seed, roles.prepare)
    order = None
    if not isinstance(source, Stream):
        size = min(evaluation_batch_size(source, roles.batch_size), len(source))
        order = Order(len(source), size, roles.seed, shuffle=False)
    feed = open_feed(source, order, treatment, workers=program.parts.plan.workers, endless=False)
    streams = Streams(roles.seed, program.device)
    try:
        for number, (batch, samples) in enumerate(feed.epoch(0)):
            streams.reseed("evaluate", number)
            yield batch, samples
    finally:
        feed.close()


def evaluation_batch_size(source: Source, batch_size: int) -> int:
    """Larger than in training where inputs are small, since no activations are kept.

    For a data set that of training, read into memory or not: the last bits of a figure depend on it.
    """
    if not isinstance(source, Table) or source.read:
        return batch_size
    return enlarged(batch_size, source.nbytes() // len(source))


def enlarged(batch_size: int, sample_bytes: int) -> int:
    """A batch size for inference with inputs of this size."""
    return max(batch_size, min(_INPUT_BYTES // max(1, sample_bytes), 4096))


class _Sums:
    """Weighted sums on the device; they are read once, at the end."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.task = task
        self.wide = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
        self.samples = 0
        self.totals: dict[str, Any] = {}
        self.counts: dict[str, Any] = {}

    def add(self, model: nn.Module, batch: Any, samples: int) -> Computed:
        computed = self.task.compute(model, batch)
        weight = self.task.weight_of(batch, samples)
        self._add("loss", weighted(computed.loss.detach().to(self.wide), weight), weight)
        for name, value in computed.scalars.items():
            self._add(name, weighted(value.to(self.wide), weight), weight)
        if computed.output is not None:
            for name, metric in self._metrics(computed.output, batch[-1]).items():
                self._add(name, *self._counted(name, metric, computed.output, batch[-1], samples))
        self.samples += samples
        return computed

    def _add(self, name: str, total: Any, count: Any) -> None:
        self.totals[name] = self.totals.get(name, 0) + total
        self.counts[name] = self.counts.get(name, 0) + count

    def _metrics(self, output: Any, target: Any) -> dict[str, Callable[[Any, Any], Any]]:
        if self.task.metrics is not None:
            return dict(self.task.metrics)
        ignored = self.task.objective.ignore_index
        if is_classification(output, target):
            return {"accuracy": lambda output, target: correct(output, target, ignored)}
        return {}

    def _counted(self, name: str, metric: Callable, output: Any, target: Any, samples: int) -> tuple[Any, Any]:
        value = calling(f"the metric {name!r}", metric, output, target)
        if isinstance(value, tuple):
            return value[0], value[1]
        if isinstance(value, Tensor) and value.ndim == 1:
            return value.to(self.wide).sum(), len(value)
        if isinstance(value, Real) or (isinstance(value, Tensor) and value.ndim == 0):
            return value * samples, samples
        raise TaskError(
            f"the metric {name!r} returned {type(value).__name__}",
            expected="a number, a value per sample, or (sum, count)",
        )

    def figures(self) -> Figures:
        counts = {name: float(count) or math.nan for name, count in self.counts.items()}  # a mean of nothing is NaN
        values = {name: float(total) / counts[name] for name, total in self.totals.items()}
        return Figures(samples=self.samples, values=values)


def is_classification(output: Any, target: Any) -> bool:
    """Whether shapes and dtypes are those of class scores (batch, classes, ...) and int64 labels (batch, ...)."""
    return (
        isinstance(output, Tensor)
        and isinstance(target, Tensor)
        and target.dtype == torch.int64
        and output.is_floating_point()
        and output.ndim == target.ndim + 1
        and output.shape[:1] + output.shape[2:] == target.shape
    )


def correct(output: Tensor, target: Tensor, ignored: int | None = None) -> tuple[Tensor, Tensor | int]:
    """`(how many targets have the highest score, how many count)`."""
    hits = output.argmax(dim=1) == target
    if ignored is None:
        return hits.sum(), target.numel()
    counted = target != ignored
    return (hits & counted).sum(), counted.sum()
