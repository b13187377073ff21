"""The samples of a data set in memory, recorded from the batches that the script itself loads.

A sample is used from memory after the script has read this sample once, and many samples twice with the same bits; with `--exact`,
after two reads of this sample. Reading it may neither draw random numbers nor change the data set. Later changes of the data set
are found in its summary, and by one sample of each batch that is read anew; with `--exact`, a data set that refers to an object
whose changes no summary has is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import ref

import psutil
import torch
from torch import Tensor

from hotloop.core.random.rng import generator_states
from hotloop.data.batch_tree import map_tensors, tree_tensors
from hotloop.data.dataset_changes import dataset_summary, names_in_sample_code, reachable_values, unchecked_part
from hotloop.errors import describe_error
from hotloop.exchanges.dataset_watch import DatasetWatch
from hotloop.scripts.child import raise_signal_error

_MAX_MEMORY_SHARE = 0.25
"""Largest share of the free memory for the table."""

_MAX_SAMPLES = 2**24

_COMPARED_BATCHES = 16
"""First batches after which the data set is compared, and batches between two later comparisons; before each batch the data
set is compared as well, and a change clears the table."""

_REPEATED_SAMPLES = 256
"""Samples that were read twice with the same bits, after which one read of the others is enough."""

_MAX_CHANGES = 3
"""Changes of the data set in a row, without a batch from memory between them, after which recording is without benefit."""

SIDE_EFFECTS = frozenset(
    (
        *("print", "write", "writelines", "input", "system", "Popen", "info", "warning", "warn"),
        *("time", "time_ns", "perf_counter", "monotonic", "sleep", "now", "today"),
        *("urandom", "uuid4", "environ", "getenv", "getpid"),
    )
)
"""Names of functions in a data set's code that may do more than return a sample."""


class TableRefusal(Exception):
    """The samples can't be taken from memory for `reason`; `batch` is the script's own batch."""

    def __init__(self, reason: str, batch: Any) -> None:
        super().__init__(reason)
        self.reason, self.batch = reason, batch


class StaleSample(Exception):
    """A sample in memory differs from the same sample read anew."""


class SampleTable:
    """Rows of all samples read so far, as tensors like a collated batch.

    Args:
        exact: whether each sample is read twice before its use.
    """

    def __init__(self, *, exact: bool) -> None:
        self._is_checked, self.exact, self._changes, self._checked = False, exact, 0, -1
        self.clear()

    def clear(self) -> None:
        """Forgets all samples."""
        self._batches = self._repeated = 0
        self._columns: Any = None
        self._reads = bytearray()
        self._summary: tuple[Any, ...] = ()
        self._tensors: list[ref[Tensor]] = []

    def note_change(self) -> None:
        """Forgets all samples, since the data set has changed."""
        self._changes += 1
        self.clear()

    def is_complete(self, rows: Sequence[int]) -> bool:
        """Whether each of these samples was read often enough."""
        reads, least = self._reads, 2 if self.exact or self._repeated < _REPEATED_SAMPLES else 1
        return bool(reads) and all(type(row) is int and 0 <= row < len(reads) and reads[row] >= least for row in rows)

    def has_changed(self, dataset: Any) -> bool:
        """Whether the data set differs from its state at the recorded reads."""
        return self._differs(dataset_summary(dataset))

    def next_of(self, rows: Sequence[int]) -> list[int]:
        """Returns the row of a batch whose sample is read anew: another place in each batch."""
        self._checked += 1
        return [rows[self._checked % len(rows)]]

    def _differs(self, summary: tuple[Any, ...]) -> bool:
        is_replaced = any(tensor() is None for tensor in self._tensors)  # another tensor may have the same id
        return is_replaced or summary != self._summary

    def cut(self, rows: Sequence[int]) -> Any:
        """Returns a new batch of these samples."""
        self._changes = 0
        index = torch.tensor(rows)
        return map_tensors(lambda column: column.index_select(0, index), self._columns)

    def record(self, dataset: Any, rows: Sequence[int], original: Callable[[], Any]) -> Any:
        """Returns the script's own batch and records its samples.

        Raises:
            TableRefusal: the samples can't be taken from memory.
        """
        before, states = (), dict[str, Any]()
        try:
            before, states = dataset_summary(dataset), generator_states()
            why = self._begin(dataset, before)
        except Exception as error:
            raise_signal_error(error)
            why = f"its objects can't be followed: {describe_error(error)}"
        batch = original()
        try:
            why = why or self._end(dataset, rows, batch, before, states)
        except Exception as error:
            raise_signal_error(error)
            why = f"its samples can't be stored: {describe_error(error)}"
        if why:
            self.clear()
            raise TableRefusal(why, batch)
        return batch

    def _begin(self, dataset: Any, summary: tuple[Any, ...]) -> str:
        """Prepares a record; returns why the data set is unfit, else ""."""
        if not self._is_checked:
            self._is_checked = True
            if why := _why_unfit(dataset) or (DatasetWatch(dataset).unfit if self.exact else ""):
                return why
        if self._reads and self._differs(summary):
            self.note_change()
        return "the script changes the data set at each pass" if self._changes >= _MAX_CHANGES else ""

    def _end(self, dataset: Any, rows: Sequence[int], batch: Any, before: tuple, states: dict[str, Any]) -> str:
        """Stores a batch; returns why its samples are unfit, else ""."""
        if generator_states() != states:
            return "its samples draw random numbers"
        self._batches += 1
        is_compared = self._batches <= _COMPARED_BATCHES or self._batches % _COMPARED_BATCHES == 0
        if is_compared and dataset_summary(dataset) != before:
            return "reading a sample changes the data set"
        if not self._reads:
            self._summary = before
            self._tensors = [ref(value) for value in reachable_values(dataset) if isinstance(value, Tensor)]
        return self._store(len(dataset), rows, batch)

    def _store(self, count: int, rows: Sequence[int], batch: Any) -> str:
        """Stores the rows of a batch; returns why they can't be used, else ""."""
        if any(type(row) is not int for row in rows):
            return "the sampler yields no plain row numbers"
        if why := _not_rows(batch, len(rows)):
            return why
        if self._columns is None and (why := self._allocate(count, batch)):
            return why
        if not all(0 <= row < len(self._reads) for row in rows):
            return "the sampler yields no plain row numbers"
        columns, values = list(tree_tensors(self._columns)), list(tree_tensors(batch))
        form = [(value.dtype, value.shape[1:]) for value in values]
        if [(column.dtype, column.shape[1:]) for column in columns] != form:
            return "its samples have several shapes or types"
        places: dict[bool, list[int]] = {True: [], False: []}
        for row, place in {row: place for place, row in enumerate(rows)}.items():  # a batch may have a sample twice
            places[self._reads[row] > 0].append(place)
            self._reads[row] = min(2, self._reads[row] + 1)
        index = torch.tensor(rows)
        again, new = (torch.tensor(places[is_known], dtype=torch.int64) for is_known in (True, False))
        for column, value in zip(columns, values, strict=True):
            if len(again) and not _has_same_bits(column.index_select(0, index[again]), _rows(value, again)):
                return "a sample differs when it is read again"
            if len(new):
                column.index_copy_(0, index[new], _rows(value, new))
        self._repeated += len(places[True])
        return ""

    def _allocate(self, count: int, batch: Any) -> str:
        needed = sum(value.nbytes / len(value) for value in tree_tensors(batch)) * count
        if needed > psutil.virtual_memory().available * _MAX_MEMORY_SHARE:
            return f"its samples take {needed / 1e6:,.0f} MB, more than a quarter of the free memory"
        self._columns = map_tensors(lambda value: value.new_empty((count, *value.shape[1:])), batch)
        self._reads = bytearray(count)
        return ""


def describe_dataset(dataset: Any) -> str:
    """Returns kind and size of a data set."""
    try:
        return f"{type(dataset).__name__}, {len(dataset):,} samples"
    except Exception:  # the script's own `__len__` may raise anything; the name only describes
        return type(dataset).__name__


def _why_unfit(dataset: Any) -> str:
    try:
        count = len(dataset)
    except (TypeError, NotImplementedError):
        return "it has no length"
    if not 0 < count <= _MAX_SAMPLES:
        return f"it has {count:,} samples"
    if found := sorted(SIDE_EFFECTS.intersection(names_in_sample_code(dataset))):
        return f"its code uses {found[0]}, so it may do more than return a sample"
    if part := unchecked_part(dataset):
        return f"it refers to {part}, whose changes can't be noticed at each batch"
    return ""


def _not_rows(batch: Any, count: int) -> str:
    """Returns why a batch isn't made of plain tensors with a row for each sample, else ""."""
    leaves = list(_leaves(batch))
    if not leaves:
        return "its batches have no tensor"
    for leaf in leaves:
        if type(leaf) is not Tensor or leaf.layout != torch.strided or leaf.device.type != "cpu" or leaf.requires_grad:
            return "its batches have values that are no plain tensors on the CPU"
        if leaf.ndim == 0 or len(leaf) != count:
            return "its batches have no row for each sample"
    return ""


def _leaves(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        for item in tree.values():
            yield from _leaves(item)
    elif type(tree) in (tuple, list) or hasattr(tree, "_fields"):
        for item in tree:
            yield from _leaves(item)
    else:
        yield tree


def _rows(value: Tensor, places: Tensor) -> Tensor:
    return value if len(places) == len(value) else value.index_select(0, places)


def _has_same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))
