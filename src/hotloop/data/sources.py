"""Brings a user's data into one of three forms.

`Table`: arrays in memory, cut into batches by indexing. `Samples`: a map-style data set, loaded sample by sample in
the Task's order. `Stream`: an iterable, or a loader with its own sampler.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from hotloop.core.random.rng import seed_for
from hotloop.data.batch_functions import BatchFunction
from hotloop.data.batch_tree import batch_inputs, map_tensors, named_columns, tree_tensors
from hotloop.errors import DataError, type_name

DEFAULT_BATCH_SIZE = 32


@dataclass(frozen=True)
class Batching:
    """How a DataLoader for evaluation forms batches.

    Attributes:
        batch_size: samples in a batch; None without a DataLoader.
        drop_last: whether an incomplete last batch is left out.
    """

    batch_size: int | None = None
    drop_last: bool = False


_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Table:
    """Arrays in memory: a tree of tensors whose first dimension counts the samples.

    Attributes:
        is_prepared: whether `prepare` was applied already.
        is_read: whether the arrays were read from a data set, which they replace.
        device: device of all columns.
        batching: batches of an evaluation.
    """

    columns: Any
    is_prepared: bool = False
    is_read: bool = False
    device: torch.device = _CPU
    batching: Batching = Batching()

    def __len__(self) -> int:
        return next(tree_tensors(self.columns)).shape[0]

    def take(self, index: Tensor) -> Any:
        """Returns the samples of an int64 (batch,) index as a batch on the table's device."""
        if self.device.type != "cpu":
            index = index.to(self.device)
        if type(self.columns) is tuple:  # the common case of each step
            return tuple([column.index_select(0, index) for column in self.columns])
        return map_tensors(lambda column: column.index_select(0, index), self.columns)

    def subset(self, index: Tensor) -> Table:
        return replace(self, columns=self.take(index))

    def to(self, device: torch.device) -> Table:
        return replace(self, columns=map_tensors(lambda column: column.to(device), self.columns), device=device)

    def nbytes(self) -> int:
        return sum(column.nbytes for column in tree_tensors(self.columns))

    def apply(self, prepare: Callable[[Any], Any] | None, seed: int = 0, *, chunk: int = 4096) -> Table:
        """Returns the table with `prepare` applied to all inputs, if the result fits in half of the free memory."""
        if prepare is None or self.is_prepared:
            return replace(self, is_prepared=True)
        prepared = BatchFunction("prepare", prepare)
        first = prepared(self.take(torch.arange(1)), lambda: seed_for(seed, "prepare", 0, 0))
        _check_rows(batch_inputs(first))
        needed = sum(tensor.nbytes for tensor in tree_tensors(first)) * len(self)
        if needed > psutil.virtual_memory().available // 2:
            return self
        index = torch.arange(len(self))
        pieces = [
            prepared(self.take(piece), lambda number=number: seed_for(seed, "prepare", 0, number))  # type: ignore[misc]
            for number, piece in enumerate(index.split(chunk))
        ]
        return replace(self, columns=_concatenate(pieces), is_prepared=True)


@dataclass(frozen=True)
class Samples:
    """A map-style data set (`__getitem__` and `__len__`), and how its samples become batches."""

    dataset: Any
    collate: Callable[[list], Any] = default_collate
    workers: int = 0
    loader_options: dict[str, Any] = field(default_factory=dict)
    batching: Batching = Batching()

    def __len__(self) -> int:
        return len(self.dataset)

    def subset(self, index: Tensor) -> Samples:
        return replace(self, dataset=Subset(self.dataset, index.tolist()))


@dataclass(frozen=True)
class Stream:
    """A loader with its own order; a resumed run skips earlier batches."""

    loader: Any

    @property
    def batches(self) -> int | None:
        """Batches in an epoch; None if only iteration shows the number."""
        try:
            return len(self.loader)
        except TypeError:
            return None


@dataclass(frozen=True)
class TableRows:
    """Columns of one length as a map-style data set, for a `collate` of samples."""

    columns: Any

    def __len__(self) -> int:
        return len(next(iter(self.columns.values() if isinstance(self.columns, Mapping) else self.columns)))

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.columns, Mapping):
            return {key: column[index] for key, column in self.columns.items()}
        return tuple(column[index] for column in self.columns)


Source = Table | Samples | Stream


@dataclass(frozen=True)
class DataInput:
    """A source, with the user's DataLoader's settings of batches; None without such settings."""

    source: Source
    batch_size: int | None = None
    shuffle: bool | None = None
    drop_last: bool = False


def evaluation_source(data: Any, name: str, *, collate: Callable | None, batch_size: int | None = None) -> Source:
    """Brings a user's data for evaluation into one form; see `as_source`.

    A DataLoader's `batch_size`, `drop_last` and `collate_fn` count for its data; its `shuffle` doesn't, unless the
    DataLoader has its own sampler.
    """
    has_own = isinstance(data, DataLoader) and data.collate_fn is not default_collate
    given = as_source(data, name, collate=None if has_own else collate, batch_size=batch_size)
    if isinstance(given.source, Stream) or given.batch_size is None:
        return given.source
    samples = len(given.source)
    batching = Batching(min(given.batch_size, samples), given.drop_last and given.batch_size <= samples)
    return replace(given.source, batching=batching)


def as_source(
    data: Any,
    name: str,
    *,
    collate: Callable | None = None,
    batch_size: int | None = None,
    drop_last: bool | None = None,
) -> DataInput:
    """Brings a user's data into one form.

    Args:
        data: arrays or tensors `(x, y)`, a dict of them, a single array, a list of samples, a map-style or iterable
            data set, a DataLoader, or another iterable of batches that supports several iterations.
        name: the data's name in errors: `data`, `validation` or `test`.
        collate: turns a list of samples into a batch; None for a loader's own, else torch's default.
        batch_size, drop_last: for iterable data sets, whose batches torch forms.

    Raises:
        DataError: other data, empty data, arrays of unequal lengths, or a `drop_last` that differs from the data's.
    """
    if isinstance(data, IterableDataset):
        size = batch_size or DEFAULT_BATCH_SIZE
        return DataInput(Stream(DataLoader(data, batch_size=size, collate_fn=collate, drop_last=bool(drop_last))))
    given = _recognise_source(data, name, collate)
    if isinstance(given.source, Stream) and drop_last not in (None, getattr(data, "drop_last", None)):
        raise DataError(
            f"drop_last={drop_last}, and {name} cuts its batches itself",
            expected="drop_last for arrays or a data set, whose batches hotloop cuts",
            fix=f"leave drop_last out of the Task, and set it where {name} is made",
        )
    if not isinstance(given.source, Stream) and len(given.source) == 0:
        raise DataError(f"{name} is empty", expected="one sample or more", fix="check how it was loaded")
    return given


def _recognise_source(data: Any, name: str, collate: Callable | None) -> DataInput:
    if isinstance(data, DataLoader):
        return _from_loader(data, name, collate)
    if isinstance(data, TensorDataset) and collate is None:
        return DataInput(_make_table(data.tensors if len(data.tensors) > 1 else data.tensors[0], name))
    if isinstance(data, list) and data and (collate or isinstance(data[0], tuple | Mapping)):
        return DataInput(Samples(data, collate or default_collate))  # a list of samples instead of columns
    if isinstance(data, tuple | Mapping) and data and collate:
        columns = data.items() if isinstance(data, Mapping) else enumerate(data)
        check_lengths([(f"{name}[{key!r}]", column) for key, column in columns])
        return DataInput(Samples(TableRows(data), collate))
    if isinstance(data, tuple | list) or _is_array(data):
        return DataInput(_make_table(data, name))
    if isinstance(data, Mapping):
        parts = [key for key, value in data.items() if not _is_array(value) and not isinstance(value, list)]
        if parts:
            raise DataError(
                f"{name} is a mapping whose {parts[0]!r} is {type_name(data[parts[0]])}",
                expected="arrays",
                fix=f"pass one of them if it is a collection of data sets, such as {name}=...[{parts[0]!r}]",
            )
        return DataInput(_make_table(dict(data), name))
    text = isinstance(data, str | bytes | Path)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not text:
        return DataInput(Samples(_as_tensors(data), collate or default_collate))
    if isinstance(data, Iterable) and not isinstance(data, Iterator) and not text:
        return DataInput(Stream(data))
    raise DataError(
        f"{name} is {type_name(data)}" + (f", {data!r}" if text else ""),
        expected="(x, y) arrays or tensors, a data set, or a DataLoader",
        fix="load the file, say with numpy.load, and pass the arrays" if text else "see data in hotloop.Task's help",
    )


def _from_loader(loader: DataLoader, name: str, collate: Callable | None) -> DataInput:
    sampler = loader.sampler
    plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    )
    plain = plain and type(loader.batch_sampler) is BatchSampler and type(loader).__iter__ is DataLoader.__iter__
    if isinstance(loader.dataset, IterableDataset) or not plain:
        return DataInput(Stream(loader), loader.batch_size)
    shuffle = type(sampler) is RandomSampler
    settings: dict[str, Any] = dict(batch_size=loader.batch_size, shuffle=shuffle, drop_last=loader.drop_last)
    collate = collate or loader.collate_fn
    if isinstance(loader.dataset, TensorDataset) and collate is default_collate and not loader.num_workers:
        return DataInput(_recognise_source(loader.dataset, name, None).source, **settings)
    options = {
        key: getattr(loader, key)
        for key in ("pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor")
        if getattr(loader, key, None)
    }
    return DataInput(Samples(loader.dataset, collate, loader.num_workers, options), **settings)


_DTYPE_WORDS = {"U": "text", "S": "bytes", "O": "Python objects", "M": "dates", "m": "time spans"}
"""Contents of arrays without numbers, by NumPy's kind of dtype."""


def _check_rows(inputs: Any) -> None:
    for tensor in tree_tensors(inputs):
        if tensor.ndim == 0 or len(tensor) != 1:
            raise DataError(
                f"prepare turned a batch of 1 sample into a tensor of shape {tuple(tensor.shape)}",
                expected="a batch of 1 sample, (1, ...)",
                fix="keep the first dimension, which counts the samples",
            )


def _as_tensors(data: Any) -> Any:
    """Makes a data set of Hugging Face without a format return tensors: its lists don't make batches."""
    unformatted = hasattr(data, "with_format") and getattr(data, "format", {}).get("type", "") is None
    return data.with_format("torch") if unformatted else data


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray) or (hasattr(value, "__array__") and not hasattr(value, "features"))


def _make_table(data: Any, name: str) -> Table:
    if isinstance(data, dict):
        columns: Any = {key: as_tensor(value, f"{name}[{key!r}]") for key, value in data.items()}
    elif isinstance(data, tuple | list):
        columns = tuple(as_tensor(value, f"{name}[{place}]") for place, value in enumerate(data))
        if len(columns) > 1:
            columns = (*columns[:-1], _as_target(columns[-1]))
        elif columns:
            columns = columns[0]
    else:
        columns = as_tensor(data, name)
    named = named_columns(columns, name)
    if not named:
        raise DataError(f"{name} is empty", expected="(x, y) arrays or tensors", fix="check how it was loaded")
    for label, column in named:
        if column.ndim == 0:
            raise DataError(f"{label} is a single number", expected="an array with one row per sample")
    check_lengths(named)
    return Table(columns)


def check_lengths(columns: Sequence[tuple[str, Any]]) -> None:
    """Raises DataError if `(label, column)` pairs differ in the number of samples."""
    if len({len(column) for _, column in columns}) > 1:
        raise DataError(
            ", ".join(f"{label} has {len(column)} samples" for label, column in columns),
            expected="the same number",
            fix="check that inputs and targets belong together",
        )


def as_tensor(value: Any, name: str) -> Tensor:
    """Returns a CPU tensor; NumPy's float64 becomes torch's default dtype, a torch tensor keeps its dtype."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    try:
        array = np.asarray(value)
    except ValueError:
        raise DataError(
            f"{name} is {type_name(value)} whose rows are of different lengths",
            expected="an array",
            fix="pad the rows to one length, or give a data set and a collate function",
        ) from None
    if array.dtype.kind not in "biufc":
        raise DataError(
            f"{name} holds {_DTYPE_WORDS.get(array.dtype.kind, f'values of dtype {array.dtype}')}",
            expected="numbers",
            fix="turn them into numbers, such as 0, 1, 2 for the names of classes",
        )
    if array.dtype.byteorder not in "=|" or any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # the tensor is only read
        tensor = torch.from_numpy(array) if array.ndim else torch.tensor(array)
    return tensor.to(torch.get_default_dtype()) if tensor.dtype == torch.float64 else tensor


def _as_target(target: Tensor) -> Tensor:
    """Returns integer targets as int64, which torch's losses need."""
    is_integer = not target.is_floating_point() and not target.is_complex() and target.dtype != torch.bool
    return target.long() if is_integer else target


def _concatenate(pieces: list[Any]) -> Any:
    columns = [list(tree_tensors(piece)) for piece in pieces]
    whole = iter([torch.cat(column) for column in zip(*columns, strict=True)])
    return map_tensors(lambda _: next(whole), pieces[0])
