"""Counts the rows of a batch: `collate` may drop samples, and another dimension than the first may count the rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


class RowCount(NamedTuple):
    """The rows of a batch.

    Attributes:
        number: number of rows; the number of requested samples if the rows can't be counted.
        doubt: why the rows can't be counted; empty if the count is certain.
    """

    number: int
    doubt: str = ""


def count_rows(batch: Any, asked: int | None = None) -> RowCount:
    """Counts the rows of a batch.

    Args:
        batch: tensors, sequences, mappings and objects in any nesting, mostly `(inputs..., target)`.
        asked: number of samples that `collate` received; None if unknown.
    """
    if (
        type(batch) in (tuple, list)
        and asked is not None
        and all(isinstance(item, Tensor) and not item.is_nested and item.shape[:1] == (asked,) for item in batch)
    ):
        return RowCount(asked)  # a fast path, because this function runs at each step
    columns = list(_columns(batch))
    if not columns:
        return RowCount(1, "it has no tensors") if asked is None else RowCount(asked)
    if common := _common_sizes(columns):
        return _agreed_count(columns, common, asked)
    return _disagreed_count(columns, batch, asked)


class _Column(NamedTuple):
    """The possible numbers of rows of one part of a batch.

    Attributes:
        firsts: possible numbers of rows; for a tensor, the size of its first dimension.
        seconds: number of rows if the first dimension is the time, (time, rows, ...).
        shape: a tensor's shape for messages; else empty.
    """

    firsts: frozenset[int]
    seconds: frozenset[int] = frozenset()
    shape: tuple[int, ...] = ()

    @property
    def either(self) -> frozenset[int]:
        return self.firsts | self.seconds


def _columns(item: Any, outermost: bool = True) -> Iterator[_Column]:
    if isinstance(item, PackedSequence):
        yield _Column(frozenset({int(item.batch_sizes[0])}))
    elif isinstance(item, Tensor):
        if item.is_nested:
            yield _Column(frozenset({item.size(0)}))
        elif item.ndim:
            yield _Column(frozenset({item.shape[0]}), frozenset(item.shape[1:2]), tuple(item.shape))
    elif isinstance(graphs := getattr(item, "num_graphs", None), int):
        yield _Column(frozenset({graphs}))
    elif isinstance(item, Mapping):
        for value in item.values():
            yield from _columns(value, outermost=False)
    elif isinstance(item, tuple | list) and item:
        yield from _sequence_columns(item, outermost)


def _sequence_columns(items: tuple | list, outermost: bool) -> Iterator[_Column]:
    """Yields the columns of a sequence of columns, or of samples such as images of several sizes."""
    inner = [column for item in items for column in _columns(item, outermost=False)]
    same = len({column.firsts for column in inner}) == 1
    mixed = any(isinstance(item, Tensor | PackedSequence) for item in items) or len(set(map(type, items))) > 1
    if outermost and (mixed or isinstance(items, tuple)):
        yield from inner
    elif not inner or not same:
        yield _Column(frozenset({len(items)}))
    else:
        yield _Column(inner[0].firsts | {len(items)})


def _common_sizes(columns: list[_Column]) -> frozenset[int]:
    return reduce(frozenset.intersection, (column.firsts for column in columns))


def _agreed_count(columns: list[_Column], common: frozenset[int], asked: int | None) -> RowCount:
    if asked in common:
        return RowCount(asked)
    wide = [column for column in columns if len(column.shape) > 1]
    is_time_first = asked is not None and bool(wide) and all(asked in column.seconds for column in wide)
    if is_time_first and len(wide) == len(columns):
        assert asked is not None
        if min(common) > asked:
            return RowCount(asked)  # (time, rows, ...), because `collate` adds no samples
        return RowCount(asked, f"{_shapes(columns)}, so either dimension may count the rows of {asked} samples")
    if len(common) > 1:
        return _unsure_count(columns, asked)
    (number,) = common
    if asked is None or number <= asked or number % asked == 0:
        return RowCount(number)
    return RowCount(asked, f"{_shapes(columns)}, of {asked} samples")


def _disagreed_count(columns: list[_Column], batch: Any, asked: int | None) -> RowCount:
    possible = reduce(frozenset.intersection, (column.either for column in columns))
    if len(possible) == 1 and (asked is None or min(possible) <= asked):
        return RowCount(min(possible))  # (time, rows, ...) beside (rows, ...)
    target = next(_columns(batch[-1], outermost=False), None) if isinstance(batch, tuple | list) else None
    if asked is not None and any(asked in column.firsts for column in ([target] if target else columns)):
        # no sample was dropped: inputs of graphs have a row per node, and targets a row per graph
        return RowCount(asked)
    return _unsure_count(columns, asked, target)


def _unsure_count(columns: list[_Column], asked: int | None, target: _Column | None = None) -> RowCount:
    number = min((target or columns[0]).firsts) if asked is None else asked
    return RowCount(number, _shapes(columns) + (f", of {asked} samples" if asked is not None else ""))


def _shapes(columns: list[_Column]) -> str:
    shapes = dict.fromkeys(str(column.shape) if column.shape else f"{max(column.firsts)} items" for column in columns)
    return f"its tensors have shapes {', '.join(shapes)}"


class SecondDimension:
    """Compares batches with an unknown number of samples whose tensors agree in their first two dimensions.

    If only the second dimension varies, it may count the samples: (time, rows, ...).
    """

    def __init__(self) -> None:
        self._first: tuple[int, ...] = ()

    def doubt(self, batch: Any) -> str:
        """Returns why the rows may be miscounted; empty without evidence."""
        shapes = {column.shape[:2] for column in _columns(batch)}
        if len(shapes) != 1 or len(shape := shapes.pop()) < 2:
            return ""
        self._first = self._first or shape
        if shape[0] != self._first[0] or shape[1] == self._first[1]:
            return ""
        return f"batches begin with the dimensions {self._first} and {shape}, of which the second may count the samples"
