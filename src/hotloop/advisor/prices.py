"""Prices per hour of a chip: a few of the package with their dates, or those of the user's file."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hotloop.advisor.chips import FACTS, find_chip
from hotloop.errors import HotloopError

_CHIP_COLUMNS = ("name", "chip", "gpu")
_PRICE_COLUMNS = ("price_per_hour", "price per hour", "price", "per_hour", "usd_per_hour")


@dataclass(frozen=True)
class Price:
    """Price of one chip.

    Attributes:
        chip: name in the table of chips.
        per_hour: price per chip and hour, in the currency of the source (US dollars in the package's file).
        source: provider or file, with its date.
    """

    chip: str
    per_hour: float
    source: str


def shipped_prices() -> dict[str, Price]:
    """Returns the package's prices by chip."""
    with (FACTS / "prices.csv").open(encoding="utf-8", newline="") as file:
        return {
            row["chip"]: Price(row["chip"], float(row["per_hour"]), f"{row['source']} ({row['date']})")
            for row in csv.DictReader(file)
        }


def read_prices(path: str | Path) -> dict[str, Price]:
    """Reads a CSV file with a column `name` or `chip` and a column `price per hour`.

    Raises:
        HotloopError: the file, a column, a chip or a price can't be used; the message names the line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise HotloopError(
            f"prices {path}: {reason}", expected="a CSV file with columns name and price per hour"
        ) from None
    reader = csv.DictReader(text.splitlines())
    columns = [(name or "").strip() for name in reader.fieldnames or ()]
    chip_column = _column(columns, _CHIP_COLUMNS, path)
    price_column = _column(columns, _PRICE_COLUMNS, path)
    reader.fieldnames = columns
    prices: dict[str, Price] = {}
    for line, row in enumerate(reader, start=2):
        name, value = (row[chip_column] or "").strip(), (row[price_column] or "").strip()
        if not name and not value:
            continue
        try:
            chip = find_chip(name).name
        except HotloopError as error:
            raise HotloopError(f"{path.name}, line {line}: {error}") from None
        try:
            price = float(value.lstrip("$€£"))
        except ValueError:
            price = math.nan
        if not 0 <= price < math.inf:
            raise HotloopError(f"{path.name}, line {line}: price {value!r}", expected="a number of 0 or more")
        prices[chip] = Price(chip, price, path.name)
    if not prices:
        raise HotloopError(f"prices {path}: no rows", expected="a row for each chip")
    return prices


def _column(columns: Iterable[str], names: tuple[str, ...], path: Path) -> str:
    columns = list(columns)
    for column in columns:
        if column.lower() in names:
            return column
    raise HotloopError(
        f"prices {path}: columns {', '.join(columns) or 'none'}",
        expected=f"a column {names[0]!r}",
        fix="name the columns name,price per hour",
    )
