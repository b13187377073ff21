"""A Task's data by role: training, validation and test."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from hotloop.data.batch_tree import named_columns
from hotloop.data.bundle import Bundle
from hotloop.data.order import Order, split_positions
from hotloop.data.sources import DEFAULT_BATCH_SIZE, DataInput, Source, Stream, Table, as_source, evaluation_source
from hotloop.errors import DataError

_CHUNK_BYTES = 1 << 20
"""Size of a sum's chunk: torch copies a chunk to float64."""

_NONFINITE_FIX = (
    "remove those samples; or put a number in place of what is missing (nan_to_num) and a mask next to it, as "
    "data=(x, y, mask), for a step(model, batch) that leaves it out of the loss"
)


def check_finite(columns: Any, name: str, *, prepared: bool = False) -> None:
    """Raises DataError with the first sample of `columns` that contains NaN or infinity."""
    for label, column in named_columns(columns, name):
        if not column.is_floating_point() or column.numel() == 0:
            continue
        # A float64 sum of finite float32 terms is finite, and needs no mask of the data's size.
        if all(torch.isfinite(part.sum(dtype=torch.float64)) for part in column.split(_rows_per_chunk(column))):
            continue
        bad = ~torch.isfinite(column.flatten(1) if column.ndim > 1 else column[:, None]).all(dim=1)
        if bad.any():
            first = int(bad.nonzero()[0])
            raise DataError(
                f"{label} has NaN or infinity{' after prepare' if prepared else ''} in {int(bad.sum())} of {len(bad)}"
                f" samples, first in sample {first}",
                expected="finite numbers",
                fix="check what prepare makes of them" if prepared else _NONFINITE_FIX,
            )


def _rows_per_chunk(column: Tensor) -> int:
    return max(1, _CHUNK_BYTES * len(column) // column.numel())


def check_labels(target: Tensor, classes: int, name: str, *, ignore_index: int | None = None) -> None:
    """Raises DataError with the first label outside 0..classes-1 other than `ignore_index`."""
    bad = (target < 0) | (target >= classes)
    if ignore_index is not None:
        bad &= target != ignore_index
    if bad.any():
        label, sample = int(target[bad][0]), int(bad.nonzero()[0][0])
        raise DataError(
            f"{name} has label {label} in sample {sample}, but the model has {classes} outputs",
            expected=f"labels from 0 to {classes - 1}",
            fix="check the labels, or the width of the model's last layer",
        )


@dataclass(frozen=True)
class DataSplits:
    """A Task's data by role.

    Attributes:
        train: training data.
        validation: data for early stopping and the best checkpoint; None without.
        order: the Task's order of the training samples; None for a stream, which has its own order.
        batch_size: samples in a step.
        prepare: deterministic preprocessing of a batch's inputs.
        classes: names of the classes, if known.
        note: a remark on the data for the user.
        collate: turns a list of samples into a batch, if the Task sets it.
        raw_test: the test data before `prepare`.
        read_results: by role, the table that was read into memory, or the reason against.
        reading_s: by role, the seconds of reading, and the `time.perf_counter()` of its end.
        moved: by role and device, tables on that device, while in use.
    """

    train: Source
    validation: Source | None
    order: Order | None
    batch_size: int
    seed: int
    prepare: Callable[[Any], Any] | None
    classes: tuple[str, ...]
    note: str
    collate: Callable | None = None
    raw_test: Source | None = None
    read_results: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    reading_s: dict[str, tuple[float, float]] = field(default_factory=dict, compare=False, repr=False)
    moved: WeakValueDictionary[tuple[str, str], Table] = field(
        default_factory=WeakValueDictionary, compare=False, repr=False
    )

    @cached_property
    def test(self) -> Source | None:
        """The test data, prepared at the first use."""
        return None if self.raw_test is None else prepare_source(self.raw_test, "test", self.prepare, self.seed)

    @property
    def has_test(self) -> bool:
        return self.raw_test is not None

    @property
    def batches(self) -> int | None:
        """Batches in an epoch of the training data; None for a stream of unknown length."""
        return self.train.batches if isinstance(self.train, Stream) else self.order.batches if self.order else None

    @property
    def validation_samples(self) -> int | None:
        """Samples of the validation data; None without, or for a stream."""
        return None if self.validation is None or isinstance(self.validation, Stream) else len(self.validation)

    @property
    def digest(self) -> str:
        """Hash of the order of the data and the number of validation samples; empty for a stream."""
        if self.order is None:
            return ""
        return hashlib.sha256(repr((self.order, self.validation_samples)).encode()).hexdigest()

    @property
    def is_exact(self) -> bool:
        """Whether the order follows from the seed alone, unlike that of a user's sampler or stream."""
        return self.order is not None


def split_data(
    data: Any,
    validation: Any,
    test: Any,
    *,
    batch_size: int | None,
    seed: int,
    prepare: Callable[[Any], Any] | None,
    collate: Callable | None,
    shuffle: bool | None = None,
    drop_last: bool | None = None,
) -> DataSplits:
    """Brings a Task's data into its form, checks it, splits off validation, and prepares what fits in memory.

    Raises:
        DataError: the data can't be used; names the part and the reason.
    """
    classes: tuple[str, ...] = ()
    note = ""
    if isinstance(data, Bundle):
        prepare, classes, note = prepare or data.prepare, data.classes, data.note
        validation = data.validation if validation is None else validation
        test = data.test if test is None else test
        data = data.train
    given = as_source(data, "data", collate=collate, batch_size=batch_size, drop_last=drop_last)
    train, held_out = _split_validation(given.source, validation, seed, collate, batch_size)
    raw_test = None if test is None else evaluation_source(test, "test", collate=collate, batch_size=batch_size)
    if isinstance(raw_test, Table):
        check_finite(raw_test.columns, "test")  # before hours of training
    size = _batch_size(batch_size, given, train)
    order = None
    if not isinstance(train, Stream):
        shuffle = shuffle if shuffle is not None else given.shuffle is not False
        order = Order(len(train), size, seed, shuffle, given.drop_last if drop_last is None else drop_last)
    return DataSplits(
        train=prepare_source(train, "data", prepare, seed),
        validation=prepare_source(held_out, "validation", prepare, seed) if held_out is not None else None,
        order=order,
        batch_size=size,
        seed=seed,
        prepare=prepare,
        classes=classes,
        note=note,
        collate=collate,
        raw_test=raw_test,
    )


def _split_validation(
    source: Source, validation: Any, seed: int, collate: Callable | None, batch_size: int | None
) -> tuple[Source, Source | None]:
    if validation is None:
        return source, None
    if isinstance(validation, bool):
        raise DataError(f"validation={validation}", expected="data, a share such as 0.1, or a number of samples")
    if not isinstance(validation, int | float):
        return source, evaluation_source(validation, "validation", collate=collate, batch_size=batch_size)
    if isinstance(source, Stream):
        raise DataError(
            f"validation={validation} asks for a share of data that has an order of its own",
            expected="validation data",
            fix="give validation a data set of its own",
        )
    training, held_out = split_positions(len(source), validation, seed)
    return source.subset(training), source.subset(held_out)


def _batch_size(requested: int | None, given: DataInput, train: Source) -> int:
    if requested is not None and given.batch_size is not None and requested != given.batch_size:
        raise DataError(
            f"batch_size={requested} but the DataLoader has batch_size={given.batch_size}",
            expected="one batch size",
            fix="leave batch_size out of the Task, or make both equal",
        )
    default = DEFAULT_BATCH_SIZE if isinstance(train, Stream) else min(DEFAULT_BATCH_SIZE, len(train))
    return requested or given.batch_size or default


def prepare_source(source: Source, name: str, prepare: Callable[[Any], Any] | None, seed: int) -> Source:
    """Returns the source checked, and prepared if the result fits in memory."""
    if not isinstance(source, Table):
        return source
    check_finite(source.columns, name)
    prepared = source.apply(prepare, seed)
    if prepare is not None and prepared.is_prepared:
        check_finite(prepared.columns, name, prepared=True)
    return prepared
