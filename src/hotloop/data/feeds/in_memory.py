"""Reads a map-style data set into memory if this changes nothing but the loading time.

A request for a sample must always return the same sample, a batch must be its collated samples, and all must
fit. Only some samples are checked. The author states other randomness, or changes in training, in
`Task.deterministic`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hotloop.core.random.rng import generator_for, generator_states, seed_for
from hotloop.core.reporter import SampleProgress
from hotloop.data.batch_difference import batch_difference, batch_form, batch_leaves, first_difference, raw_bytes
from hotloop.data.batch_functions import BatchFunction
from hotloop.data.batch_tree import map_tensors, tree_tensors
from hotloop.data.feeds.feed import data_error, start_loader
from hotloop.data.feeds.loader_workers import end_workers
from hotloop.data.order import Order
from hotloop.data.seeded_dataset import SeededDataset, get_sample
from hotloop.data.sources import Samples, Table
from hotloop.errors import DataError, InsufficientMemoryError, PlanError, describe_error, type_name

MAX_REQUESTS = 256
"""Number of samples that are requested twice, spread over the data set."""

_BATCH_SIZES = (2, 3, 5)
"""Sizes of the batches that are compared with their samples before the read."""

_BY_SAMPLE = "use residency='stream', which loads it sample by sample"


@dataclass(frozen=True)
class InMemoryRead:
    """How a data set is read.

    Attributes:
        name: the data's name in errors, such as `validation`.
        order: order of the batches; their size is that of the compared batches.
        deterministic: the Task's statement; None to check.
        prepare: applied to the whole table if this gives the same bits as batch by batch.
        workers: number of reading processes; None for the data set's own.
        free_bytes: free memory, of which half may be used; None if unknown.
    """

    name: str
    order: Order
    deterministic: bool | None = None
    prepare: Callable[[Any], Any] | None = None
    workers: int | None = None
    free_bytes: int | None = None
    progress: SampleProgress = lambda done, samples: None

    def refusal(self, why: str, fix: str = _BY_SAMPLE) -> PlanError:
        return PlanError(self._not_read_error(why), fix=fix)

    def insufficient_memory(self, why: str) -> InsufficientMemoryError:
        return InsufficientMemoryError(self._not_read_error(why), fix=_BY_SAMPLE)

    def _not_read_error(self, why: str) -> str:
        return f"{self.name} can't be read into memory: {why}"


def read_into_memory(samples: Samples, how: InMemoryRead) -> Table:
    """Returns the data set as a table with bit by bit the same batches.

    Raises:
        PlanError: the data set is random, its batches aren't its collated samples, or it doesn't fit; names the
            first such sample.
        DataError: the data set raised an error.
    """
    if how.deterministic is False:
        raise how.refusal("the Task says deterministic=False")
    form, sample_bytes = _examine(samples, how)
    needed = sample_bytes * len(samples)
    if how.free_bytes is not None and needed > how.free_bytes // 2:
        raise how.insufficient_memory(
            f"it takes about {format_megabytes(needed)}, more than half of the {format_megabytes(how.free_bytes)} free"
        )
    table = _read_table(samples, how, form)
    _compare_batches(samples, how, table)
    return _prepare_table(table, how)


def format_megabytes(number: float) -> str:
    """Returns text such as `45 MB`, with 10^6 bytes."""
    return f"{number / 1e6:,.0f} MB" if number >= 1e7 else f"{number / 1e6:,.1f} MB"


@dataclass(frozen=True)
class _SampleAnswer:
    """The result of a request: the sample's form and bytes, and the generator that it drew from, if any."""

    digest: bytes = b""
    form: tuple[str, ...] = ()
    nbytes: int = 0
    drawn: str = ""
    why: str = ""


class _SampleRequests(Dataset):
    """A data set with keys `(round, samples)`: describes one sample, or compares several with their batch.

    Runs in a worker if the data set has workers: files that it opens late then aren't shared by processes.
    """

    def __init__(self, samples: Samples, seed: int) -> None:
        self.samples, self.seed = samples, seed

    def __getitem__(self, key: tuple[int, tuple[int, ...]]) -> _SampleAnswer:
        again, numbers = key
        return self._request_one(again, numbers[0]) if len(numbers) == 1 else self._request_batch(numbers)

    def _request_one(self, again: int, number: int) -> _SampleAnswer:
        self._seeded.begin("asked", again, number)
        before = self._states()
        item = get_sample(self.samples.dataset, number)
        try:
            batch = self.samples.collate([item])
        except Exception as error:
            return _SampleAnswer(why=f"collate raised {describe_error(error)} for a batch of sample {number} alone")
        after = self._states()
        drawn = next((name for name, state in before.items() if state != after[name]), "")
        if why := _not_rows(batch, 1):
            return _SampleAnswer(drawn=drawn, why=f"in a batch of sample {number} alone, {why}")
        nbytes = sum(tensor.nbytes for tensor in tree_tensors(batch))
        return _SampleAnswer(_digest(batch), batch_form(batch), nbytes, drawn)

    @cached_property
    def _seeded(self) -> SeededDataset:
        return SeededDataset(self.samples, self.seed)

    def _states(self) -> dict[str, Any]:
        common = {f"{library} random generator": state for library, state in generator_states().items()}
        return common | {
            f"the random generator {path}": state for path, state in self._seeded.owned_generators.states().items()
        }

    def _request_batch(self, numbers: tuple[int, ...]) -> _SampleAnswer:
        seeded = self._seeded
        alone = [self.samples.collate([seeded[0, number]]) for number in numbers]
        items = [seeded[0, number] for number in numbers]
        try:
            batch = self.samples.collate(items)
        except Exception as error:
            return _SampleAnswer(why=f"collate raised {describe_error(error)} for a batch of {len(numbers)}")
        columns = zip(*map(tree_tensors, alone), strict=True)
        joined = iter([torch.cat(column) for column in columns])
        why = _not_rows(batch, len(numbers)) or batch_difference(batch, map_tensors(lambda _: next(joined), alone[0]))
        return _SampleAnswer(why=why and f"the collated samples {list(numbers)} differ from their batch: {why}")


def _examine(samples: Samples, how: InMemoryRead) -> tuple[tuple[str, ...], float]:
    """Returns the form and the mean bytes of a sample; refuses random samples, and samples of several forms."""
    count = len(samples)
    spread = torch.linspace(0, count - 1, min(MAX_REQUESTS, count), dtype=torch.float64)
    numbers = spread.round().long().unique().tolist()
    keys = [(0, (number,)) for number in numbers]
    if how.deterministic is None:  # in reverse order, since a sample may depend on earlier requests
        keys += [(1, (number,)) for number in reversed(numbers)]
    first: dict[int, _SampleAnswer] = {}
    with closing(_answers(samples, how, keys)) as answers:
        for (again, (number,)), answer in answers:
            how.progress(0, count)
            if answer.drawn and how.deterministic is None:
                raise how.refusal(
                    f"its sample {number} draws from {answer.drawn}",
                    "use residency='stream'; or set deterministic=True in the Task, if one draw for each "
                    "sample is enough",
                )
            if answer.why:
                raise how.refusal(answer.why)
            known = first.setdefault(number, answer)
            if again and known.digest != answer.digest:
                raise how.refusal(f"its sample {number} differs when it is read again")
            if known.form != first[numbers[0]].form:
                one, other = first_difference(first[numbers[0]].form, known.form)
                raise how.refusal(f"in sample {numbers[0]} {one}, in sample {number} {other}")
    with closing(_answers(samples, how, list(_batches_to_try(numbers, how)))) as answers:
        for _, answer in answers:
            if answer.why:
                raise how.refusal(answer.why)
    return first[numbers[0]].form, sum(answer.nbytes for answer in first.values()) / len(first)


def _batches_to_try(numbers: list[int], how: InMemoryRead) -> Iterator[tuple[int, tuple[int, ...]]]:
    for size in _BATCH_SIZES:
        if size <= len(numbers):
            chosen = torch.randperm(len(numbers), generator=generator_for(how.order.seed, "together", size))[:size]
            yield 2, tuple(numbers[place] for place in chosen.tolist())


def _answers(samples: Samples, how: InMemoryRead, keys: list) -> Generator[tuple[Any, _SampleAnswer]]:
    requests = _SampleRequests(samples, how.order.seed)
    with closing(_run_loader(samples, how, requests, batch_size=None, sampler=keys)) as answers:
        yield from zip(keys, answers, strict=True)


def _run_loader(samples: Samples, how: InMemoryRead, dataset: Any, **options: Any) -> Generator[Any]:
    running: Any = None
    try:
        running = start_loader(samples, dataset, how.order.seed, how.workers, **options)
        yield from running
    except Exception as error:
        raise data_error(error) from error
    finally:
        end_workers(running)


def _read_table(samples: Samples, how: InMemoryRead, form: tuple[str, ...]) -> Table:
    count, size = len(samples), how.order.batch_size
    columns: Any = None
    done = 0
    with closing(_batches(samples, how, torch.arange(count).split(size))) as batches:
        for batch in batches:
            rows = min(size, count - done)
            if why := _not_rows(batch, rows):
                raise how.refusal(f"in the batch of samples {done} to {done + rows - 1}, {why}")
            if (now := batch_form(batch)) != form:
                one, other = first_difference(form, now)
                raise how.refusal(f"in the first samples {one}, in the batch from sample {done} on {other}")
            if columns is None:
                columns = map_tensors(lambda tensor: tensor.new_empty((count, *tensor.shape[1:])), batch)
            for column, values in zip(tree_tensors(columns), tree_tensors(batch), strict=True):
                column[done : done + rows] = values
            done += rows
            how.progress(done, count)
    return Table(columns, is_read=True, batching=samples.batching)


def _batches(samples: Samples, how: InMemoryRead, indices: Any) -> Generator[Any]:
    """Yields batches of these samples, with the random numbers of the first epoch."""
    keys = [[(0, sample) for sample in index.tolist()] for index in indices]
    dataset = SeededDataset(samples, how.order.seed)
    return _run_loader(samples, how, dataset, batch_sampler=keys, collate_fn=samples.collate)


def _first_and_last(order: Order) -> list[Tensor]:
    permutation = torch.randperm(order.samples, generator=generator_for(order.seed, "order", 0))
    return [order.batch(permutation, number) for number in sorted({0, order.batches - 1})]


def _compare_batches(samples: Samples, how: InMemoryRead, table: Table) -> None:
    """Loads two batches of a shuffled epoch once more and compares them with the table's."""
    indices = _first_and_last(how.order)
    with closing(_batches(samples, how, indices)) as batches:
        for index, batch in zip(indices, batches, strict=True):
            if why := batch_difference(batch, table.take(index)):
                raise how.refusal(f"the batch that starts with its samples {index[:3].tolist()} differs: {why}")


def _prepare_table(table: Table, how: InMemoryRead) -> Table:
    """Applies `prepare` to the whole table, unless batches then differ in bits, as with sums over a batch."""
    prepare = how.prepare
    if prepare is None:
        return table.apply(None)
    try:
        whole = table.apply(prepare, how.order.seed)
    except DataError:  # `prepare` returns another number of rows
        return table
    if not whole.is_prepared:
        return table
    named = BatchFunction("prepare", prepare)
    pairs = (
        (named(table.take(index), lambda: seed_for(how.order.seed, "prepare", 0, 1)), whole.take(index))
        for index in _first_and_last(how.order)
    )
    return table if any(batch_difference(batch, rows) for batch, rows in pairs) else whole


def _not_rows(batch: Any, samples: int) -> str:
    """Returns why a batch isn't made of tensors with a row for each sample; empty if it is."""
    leaves = list(batch_leaves(batch))
    for path, leaf in leaves:
        if type(leaf) is not Tensor:
            return f"{path} is {type_name(leaf)} and no tensor"
        if leaf.layout is not torch.strided or leaf.is_quantized or leaf.device.type != "cpu" or leaf.requires_grad:
            return f"{path} is no plain tensor on the CPU"
        if leaf.ndim == 0 or len(leaf) != samples:
            return f"{path} has shape {tuple(leaf.shape)}, which is no row for each of {samples} samples"
    return "" if leaves else "there is no tensor"


def _digest(batch: Any) -> bytes:
    digest = hashlib.blake2b(repr(batch_form(batch)).encode())
    for tensor in tree_tensors(batch):
        digest.update(raw_bytes(tensor).numpy().data)
    return digest.digest()
