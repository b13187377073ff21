"""Reads the cells of a CSV file into columns of numbers or texts, in chunks of rows."""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from hotloop.errors import DataError, did_you_mean, shorten

SEPARATORS = ",;\t|"
_CHUNK_ROWS = 50_000
_SNIFFED_ROWS = 20

MISSING = frozenset(("", "na", "n/a", "nan", "null"))
"""Cells without a value, in lower case."""


@dataclass(frozen=True)
class BadCell:
    """A cell that is no number; `row` counts from 1, without the header."""

    row: int
    text: str


@dataclass
class Column:
    """A column's cells.

    Attributes:
        numbers: float64 (rows,), NaN for missing cells; empty for texts.
        texts: (rows,), "" for missing cells; empty for numbers.
        bad: number of cells that are neither numbers nor missing, in a column of numbers.
        first_bad: the first of these.
    """

    numbers: np.ndarray = field(default_factory=lambda: np.empty(0))
    texts: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=object))
    bad: int = 0
    first_bad: BadCell | None = None

    @property
    def is_text(self) -> bool:
        return len(self.texts) > 0

    @property
    def is_missing(self) -> np.ndarray:
        """Returns bool (rows,)."""
        return self.texts == "" if self.is_text else np.isnan(self.numbers)

    def take(self, rows: np.ndarray) -> Column:
        return Column(
            self.numbers[rows] if len(self.numbers) else self.numbers, self.texts[rows] if self.is_text else self.texts
        )


@dataclass(frozen=True)
class CsvFile:
    """A CSV file's name, separator, encoding and header."""

    path: Path
    separator: str
    encoding: str
    header: list[str]

    def columns(self, names: Sequence[str], texts: Collection[str] = ()) -> dict[str, Column]:
        """Returns the columns `names`.

        A column of `texts`, or one of which half of the cells or fewer are numbers, has texts; others have numbers.

        Raises:
            DataError: a column isn't in the file, a row has another number of cells, a column of numbers has a cell
                that is no number, or the file has no rows.
        """
        for name in names:
            if name not in self.header:
                raise missing_column(name, self.header, self.path)
        found = self._read(names, texts)
        mixed = {name for name, column in found.items() if column.bad}
        for name in sorted(mixed):
            column = found[name]
            assert column.first_bad is not None
            is_number = 2 * column.bad < np.count_nonzero(~column.is_missing) + column.bad
            if is_number or self.has_decimal_comma(column.first_bad.text):
                raise _bad_cell(self, name, column.first_bad)
        return found | self._read(sorted(mixed), mixed) if mixed else found

    def has_decimal_comma(self, text: str) -> bool:
        """Returns whether a cell of a file with another separator is a number with a decimal comma."""
        return self.separator != "," and "," in text and _is_number(text.replace(",", ".", 1))

    def _read(self, names: Sequence[str], texts: Collection[str]) -> dict[str, Column]:
        pieces: dict[str, list[Any]] = {name: [] for name in names}
        columns = {name: Column() for name in names}
        places = {name: self.header.index(name) for name in names}
        known: dict[str, str] = {}
        rows = 0
        for chunk in self._chunks():
            cells = list(zip(*chunk, strict=True))
            for name in names:
                if name in texts:
                    pieces[name] += [known.setdefault(text, text) for text in map(_clean_text, cells[places[name]])]
                else:
                    pieces[name].append(_numbers(cells[places[name]], columns[name], rows))
            rows += len(chunk)
        if not rows:
            raise DataError(f"{self.path} has a header and no rows", expected="one row or more", fix="check the file")
        for name, column in columns.items():
            if name in texts:
                column.texts = np.array(pieces[name], dtype=object)
            else:
                column.numbers = np.concatenate(pieces[name])
        return columns

    def _chunks(self) -> Iterator[list[list[str]]]:
        """Yields lists of rows with as many cells as the header; empty lines are skipped."""
        with _open(self.path, self.encoding) as file:
            reader = csv.reader(file, delimiter=self.separator, strict=True)
            try:
                next(row for row in reader if row)
                while chunk := list(islice(reader, _CHUNK_ROWS)):
                    if {*map(len, chunk)} != {len(self.header)}:
                        chunk = self._check_widths(chunk, reader.line_num)
                    if chunk:
                        yield chunk
            except (csv.Error, UnicodeError) as error:
                raise _unreadable(self.path, error, self.encoding, reader.line_num) from error

    def _check_widths(self, chunk: list[list[str]], last_line: int) -> list[list[str]]:
        for place, row in enumerate(chunk):
            if row and len(row) != len(self.header):
                line = last_line - len(chunk) + 1 + place
                raise DataError(
                    f"{self.path} has {len(row)} cells near line {line:,}",
                    expected=f"{len(self.header)}, as in the header",
                    fix="correct the line; a cell that contains the separator needs quotes",
                )
        return [row for row in chunk if row]


def open_csv(path: Path, separator: str | None, encoding: str) -> CsvFile:
    """Returns the file's header and separator, which is detected if it is None.

    Raises:
        DataError: the file is missing, empty, no text, or its header has empty, repeated or numeric names.
    """
    if not path.is_file():
        here = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise DataError(
            f"{path} is a folder" if path.is_dir() else f"no file {path}{here}",
            expected="a CSV file",
            fix="check the path",
        )
    if separator is not None and (not isinstance(separator, str) or len(separator) != 1):
        raise DataError(f"separator={separator!r}", expected="one character, such as ';'", fix="pass separator=';'")
    try:
        with _open(path, encoding) as file:
            lines = [line for line in islice(file, _SNIFFED_ROWS) if line.strip()]
        separator = separator or _sniff(lines)
        header = [name.strip() for name in next(csv.reader(lines, delimiter=separator), [])]
    except (UnicodeError, csv.Error, LookupError) as error:
        raise _unreadable(path, error, encoding, 1) from error
    if not header:
        raise DataError(f"{path} is empty", expected="a header and rows", fix="check the file")
    _check_header(path, header)
    return CsvFile(path, separator, encoding, header)


def _open(path: Path, encoding: str) -> TextIO:
    try:
        return path.open(encoding=encoding, newline="")
    except OSError as error:
        raise DataError(
            f"{path} can't be read ({error.strerror})", expected="a CSV file", fix="check the path"
        ) from error


def _sniff(lines: list[str]) -> str:
    """Returns the separator that cuts the first lines into the same number of cells, and into most.

    If no separator does so, the separator with most cells in the header is returned.
    """

    def cells(separator: str) -> tuple[int, int]:
        widths = [len(row) for row in csv.reader(lines, delimiter=separator)]
        complete = widths if len(widths) < _SNIFFED_ROWS else widths[:-1]  # the last row may continue on later lines
        header = widths[0] if widths else 0
        return header if header > 1 and len({*complete}) == 1 else 0, header

    return max(SEPARATORS, key=cells)


def _check_header(path: Path, header: list[str]) -> None:
    fix = "give each column a name in the first line"
    if all(map(_is_number, header)):
        raise DataError(f"the first line of {path} has numbers alone", expected="names of the columns", fix=fix)
    for place, name in enumerate(header):
        if not name:
            raise DataError(f"column {place + 1} of {path} has no name", expected="a name", fix=fix)
        if name in header[:place]:
            raise DataError(f"{path} has two columns {name!r}", expected="different names", fix="rename one of them")


def missing_column(name: str, header: Collection[str], path: Path) -> DataError:
    names = ", ".join(header)
    return DataError(
        f"{path} has no column {name!r}",
        expected=f"one of {names if len(names) < 200 else shorten(names)}",
        fix=did_you_mean(str(name), header) or "check the spelling",
    )


def _bad_cell(file: CsvFile, name: str, bad: BadCell) -> DataError:
    return DataError(
        f"{file.path}: column {name!r} has {shorten(bad.text)} in row {bad.row:,}",
        expected="a number",
        fix="write numbers with a decimal point"
        if file.has_decimal_comma(bad.text)
        else f"correct the cell, empty it and pass missing=, or pass categories=[{name!r}] or drop=[{name!r}]",
    )


def _unreadable(path: Path, error: Exception, encoding: str, line: int) -> DataError:
    if isinstance(error, csv.Error):
        return DataError(
            f"{path} can't be read near line {line:,} ({error})", expected="a CSV file", fix="correct the line"
        )
    return DataError(
        f"{path} isn't text in the encoding {encoding!r}",
        expected="a CSV file",
        fix="pass its encoding, such as encoding='latin-1', or save it as UTF-8",
    )


def _clean_text(cell: str) -> str:
    text = cell.strip()
    return "" if text.lower() in MISSING else text


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _numbers(cells: Sequence[str], column: Column, row: int) -> np.ndarray:
    """Returns float64 (cells,); counts cells that are no numbers in `column`."""
    try:
        numbers = np.fromiter(map(float, cells), np.float64, len(cells))
    except ValueError:
        pass
    else:
        if np.isfinite(numbers).all():
            return numbers
    numbers = np.full(len(cells), np.nan)
    for place, cell in enumerate(cells):
        if _is_number(cell):
            numbers[place] = float(cell)
        elif cell.strip().lower() not in MISSING:
            column.bad += 1
            column.first_bad = column.first_bad or BadCell(row + place + 1, cell)
    return numbers
