"""The data loader exchange: batches are cut from memory instead of collated sample by sample.

The exchange is made where a loader's iterator fetches the samples of a batch. The sampler, its random numbers and the
iterator's base seed stay the script's own, and each batch is a new tensor.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset
from torch.utils.data._utils.collate import default_collate
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from hotloop.core.patches import Patches
from hotloop.core.random.rng import generator_restorer
from hotloop.data.batch_difference import batch_difference
from hotloop.data.batch_tree import tree_tensors
from hotloop.errors import describe_error
from hotloop.exchanges.part import CallComparison, Part
from hotloop.exchanges.sample_table import SampleTable, StaleSample, TableRefusal, describe_dataset
from hotloop.profiler.base.transparency import hide_from_warnings
from hotloop.scripts.child import raise_signal_error, strip_own_frames

MakePart = Callable[[str, str, Sequence[str]], Part]

_FROM_MEMORY = ["cut from memory"]

_MAX_PARTS = 32

_RECENT_S = 1.0
"""Seconds after the last fetch of a data set for which the script is likely to read on."""

_load = _MapDatasetFetcher.fetch
"""Torch's own function, which reads in this process."""


class _LoadedDataset:
    """One data set that loaders read, with its part, and its table unless it is a `TensorDataset`."""

    def __init__(self, dataset: Any, part: Part, ended: Callable[[Any], Any]) -> None:
        self.dataset, self.part = ref(dataset, ended), part
        self.table = None if type(dataset) is TensorDataset else SampleTable(exact=part.exact)
        self.fetched_s = 0.0


class LoaderExchange:
    """Replaces the fetch of a batch in this process; worker processes load as before.

    Args:
        make_part: creates a part of kind, name and exchanges.
        is_mine: whether calls of this process and thread are exchanged.
        is_enabled: whether used exchanges are on.
    """

    def __init__(self, make_part: MakePart, is_mine: Callable[[], bool], is_enabled: Callable[[], bool]) -> None:
        self._make_part, self._is_mine, self._is_enabled = make_part, is_mine, is_enabled
        self._known: dict[int, _LoadedDataset] = {}
        self._made = 0
        self._patches = Patches()

    def install(self) -> None:
        self._patches.patch(_MapDatasetFetcher, "fetch", self._exchanging())

    @property
    def is_over(self) -> bool:
        """Whether no data set is cut from memory or tried."""
        return all(known.part.stage == "off" for known in list(self._known.values()))

    @property
    def is_recording(self) -> bool:
        """Whether the script now reads a data set without a decision."""
        recent_s = time.perf_counter() - _RECENT_S
        known = list(self._known.values())
        return any(one.part.stage in ("proof", "race") and one.fetched_s > recent_s for one in known)

    def remove(self) -> None:
        self._patches.undo()

    abandon = remove

    @hide_from_warnings
    def _exchanging(self) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def fetch(fetcher: Any, index: Any) -> Any:
                try:
                    if not self._is_mine() or not _is_plain(fetcher, index) or self._is_refused(fetcher.dataset):
                        return original(fetcher, index)
                    return self._fetch(functools.partial(original, fetcher, index), fetcher.dataset, index)
                except BaseException as error:
                    error.__traceback__ = strip_own_frames(error)
                    raise

            return fetch

        return make

    def _is_refused(self, dataset: Any) -> bool:
        while type(dataset) is Subset:
            dataset = dataset.dataset
        known = self._known.get(id(dataset))
        return known is not None and known.part.stage == "off" and known.dataset() is dataset

    def _fetch(self, original: Callable[[], Any], dataset: Any, index: list[int]) -> Any:
        try:
            known, rows = self._source(dataset, index)
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
            enabled=self._is_enabled(),
        )

    def _source(self, dataset: Any, rows: list[int]) -> tuple[_LoadedDataset | None, list[int]]:
        """Returns the data set below torch's subsets, and the rows in it."""
        while type(dataset) is Subset:
            rows, dataset = [dataset.indices[row] for row in rows], dataset.dataset
        if not isinstance(dataset, Dataset):
            return None, rows  # such as a list, which has no weak references
        known = self._known.get(id(dataset))
        if known is None or known.dataset() is not dataset:
            if self._made >= _MAX_PARTS:
                return None, rows
            self._made += 1
            part = self._make_part("data loader", describe_dataset(dataset), _FROM_MEMORY)
            key = id(dataset)
            known = self._known[key] = _LoadedDataset(dataset, part, lambda _: self._known.pop(key, None))
        return known, rows


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
    if batch_difference(_load(_MapDatasetFetcher(dataset, True, default_collate, False), one), table.cut(one)):
        restore()
        raise StaleSample
    return table.cut(rows)


_NO_EXCHANGE, _RECORDED, _FROM_TENSORS = "no exchange", "recorded", "cut"


def _choose_form(known: _LoadedDataset, rows: list[int]) -> str:
    """Returns what to do with a fetch: load as the script does, record the samples as well, or exchange."""
    part, table, dataset = known.part, known.table, known.dataset()
    assert dataset is not None
    if table is None:
        unfit = _why_unfit(dataset.tensors, rows)
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
        type(fetcher) is _MapDatasetFetcher
        and fetcher.auto_collation
        and fetcher.collate_fn is default_collate
        and type(index) is list
        and bool(index)
    )


def _why_unfit(tensors: Sequence[Any], rows: Sequence[Any]) -> str:
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
