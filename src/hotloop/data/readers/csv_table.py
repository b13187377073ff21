"""A data set of a CSV file: numbers are standardised and texts become one-hot columns."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from hotloop.data.bundle import Bundle, Pair
from hotloop.data.readers.csv_cells import Column, CsvFile, missing_column, open_csv
from hotloop.data.readers.stratified_split import Share, split_by_class
from hotloop.errors import DataError, shorten

_MAX_CATEGORIES = 100
"""Largest number of different texts in a column; more are names or numbers of rows, mostly."""

_MAX_INTEGER_CLASSES = 20
"""Largest number of different whole numbers in a target that count as classes."""

Missing = Literal["drop", "mean"]


@dataclass(frozen=True)
class InputColumn:
    """A column of the inputs, with what the training part shows.

    Attributes:
        mean, std: of a column of numbers; (0, 1) for texts.
        values: the sorted texts of a column of texts, each of which becomes a column of 0 and 1; None for numbers.
    """

    name: str
    mean: float = 0.0
    std: float = 1.0
    values: tuple[str, ...] | None = None

    @property
    def inputs(self) -> list[str]:
        return [self.name] if self.values is None else [f"{self.name}={value}" for value in self.values]


@dataclass(frozen=True)
class StandardizeColumns:
    """The `prepare` of a CSV file: `(x - mean) / std` per column, with the statistics of the training part."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """Returns float32 (B, columns) of raw float (B, columns); computed in float64."""
        if x.ndim != 2 or x.shape[1] != len(self.mean):
            raise DataError(
                f"rows of shape {tuple(x.shape)}",
                expected=f"(N, {len(self.mean)}), a column for each number and each category",
                fix="give predict a CSV file with the columns of the training file",
            )
        mean, std = (torch.tensor(part, dtype=torch.float64, device=x.device) for part in (self.mean, self.std))
        return ((x.to(torch.float64) - mean) / std).to(torch.float32)


@dataclass(frozen=True)
class CsvReader:
    """Turns CSV files into inputs with the statistics and categories of the training part.

    Attributes:
        columns: the columns of the inputs, in the training file's order.
        targets: names of a regression's target columns; empty for classes.
        missing: "mean" to replace missing cells; else they are errors.
        separator, encoding: of new files; None detects the separator.
    """

    columns: tuple[InputColumn, ...]
    targets: tuple[str, ...]
    missing: str | None
    separator: str | None
    encoding: str

    kind: ClassVar[str] = "csv"

    @cached_property
    def prepare(self) -> StandardizeColumns:
        widths = [len(column.inputs) for column in self.columns]
        pairs = [
            (column.mean, column.std) for column, width in zip(self.columns, widths, strict=True) for _ in range(width)
        ]
        return StandardizeColumns(tuple(mean for mean, _ in pairs), tuple(std for _, std in pairs))

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(name for column in self.columns for name in column.inputs)

    def open(self, path: Path) -> CsvFile:
        return open_csv(path, self.separator, self.encoding)

    def cells(self, file: CsvFile, further: Sequence[str] = (), texts: Sequence[str] = ()) -> dict[str, Column]:
        names = [column.name for column in self.columns]
        as_text = [column.name for column in self.columns if column.values is not None]
        found = file.columns([*names, *further], {*as_text, *texts})
        for column in self.columns:
            if column.values is None and found[column.name].is_text:
                raise DataError(
                    f"{file.path}: column {column.name!r} has texts",
                    expected="numbers, as in the training file",
                    fix="correct the column",
                )
        return found

    def read(self, path: Path, say: Callable[[str], None]) -> Tensor:
        """Returns raw inputs float64 (rows, columns) of a new file; further columns of the file are ignored."""
        file = self.open(path)
        cells = self.cells(file)
        if self.missing != "mean":
            check_missing(file, cells, "give a value in each row")
        for line in self.unknown_values(cells, path):
            say(line)
        return self.encode(cells)

    def names(self, path: Path) -> list[str]:
        return []

    def encode(self, cells: dict[str, Column]) -> Tensor:
        """Returns raw inputs float64 (rows, columns); unknown and missing texts become zeros."""
        parts = []
        for column in self.columns:
            found = cells[column.name]
            if column.values is None:
                parts.append(np.where(found.is_missing, column.mean, found.numbers)[:, None])
            else:
                parts.append(found.texts[:, None] == np.array(column.values, dtype=object))
        return torch.from_numpy(np.concatenate([np.asarray(part, np.float64) for part in parts], axis=1))

    def unknown_values(self, cells: dict[str, Column], path: Path) -> list[str]:
        """Returns a line for each column of texts with values that the training part lacks."""
        lines = []
        for column in self.columns:
            unknown = {*cells[column.name].texts} - {*(column.values or ()), ""} if column.values is not None else ()
            if unknown:
                lines.append(
                    f"{path}: column {column.name!r} has {len(unknown)} values that the training part lacks, such as"
                    f" {shorten(min(unknown))}; all columns of {column.name!r} are 0 in these rows"
                )
        return lines

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, **asdict(self)}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> CsvReader:
        fields = {name: document[name] for name in ("missing", "separator", "encoding")}
        columns = [column | {"values": column["values"] and tuple(column["values"])} for column in document["columns"]]
        return cls(tuple(InputColumn(**column) for column in columns), tuple(document["targets"]), **fields)


def csv(
    path: str | Path,
    *,
    target: str | Sequence[str],
    kind: Literal["classes", "regression"] | None = None,
    drop: Sequence[str] = (),
    categories: Sequence[str] = (),
    missing: Missing | None = None,
    validation: Share | str | Path = 0.1,
    test: Share | str | Path = 0.1,
    seed: int = 0,
    separator: str | None = None,
    encoding: str = "utf-8-sig",
) -> Bundle:
    """Returns the rows of a CSV file as inputs and targets.

    The first line names the columns. A column with numbers is standardised with mean and standard deviation of the
    training part alone. A column with texts becomes a column of 0 and 1 for each text of the training part, in sorted
    order (one-hot); other texts in other rows become zeros.

    Args:
        path: the file.
        target: the column to predict, or several columns for a regression with several outputs.
        kind: "classes" or "regression"; None for classes if the target has texts or at most 20 different whole numbers,
            else regression.
        drop: columns that are not inputs, such as a row's number or name.
        categories: columns of numbers that count as texts, such as postal codes.
        missing: None refuses cells without a value (empty, NA, N/A, NaN, null). "drop" leaves out rows with such a
            cell. "mean" puts the training part's mean in place of a missing number, and zeros for a missing text.
        validation, test: a share or number of rows, drawn by seed (of each class the same share); or the path of
            another file with the same columns.
        seed: decides which rows are for validation and test.
        separator: one character; None detects comma, semicolon, tab or "|".
        encoding: of the file.

    Returns:
        A Bundle for `Task(data=...)`: inputs float64 (N, columns), whose names are `inputs`, in the file's order;
        labels int64 (N,), whose sorted names are `classes`, or targets float32 (N, targets), which stay unscaled.
        `prepare` standardises the inputs as float32.

    Raises:
        DataError: the file is missing, empty or no CSV file; a column is missing; or a cell is missing or no number.
    """
    file = open_csv(Path(path).expanduser(), separator, encoding)
    targets, dropped, forced = _names(target, "target"), _names(drop, "drop"), _names(categories, "categories")
    for name in [*targets, *dropped, *forced]:
        if name not in file.header:
            raise missing_column(name, file.header, file.path)
    features = [name for name in file.header if name not in {*targets, *dropped}]
    _check_request(file, targets, features, kind, missing)
    cells = file.columns([*features, *targets], {*forced, *(targets if kind == "classes" else ())})
    cells = _without_missing(file, cells, targets, missing)
    y, classes, note = _read_target(file, targets, cells, kind)
    shares = [share if isinstance(share, int | float) else 0 for share in (validation, test)]
    labels = y.numpy() if classes else np.zeros(len(y))
    training, *held_out = split_by_class(labels, shares[0], shares[1], seed)
    columns = tuple(_fit(file, name, cells[name].take(training)) for name in features)
    reader = CsvReader(columns, () if classes else tuple(targets), missing, separator, encoding)
    x, notes = reader.encode(cells), [note, *reader.unknown_values(cells, file.path)]
    parts: list[Pair | None] = []
    paths = [file.path]
    for given, rows in zip((validation, test), held_out, strict=True):
        if isinstance(given, int | float):
            parts.append((x[rows], y[rows]) if len(rows) else None)
        else:
            paths.append(Path(given).expanduser())
            pair, lines = _read_part(paths[-1], reader, targets, classes)
            parts.append(pair)
            notes += lines
    return Bundle(
        name=file.path.stem,
        train=(x[training], y[training]),
        validation=parts[0],
        test=parts[1],
        classes=classes,
        prepare=reader.prepare,
        note="; ".join(filter(None, notes)),
        reader=reader,
        digest=_digest(paths),
        inputs=reader.inputs,
    )


def _names(given: str | Sequence[str], option: str) -> list[str]:
    names = [given] if isinstance(given, str) else list(given)
    if not all(isinstance(name, str) for name in names):
        raise DataError(f"{option}={given!r}", expected="names of columns", fix="pass the names as text")
    return names


def _check_request(file: CsvFile, targets: list[str], features: list[str], kind: Any, missing: Any) -> None:
    for option, value, known in (
        ("kind", kind, (None, "classes", "regression")),
        ("missing", missing, (None, "drop", "mean")),
    ):
        if value not in known:
            raise DataError(f"{option}={value!r}", expected="one of " + ", ".join(map(repr, known)), fix="choose one")
    if not targets or len({*targets}) < len(targets) or (kind == "classes" and len(targets) > 1):
        raise DataError(
            f"target={targets!r}", expected="a column, or different columns for a regression", fix="correct target"
        )
    if not features:
        raise DataError(
            f"{file.path} has no column for inputs",
            expected="one or more besides the target",
            fix="check target and drop" if len(file.header) > 1 else "pass separator= if the columns have another one",
        )


def check_missing(file: CsvFile, cells: dict[str, Column], fix: str) -> None:
    """Raises DataError for the first column with missing cells."""
    for name, column in cells.items():
        if (count := int(np.count_nonzero(column.is_missing))) > 0:
            rows = len(column.is_missing)
            raise DataError(
                f"{file.path}: column {name!r} has no value in {count:,} of {rows:,} rows, first in row"
                f" {int(np.argmax(column.is_missing)) + 1:,}",
                expected="a value in each row",
                fix=fix,
            )


def _without_missing(
    file: CsvFile, cells: dict[str, Column], targets: list[str], missing: str | None
) -> dict[str, Column]:
    if missing == "drop":
        rows = ~np.logical_or.reduce([column.is_missing for column in cells.values()])
        if not rows.any():
            raise DataError(f"{file.path} has a missing cell in each row", expected="complete rows", fix="drop columns")
        return {name: column.take(np.flatnonzero(rows)) for name, column in cells.items()}
    target_cells = {name: cells[name] for name in targets}
    check_missing(file, target_cells, "pass missing='drop', which leaves out these rows")
    if missing is None:
        check_missing(file, cells, "pass missing='mean' or missing='drop', or leave the column out by drop=")
    return cells


def _read_target(
    file: CsvFile, targets: list[str], cells: dict[str, Column], kind: str | None
) -> tuple[Tensor, tuple[str, ...], str]:
    """Returns targets, names of the classes (empty for a regression), and a note on a doubtful choice."""
    column, note = cells[targets[0]], ""
    if kind is None and len(targets) == 1:
        different = np.unique(column.numbers)
        is_whole = not column.is_text and bool((different == np.round(different)).all())
        kind = "classes" if column.is_text or (is_whole and len(different) <= _MAX_INTEGER_CLASSES) else "regression"
        if is_whole:
            other = "regression" if kind == "classes" else "classes"
            note = f"{file.path}: the whole numbers of {targets[0]!r} count as {kind}; kind={other!r} changes this"
    if kind == "classes":
        values = (
            column.texts if column.is_text else np.array([f"{number:g}" for number in column.numbers], dtype=object)
        )
        order = sorted if column.is_text and not _are_numbers(values) else (lambda names: sorted(names, key=float))
        classes = tuple(order({*values}))
        if len(classes) < 2:
            raise DataError(
                f"{file.path}: column {targets[0]!r} has one class, {classes[0]!r}",
                expected="two or more",
                fix="check target",
            )
        return _labels(file.path, targets[0], values, classes), classes, note
    for name in targets:
        if cells[name].is_text:
            raise DataError(
                f"{file.path}: column {name!r} has texts",
                expected="numbers for a regression",
                fix="pass kind='classes'" if len(targets) == 1 else "correct target",
            )
    numbers = np.stack([cells[name].numbers for name in targets], axis=1)
    return torch.from_numpy(numbers.astype(np.float32)), (), note


def _are_numbers(texts: np.ndarray) -> bool:
    try:
        return all(np.isfinite(float(text)) for text in {*texts})
    except ValueError:
        return False


def _labels(path: Path, name: str, values: np.ndarray, classes: tuple[str, ...]) -> Tensor:
    numbers = {label: number for number, label in enumerate(classes)}
    if unknown := {*values} - numbers.keys():
        raise DataError(
            f"{path}: column {name!r} has the class {min(unknown)!r}, which the training file lacks",
            expected=f"one of {shorten(', '.join(classes))}",
            fix="correct it",
        )
    return torch.tensor([numbers[value] for value in values])


def _fit(file: CsvFile, name: str, cells: Column) -> InputColumn:
    """Returns a column with the statistics, or the categories, of the training rows."""
    present = ~cells.is_missing
    if not present.any():
        raise DataError(
            f"{file.path}: column {name!r} has no value in the training part",
            expected="values",
            fix=f"pass drop=[{name!r}]",
        )
    if not cells.is_text:
        numbers = cells.numbers[present]
        return InputColumn(name, float(numbers.mean()), float(numbers.std()) or 1.0)
    values = tuple(sorted({*cells.texts[present]}))
    if len(values) > _MAX_CATEGORIES:
        raise DataError(
            f"{file.path}: column {name!r} has {len(values):,} different texts",
            expected=f"numbers, or at most {_MAX_CATEGORIES} categories",
            fix=f"pass drop=[{name!r}] if it names the rows",
        )
    return InputColumn(name, values=values)


def _read_part(path: Path, reader: CsvReader, targets: list[str], classes: tuple[str, ...]) -> tuple[Pair, list[str]]:
    """Returns the inputs and targets of a file for validation or test, and notes."""
    file = reader.open(path)
    cells = reader.cells(file, targets, targets if classes else ())
    cells = _without_missing(file, cells, targets, reader.missing)
    if classes:
        texts = cells[targets[0]].texts
        as_numbers = _are_numbers(texts) and _are_numbers(np.array(classes, dtype=object))
        values = np.array([f"{float(text):g}" for text in texts], dtype=object) if as_numbers else texts
        y = _labels(path, targets[0], values, classes)
    else:
        y, _, _ = _read_target(file, targets, cells, "regression")
    return (reader.encode(cells), y), reader.unknown_values(cells, path)


def _digest(paths: list[Path]) -> str:
    """Returns a hash of the files' contents."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
