"""Batches in the Task's order, from each form of data, on the device.

A feed's `epoch(epoch, start)` yields `(batch, samples)` from batch number `start` on. The batches depend on
(seed, epoch, start) alone, so that a run can resume at any batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hotloop.core.processes import StopRequested
from hotloop.core.random.generators import OwnedGenerators
from hotloop.core.random.rng import RandomStreams, preserve_generators, seed_for
from hotloop.data.augment import Draws
from hotloop.data.batch_functions import BatchFunction
from hotloop.data.batch_tree import map_tensors, to_device
from hotloop.data.dataset_changes import dataset_summary
from hotloop.data.feeds.batches import RowBatches
from hotloop.data.feeds.loader_workers import (
    Check,
    WorkerInit,
    check_while_waiting,
    end_workers,
    never_stop,
    report_from_workers,
)
from hotloop.data.feeds.prefetch import prefetch_to_device
from hotloop.data.order import Order
from hotloop.data.row_count import count_rows
from hotloop.data.seeded_dataset import SAMPLE_NOTE, SampleWatch, SeededDataset, generator_owners, iterate_loader
from hotloop.data.sources import Samples, Stream, Table
from hotloop.data.splits import DataSplits
from hotloop.errors import DataError, HotloopError, dead_dataloader_worker, describe_error


class Feed(Protocol):
    batches: int | None
    """Batches in an epoch; None if only iteration shows the number."""
    reseeds: bool
    """Whether making a batch may reseed Python's and NumPy's generators in this process."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, int]]:
        """Yields `(batch, samples)` of one epoch from batch `start` on."""

    def close(self) -> None:
        """Ends worker processes."""


@dataclass(frozen=True)
class BatchTransform:
    """The transforms of a batch, or of a rank's rows: copy to the device, `prepare`, `augment` (training only)."""

    device: torch.device
    seed: int
    prepare: Callable[[Any], Any] | None = None
    augment: Callable[[Any, Draws], Any] | None = None
    rank: int = 0

    @cached_property
    def identity(self) -> bool:
        """Whether batches on the CPU stay unchanged."""
        return self.device.type == "cpu" and self.prepare is None and self.augment is None

    def __call__(self, batch: Any, epoch: int, number: int, samples: Tensor) -> Any:
        batch = to_device(batch, self.device)
        if self.prepare is not None:
            batch = self._prepare(batch, lambda: seed_for(self.seed, "prepare", epoch, number))
        if self.augment is not None:
            samples, streams = samples.to(self.device), RandomStreams(self.seed, self.device)
            # Ranks differ in the global generators, which an `augment` may use instead of `draws`.
            stream: tuple[Any, ...] = ("augment", epoch, number, *[self.rank] * (self.rank > 0))
            draws = partial(Draws, self.seed, epoch, samples)
            batch = self._augment(batch, lambda: streams.reseed(*stream), draws)
        return batch

    @cached_property
    def _prepare(self) -> BatchFunction:
        return BatchFunction("prepare", self.prepare)

    @cached_property
    def _augment(self) -> BatchFunction:
        return BatchFunction("augment", self.augment)


@dataclass
class TableFeed:
    table: Table
    order: Order
    treatment: BatchTransform

    def __post_init__(self) -> None:
        self.batches: int | None = self.order.batches
        self.reseeds = self.treatment.augment is not None or not (
            self.table.is_prepared or self.treatment.prepare is None
        )

    @property
    def is_untouched(self) -> bool:
        """Whether batches are plain rows of the arrays, so that no function of the user runs."""
        treatment = self.treatment
        return treatment.prepare is None and treatment.augment is None and self.table.device == treatment.device

    def row_batches(self, epoch: int, start: int = 0) -> RowBatches:
        """Returns the batches of one epoch from `start` on; requires `is_untouched`."""
        return RowBatches(self.table, self.order, self.order.epoch(epoch).to(self.table.device), start)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, int]]:
        taken = self._take(self.order.epoch(epoch).to(self.table.device), start)
        if self.table.device != self.treatment.device:
            taken = prefetch_to_device(taken, self.treatment.device)
        for batch, index, number in taken:
            yield batch if self.treatment.identity else self.treatment(batch, epoch, number, index), len(index)

    def _take(self, permutation: Tensor, start: int) -> Iterator[tuple[Any, ...]]:
        for number in range(start, self.order.batches):
            index = self.order.batch(permutation, number)
            yield self.table.take(index), index, number

    def close(self) -> None:
        pass


@dataclass
class SamplesFeed:
    """Loads a map-style data set, with workers or without; random numbers depend on (seed, epoch, sample).

    One loader serves all epochs, so that workers start once and load across the end of an epoch. If the data set has
    changed, the workers start again at the next epoch, since their copies don't follow changes.

    Attributes:
        check: called while the feed waits for a batch; raises StopRequested to end the wait.
    """

    samples: Samples
    order: Order
    treatment: BatchTransform
    workers: int | None = None
    is_endless: bool = True
    check: Check = field(default_factory=lambda: never_stop, init=False)
    _batches: Any = field(default=None, init=False)
    _summary: tuple[Any, ...] = field(default=(), init=False)
    _watch: SampleWatch | None = field(default=None, init=False)
    _next: tuple[int, int] | None = field(default=None, init=False)
    reseeds: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self.batches: int | None = self.order.batches

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, int]]:
        if self._next != (epoch, start) or self._has_changed():
            self._start(epoch, start)
        loaded = self._loaded(epoch, start)
        if self.treatment.device.type != "cpu":
            loaded = prefetch_to_device(loaded, self.treatment.device)
        for batch, index, number in loaded:
            yield self.treatment(batch, epoch, number, index), len(index)

    def _loaded(self, epoch: int, start: int) -> Iterator[tuple[Any, ...]]:
        """Yields `(batch, index, number)` on the CPU."""
        permutation = self.order.epoch(epoch)
        for number in range(start, self.order.batches):
            index = self.order.batch(permutation, number)
            is_last = number + 1 == self.order.batches
            self._next = (epoch, number + 1) if not is_last else (epoch + 1, 0) if self.is_endless else None
            yield self._load(), index, number

    def _has_changed(self) -> bool:
        """Whether the data set of this process differs from the copies of the workers, by its objects or its samples."""
        if not self._uses_workers:
            return False
        is_other = self._watch is not None and self._watch.has_changed()
        return is_other or self._summary != dataset_summary(self.samples.dataset)

    @property
    def _uses_workers(self) -> bool:
        return bool(self.samples.workers if self.workers is None else self.workers)

    def _start(self, epoch: int, start: int) -> None:
        self.close()
        if self._uses_workers:
            self._watch = SampleWatch(self.samples, self.treatment.seed)
            self._summary = dataset_summary(self.samples.dataset)
        seed = self.treatment.seed
        pinned = {"pin_memory": True} if self.treatment.device.type == "cuda" else {}
        batches = start_loader(
            self.samples,
            SeededDataset(self.samples, seed),
            seed,
            self.workers,
            batch_sampler=_SampleKeys(self.order, epoch, start, self.is_endless),
            collate_fn=self.samples.collate,
            **pinned,
        )
        self._batches = check_while_waiting(batches, lambda: self.check())

    def _load(self) -> Any:
        try:
            return next(self._batches)
        except StopRequested:
            self.close()
            raise
        except Exception as error:
            self.close()
            raise data_error(error) from error

    def close(self) -> None:
        end_workers(self._batches)
        self._batches = self._next = None


def start_loader(samples: Samples, dataset: Any, seed: int, workers: int | None, **how: Any) -> Iterator[Any]:
    """Starts a DataLoader over `dataset` with the workers and options of `samples`; see `end_workers`."""
    workers = samples.workers if workers is None else workers
    options = samples.loader_options if workers else {}
    return iter(
        DataLoader(
            dataset,
            num_workers=workers,
            generator=torch.Generator().manual_seed(seed_for(seed, "workers")),
            **options | how | {"worker_init_fn": WorkerInit(options.get("worker_init_fn"))},
        )
    )


@dataclass
class StreamFeed:
    """Iterates over a user's loader; a resumed run skips earlier batches.

    Attributes:
        check: called while the feed waits for a batch; raises StopRequested to end the wait.
    """

    stream: Stream
    treatment: BatchTransform
    check: Check = field(default_factory=lambda: never_stop, init=False)
    reseeds: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self.batches: int | None = self.stream.batches

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, int]]:
        loader, streams = self.stream.loader, RandomStreams(self.treatment.seed)
        seed = seed_for(self.treatment.seed, "stream", epoch)
        streams.reseed("stream", epoch)
        names = ("dataset", "sampler", "batch_sampler")
        for part in [loader, *(getattr(loader, name, None) for name in names)]:
            if isinstance(getattr(part, "generator", None), torch.Generator):
                part.generator.manual_seed(seed)
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        self._owned_generators.refresh()
        self._owned_generators.seed(seed)
        done = seen = 0
        for number, batch in enumerate(_guard_batches(loader, seed, partial(self._begin, streams, epoch), self.check)):
            done, size = number + 1, count_rows(batch).number
            if number >= start:  # samples are numbered by their place in the stream
                yield self.treatment(batch, epoch, number, torch.arange(seen, seen + size)), size
            seen += size
        if done < max(start, 1):
            again = epoch or start
            raise DataError(
                f"epoch {epoch + 1} of the data has {done} batches" if again else "data is empty",
                expected=f"{start} or more" if start else "one batch or more",
                fix="give data that can be iterated anew in each epoch" if again else "check what it iterates over",
            )

    @cached_property
    def _owned_generators(self) -> OwnedGenerators:
        """Returns the loader's random generators, without those that are seeded once per epoch."""
        loader = self.stream.loader
        parts = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
        return OwnedGenerators(
            generator_owners(self.stream), left_out=[getattr(part, "generator", None) for part in parts]
        )

    def _begin(self, streams: RandomStreams, epoch: int, number: int) -> None:
        self._owned_generators.late_finds()
        self._owned_generators.seed(streams.reseed("stream", epoch, number))

    def close(self) -> None:
        pass


def _guard_batches(loader: Any, seed: int, before: Callable[[int], None], check: Check) -> Iterator[Any]:
    """Yields the batches of a user's loader, calls `before(number)` before each, and translates errors."""
    try:
        with report_from_workers(loader):
            batches = check_while_waiting(iterate_loader(loader, seed), check)
        for number in itertools.count():
            before(number)
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch
    except StopRequested:
        end_workers(batches)
        raise
    except Exception as error:
        raise data_error(error) from error


def data_error(error: Exception) -> HotloopError:
    """Returns the error of a data set, raised here or in a worker process, as an error of one line."""
    # A worker's error arrives as text, in an error of the same class.
    if isinstance(error, HotloopError) and not error.given.startswith("Caught "):
        return error
    if (lost := dead_dataloader_worker(error)) is not None:
        return lost
    last = (getattr(error, "__notes__", None) or str(error).splitlines() or [""])[-1]
    where, remedy = (f" {last}", ", or leave that sample out") if last.startswith(SAMPLE_NOTE) else ("", "")
    return DataError(f"the data set raised {describe_error(error)}{where}", fix=f"correct the data set{remedy}")


@dataclass(frozen=True)
class _SampleKeys:
    """`(epoch, sample)` keys, batch by batch, from a position on; for one epoch or endless."""

    order: Order
    first_epoch: int
    start: int
    endless: bool

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        start = self.start
        for epoch in itertools.count(self.first_epoch):
            permutation = self.order.epoch(epoch)
            for number in range(start, self.order.batches):
                yield [(epoch, sample) for sample in self.order.batch(permutation, number).tolist()]
            if not self.endless:
                return
            start = 0


def open_feed(
    source: Table | Samples | Stream,
    order: Order | None,
    treatment: BatchTransform,
    *,
    workers: int | None = None,
    endless: bool = True,
) -> Feed:
    """Returns the feed for a source; `order` is None for a stream, which has its own order."""
    if isinstance(source, Stream):
        return StreamFeed(source, treatment)
    assert order is not None
    if isinstance(source, Table):
        if source.is_prepared:
            treatment = replace(treatment, prepare=None)
        return TableFeed(source, order, treatment)
    return SamplesFeed(source, order, treatment, workers, endless)


def first_batch(roles: DataSplits, samples: int = 2) -> Any:
    """Returns a batch of the first training samples, prepared, on the CPU; all generators keep their states."""
    treatment = BatchTransform(torch.device("cpu"), roles.seed, roles.prepare)
    order = None
    if not isinstance(roles.train, Stream):
        order = Order(len(roles.train), min(samples, len(roles.train)), roles.seed, shuffle=False)
    with preserve_generators():
        batch, size = next(open_feed(roles.train, order, treatment, workers=0, endless=False).epoch(0))
    return map_tensors(lambda tensor: tensor[:samples] if tensor.ndim and len(tensor) == size else tensor, batch)
