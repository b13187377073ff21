"""Published facts of chips: peak rates, memory, links, board power and prices, each with its source.

`facts/chips.csv` has one row per chip, `facts/sources.csv` the data sheets, `facts/prices.csv` dated prices. A fact that
its vendor doesn't publish is None.
"""

from __future__ import annotations

import csv
import difflib
import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from hotloop.errors import HotloopError

FACTS = Path(__file__).parent / "facts"

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8")

_VENDORS = {
    "nvidia",
    "amd",
    "intel",
    "apple",
    "aws",
    "tesla",
    "geforce",
    "quadro",
    "instinct",
    "radeon",
    "gpu",
    "graphics",
}
"""Words that a chip's name may have or lack."""

_FLOPS_PER_CYCLE = {128: 16, 256: 32, 512: 64}
"""fp32 operations per cycle and core by vector width in bits, with two units for multiply-add."""

_CPU_CLOCK_GHZ = 2.5
_CPU_BYTES_PER_CORE = 4.0e9
"""Clock and share of memory bandwidth of a CPU core in servers of 2019 to 2023, where the caller states none."""


@dataclass(frozen=True)
class Chip:
    """Facts of one chip.

    Attributes:
        name: name in the table.
        maker: vendor.
        kind: `gpu`, `integrated` (GPU that shares the host's memory) or `cpu`.
        architecture: vendor's name of the generation.
        year: year of first sale.
        units: streaming multiprocessors, compute units, GPU cores or CPU cores.
        clock_hz: boost clock of a GPU, base clock of a CPU.
        flop_per_s: dense peak of matrix products by precision, accumulated in fp32; a missing precision doesn't exist.
        vector_flop_per_s: fp32 peak outside of matrix units.
        memory_bytes: device memory; None where the machine's memory decides.
        bandwidth_bytes_per_s: bytes/s of device memory.
        l2_bytes: last cache shared by all units.
        link_bytes_per_s: bytes/s in one direction to other GPUs, all links together; None without such links.
        pcie_bytes_per_s: bytes/s in one direction to the host.
        board_w: typical board power in watts.
        source: data sheet of peak rates, memory, bandwidth and power, with its date.
        details: source of units, clock, cache, links and year, with its date.
        aliases: other names.
        is_measured: whether the rates were measured on this machine, so that they need no factor.
    """

    name: str
    maker: str
    kind: Literal["gpu", "integrated", "cpu"]
    architecture: str
    year: int | None
    units: int | None
    clock_hz: float | None
    flop_per_s: dict[str, float]
    vector_flop_per_s: float
    memory_bytes: float | None
    bandwidth_bytes_per_s: float
    l2_bytes: float | None
    link_bytes_per_s: float | None
    pcie_bytes_per_s: float | None
    board_w: float | None
    source: str
    details: str
    aliases: tuple[str, ...] = ()
    is_measured: bool = False

    def peak(self, precision: str) -> float:
        """Returns FLOP/s of matrix products; a precision that the chip computes slower than fp32 runs as fp32."""
        if precision not in PRECISIONS:
            raise HotloopError(f"precision {precision!r}", expected="one of " + ", ".join(PRECISIONS))
        return max(self.flop_per_s["fp32"], self.flop_per_s.get(precision, 0.0))


@cache
def sources() -> dict[str, str]:
    """Returns title and date of each source by its key."""
    with (FACTS / "sources.csv").open(encoding="utf-8", newline="") as file:
        return {row["key"]: f"{row['title']} ({row['date']})" for row in csv.DictReader(file)}


@cache
def chips() -> tuple[Chip, ...]:
    """Returns all chips of the table in its order: the most common form of a chip stands before its other forms."""
    with (FACTS / "chips.csv").open(encoding="utf-8", newline="") as file:
        return tuple(_chip(row) for row in csv.DictReader(file))


def _chip(row: dict[str, str]) -> Chip:
    def scaled(column: str, factor: float) -> float | None:
        return float(row[column]) * factor if row[column] else None

    vector = float(row["fp32"]) * 1e12
    rates = {name: scaled(name, 1e12) for name in PRECISIONS} | {"fp32": scaled("fp32_matrix", 1e12) or vector}
    return Chip(
        name=row["name"],
        maker=row["maker"],
        kind=row["kind"],  # type: ignore[arg-type]  # tests check the table
        architecture=row["architecture"],
        year=int(row["year"]),
        units=int(row["units"]),
        clock_hz=scaled("clock_mhz", 1e6),
        flop_per_s={name: rate for name, rate in rates.items() if rate is not None},
        vector_flop_per_s=vector,
        memory_bytes=scaled("memory_gb", 2**30),
        bandwidth_bytes_per_s=float(row["bandwidth_gbs"]) * 1e9,
        l2_bytes=scaled("l2_mb", 2**20),
        link_bytes_per_s=scaled("link_gbs", 1e9),
        pcie_bytes_per_s=scaled("pcie_gbs", 1e9),
        board_w=scaled("board_w", 1.0),
        source=sources()[row["source"]],
        details=sources()[row["details"]],
        aliases=tuple(filter(None, row["aliases"].split("|"))),
    )


def find_chip(name: str) -> Chip:
    """Returns the chip with that name, without regard to case, vendor, spaces and hyphens.

    A name may leave words out: the first chip of the table with all words of the name is meant ("A100": SXM, 80 GB).
    `cpu 16 cores avx512 2.5 GHz` describes a CPU by cores, vector width (avx, avx2, avx512, neon) and clock.

    Raises:
        HotloopError: no chip has all words of the name.
    """
    words = _words(name)
    if words[:1] == ["cpu"]:
        return _described_cpu(name)
    for chip in chips():
        if any(words == _words(known) for known in (chip.name, *chip.aliases)):
            return chip
    for chip in chips():
        known = _words(chip.name) + _words(f"{(chip.memory_bytes or 0) / 2**30:.0f}GB")
        if any(character.isdigit() for character in name) and _is_abbreviation(words, known):
            return chip
    close = nearest_names(name)
    raise HotloopError(
        f"unknown chip {name!r}",
        expected="a chip of the table" + (", such as " + ", ".join(close) if close else ""),
        fix="describe a CPU as 'cpu 16 cores avx512 2.5 GHz'" if "cpu" in name.lower() else "",
    )


def nearest_names(name: str, count: int = 3) -> list[str]:
    """Returns names of the table that resemble the name, the nearest first."""
    by_words = {" ".join(_words(chip.name)): chip.name for chip in reversed(chips())}
    wanted = " ".join(_words(name))
    shorter = {key[: len(wanted) + 2]: chip for key, chip in by_words.items()}
    close = difflib.get_close_matches(wanted, [*by_words, *shorter], n=2 * count, cutoff=0.5)
    return list(dict.fromkeys(by_words.get(key) or shorter[key] for key in close))[:count]


def _words(name: str) -> list[str]:
    """Returns lower-case words and numbers of a name without vendors; `RTX4090` has the words `rtx` and `4090`."""
    parts = re.findall(r"[a-z]+|\d+", re.sub(r"sxm\d", "sxm", re.sub(r"hbm\d?e?|gddr\d\w?", "", name.lower())))
    return [part for part in parts if part not in _VENDORS]


def _is_abbreviation(words: list[str], known: list[str]) -> bool:
    """Returns whether all words occur in the known ones, where a word with a number after it stands before that number."""
    if not set(words) <= set(known):
        return False
    pairs = [(word, after) for word, after in itertools.pairwise(words) if len(word) == 1 and after.isdigit()]
    return all(pair in itertools.pairwise(known) for pair in pairs)


def _described_cpu(name: str) -> Chip:
    text = name.lower()
    cores = re.search(r"(\d+)\s*-?\s*cores?\b", text)
    clock = re.search(r"([\d.]+)\s*ghz", text)
    vector = re.search(r"\b(avx512|avx-512|avx2|avx|neon)\b", text)
    if not cores or int(cores[1]) < 1 or (clock and not 0.1 <= float(clock[1]) <= 10):
        raise HotloopError(
            f"CPU {name!r}", expected="cores, vector width and clock, such as 'cpu 16 cores avx512 2.5 GHz'"
        )
    width = {"neon": 128, "avx": 256, "avx2": 256}.get(vector[1], 512) if vector else 256
    return cpu_chip(int(cores[1]), width, (float(clock[1]) if clock else _CPU_CLOCK_GHZ) * 1e9)


def cpu_chip(
    cores: int,
    vector_bits: int,
    clock_hz: float,
    bandwidth_bytes_per_s: float | None = None,
    memory_bytes: float | None = None,
) -> Chip:
    """Returns a CPU with peak cores x clock x operations per cycle; without a bandwidth, a share per core is assumed."""
    if vector_bits not in _FLOPS_PER_CYCLE:
        raise HotloopError(f"a vector width of {vector_bits} bits", expected="128, 256 or 512")
    rate = cores * clock_hz * _FLOPS_PER_CYCLE[vector_bits]
    rule = sources()["cpu-rule"]
    return Chip(
        name=f"CPU, {cores} cores, {vector_bits}-bit vectors, {clock_hz / 1e9:g} GHz",
        maker="",
        kind="cpu",
        architecture="",
        year=None,
        units=cores,
        clock_hz=clock_hz,
        flop_per_s={"fp32": rate},
        vector_flop_per_s=rate,
        memory_bytes=memory_bytes,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s or cores * _CPU_BYTES_PER_CORE,
        l2_bytes=None,
        link_bytes_per_s=None,
        pcie_bytes_per_s=None,
        board_w=None,
        source=rule,
        details=rule,
    )


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
