"""The data loader exchange: batches are cut from memory instead of collated sample by sample.

The exchange is made where a loader's iterator fetches the samples of a batch. The sampler, its random numbers and the
iterator's base seed stay the script's own, and each batch is a new tensor.

The samples of a data set that is no `TensorDataset` are recorded from the batches that the script itself loads. Once many samples
were read twice with the same bits, a sample is used from memory after its first read; with `--exact`, after its second. Reading it
may neither draw random numbers nor change the data set. Later changes of the data set are found in its summary, and by one sample
of each batch that is read anew; with `--exact`, a data set that refers to an object whose changes no summary has is refused.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import psutil
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

from hotloop.core.random.rng import generator_restorer, generator_states
from hotloop.core.torch_private import MapDatasetFetcher
from hotloop.data.batch_difference import batch_difference, batch_leaves, raw_bytes
from hotloop.data.batch_tree import map_tensors, tree_tensors
from hotloop.data.dataset_changes import dataset_summary, names_in_sample_code, reachable_values, unchecked_part
from hotloop.errors import describe_error
from hotloop.exchanges.dataset_watch import DatasetWatch
from hotloop.exchanges.part import CallComparison, DatasetExchange, Part
from hotloop.profiler.base.transparency import hide_from_warnings
from hotloop.scripts.child import raise_signal_error, strip_own_frames

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

_RECENT_S = 1.0
"""Seconds after the last fetch of a data set for which the script is likely to read on."""

_load = MapDatasetFetcher.fetch
"""Torch's own function, which reads in this process."""


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
            if why := _why_unfit_dataset(dataset) or (DatasetWatch(dataset).unfit if self.exact else ""):
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
            if len(again) and not raw_bytes(column.index_select(0, index[again])).equal(raw_bytes(_rows(value, again))):
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


def _why_unfit_dataset(dataset: Any) -> str:
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
    leaves = [leaf for _, leaf in batch_leaves(batch)]
    if not leaves:
        return "its batches have no tensor"
    for leaf in leaves:
        if type(leaf) is not Tensor or leaf.layout != torch.strided or leaf.device.type != "cpu" or leaf.requires_grad:
            return "its batches have values that are no plain tensors on the CPU"
        if leaf.ndim == 0 or len(leaf) != count:
            return "its batches have no row for each sample"
    return ""


def _rows(value: Tensor, places: Tensor) -> Tensor:
    return value if len(places) == len(value) else value.index_select(0, places)


class _LoadedDataset:
    """One data set that loaders read, with its part, and its table unless it is a `TensorDataset`."""

    def __init__(self, dataset: Any, part: Part, ended: Callable[[Any], Any]) -> None:
        self.dataset, self.part = ref(dataset, ended), part
        self.table = None if type(dataset) is TensorDataset else SampleTable(exact=part.exact)
        self.fetched_s = 0.0


class LoaderExchange(DatasetExchange[_LoadedDataset]):
    """Replaces the fetch of a batch in this process; worker processes load as before."""

    def install(self) -> None:
        self._patches.patch(MapDatasetFetcher, "fetch", self._exchanging)

    @property
    def is_over(self) -> bool:
        """Whether no data set is cut from memory or tried."""
        return all(known.part.stage == "off" for known in list(self._sites.values()))

    @property
    def is_recording(self) -> bool:
        """Whether the script now reads a data set without a decision."""
        recent_s = time.perf_counter() - _RECENT_S
        known = list(self._sites.values())
        return any(one.part.stage in ("proof", "race") and one.fetched_s > recent_s for one in known)

    @hide_from_warnings
    def _exchanging(self, original: Any) -> Any:
        session = self._session

        @functools.wraps(original)
        def fetch(fetcher: Any, index: Any) -> Any:
            try:
                if not session.is_exchanging() or not _is_plain(fetcher, index) or self._is_refused(fetcher.dataset):
                    return original(fetcher, index)
                return self._fetch(functools.partial(original, fetcher, index), fetcher.dataset, index)
            except BaseException as error:
                error.__traceback__ = strip_own_frames(error)
                raise

        return fetch

    def _is_refused(self, dataset: Any) -> bool:
        while type(dataset) is Subset:
            dataset = dataset.dataset
        known = self._sites.get(id(dataset))
        return known is not None and known.part.stage == "off" and known.dataset() is dataset

    def _fetch(self, original: Callable[[], Any], dataset: Any, rows: list[int]) -> Any:
        try:
            while type(dataset) is Subset:
                rows, dataset = [dataset.indices[row] for row in rows], dataset.dataset
            known = self._site(dataset)
            form = _NO_EXCHANGE if known is None or known.part.stage == "off" else _choose_form(known, rows)
        except Exception as error:  # such as a data set without weak references
            raise_signal_error(error)
            return original()
        if known is None or form == _NO_EXCHANGE:
            return original()
        known.fetched_s = time.perf_counter()
        part, table, source = known.part, known.table, known.dataset()
        assert source is not None
        if form == _RECORDED and table is not None:
            return _record(table, source, rows, original, part)
        if table is None:
            cut = exchanged = functools.partial(_cut, source.tensors, rows)
        else:
            cut = functools.partial(table.cut, rows)
            changes = functools.partial(table.has_changed, source) if part.stage == "race" else None
            exchanged = functools.partial(_cut_and_check, table, source, rows, changes)
        return part.call(
            original,
            lambda: _cut_or_load(exchanged, original, part),
            lambda: _compare(original, cut, part),
            enabled=self._session.is_enabled,
        )

    def _make_site(self, dataset: Any, ended: Callable[[Any], Any]) -> _LoadedDataset:
        part = self._session.make_part("data loader", describe_dataset(dataset), ["cut from memory"])
        return _LoadedDataset(dataset, part, ended)


def _record(table: SampleTable, dataset: Any, rows: list[int], original: Callable[[], Any], part: Part) -> Any:
    """Loads a batch as the script does, and records its samples; all but the script's own loading is hotloop's work."""
    own_s = 0.0

    def load() -> Any:
        nonlocal own_s
        began = time.perf_counter()
        batch = original()
        own_s = time.perf_counter() - began
        return batch

    try:
        with part.own_work():
            return table.record(dataset, rows, load)
    except TableRefusal as refusal:
        (part.take_back if part.stage == "use" else part.refuse)(refusal.reason)
        return refusal.batch
    finally:
        part.own_work_s -= own_s


def _cut_and_check(table: SampleTable, dataset: Any, rows: list[int], changes: Callable[[], bool] | None) -> Any:
    """Cuts a batch, and compares one of its samples, which is read anew.

    Args:
        changes: in a race, the check for changes that each batch needs, which counts as the exchange's time.

    Raises:
        StaleSample: the sample differs.
    """
    if changes is not None:
        changes()
    one = table.next_of(rows)
    restore = (
        generator_restorer() if table.exact else lambda: None
    )  # a data set that draws numbers has been refused before
    if batch_difference(_load(MapDatasetFetcher(dataset, True, default_collate, False), one), table.cut(one)):
        restore()
        raise StaleSample
    return table.cut(rows)


_NO_EXCHANGE, _RECORDED, _FROM_TENSORS = "no exchange", "recorded", "cut"


def _choose_form(known: _LoadedDataset, rows: list[int]) -> str:
    """Returns what to do with a fetch: load as the script does, record the samples as well, or exchange."""
    part, table, dataset = known.part, known.table, known.dataset()
    assert dataset is not None
    if table is None:
        unfit = _why_unfit_tensors(dataset.tensors, rows)
        part.reason = part.reason or unfit
        return _NO_EXCHANGE if unfit else _FROM_TENSORS
    if not table.is_complete(rows):
        return _RECORDED
    if table.has_changed(dataset):
        table.note_change()
        if part.proven:
            part.notes.append(f"{part.title}: the data set changed, so its samples are read anew")
        return _RECORDED
    return _FROM_TENSORS


def _is_plain(fetcher: Any, index: Any) -> bool:
    """Whether a fetch collates samples of a map-style data set by torch's default."""
    return (
        type(fetcher) is MapDatasetFetcher
        and fetcher.auto_collation
        and fetcher.collate_fn is default_collate
        and type(index) is list
        and bool(index)
    )


def _why_unfit_tensors(tensors: Sequence[Any], rows: Sequence[Any]) -> str:
    for tensor in tensors:
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.device.type != "cpu":
            return "its tensors are no plain tensors on the CPU"
        if tensor.requires_grad or tensor.is_quantized or tensor.ndim == 0 or tensor.is_conj() or tensor.is_neg():
            return "its tensors are no plain tensors without gradients"
    count = min(map(len, tensors))
    if any(type(row) is not int or not 0 <= row < count for row in rows):
        return "the sampler yields no plain row numbers"
    return ""


def _cut(tensors: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
    """Returns new tensors, in the list that torch's default collate returns for tuples."""
    index = torch.tensor(rows)
    return [tensor.index_select(0, index) for tensor in tensors]


def _cut_or_load(cut: Callable[[], Any], original: Callable[[], Any], part: Part) -> Any:
    try:
        return cut()
    except StaleSample:
        part.take_back("a sample that is read anew differs, so the data set changed where no change is visible")
        return original()
    except Exception as error:
        raise_signal_error(error)
        part.take_back(f"it raised {describe_error(error)}")
        return original()


def _compare(original: Callable[[], Any], cut: Callable[[], Any], part: Part) -> tuple[Any, CallComparison]:
    """Returns the script's own batch, and whether the exchange has the same bits, strides and containers."""
    began = time.perf_counter()
    batch = original()
    part.own_work_s -= time.perf_counter() - began  # the script's own loading is not hotloop's work
    try:
        wrong = batch_difference(batch, cut())
        numbers = sum(value.numel() for value in tree_tensors(batch))
    except Exception as error:
        raise_signal_error(error)
        return batch, CallComparison(False, 0, f"it raised {describe_error(error)}")
    return batch, CallComparison(not wrong, numbers, wrong and f"its batch differs: {wrong}")
