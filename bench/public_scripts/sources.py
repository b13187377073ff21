"""Fetches public scripts and prepares a folder in which a script runs."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.public_scripts import data

LIST = Path(__file__).with_name("list.toml")

STAND_INS = Path(__file__).with_name("stand_ins")
"""A folder for PYTHONPATH."""

_SEEDS = "import random, numpy, torch; random.seed(0); numpy.random.seed(0); torch.manual_seed(0)\n"


PICTURES, _LEAST_PICTURES = 60_000, 1_000
"""Training pictures of Fashion-MNIST, and the least number that a run gets."""


class Length(NamedTuple):
    """The length of a run: the value of {count}, and the number of training pictures."""

    count: int
    pictures: int = PICTURES


class Measured(NamedTuple):
    """Seconds of a script's start, and seconds for each count, with all pictures."""

    start_s: float
    count_s: float


@dataclass(frozen=True)
class PublicScript:
    """One table of the list; the list explains the fields."""

    name: str
    repository: str
    commit: str
    folder: str
    script: str
    arguments: tuple[str, ...]
    per_minute: float
    data: str = ""
    edits: tuple[tuple[str, str], ...] = ()
    seeded: bool = True
    pictures: bool = False
    times: tuple[str, ...] = ()

    def length(self, seconds: float, measured: Measured | None = None) -> Length:
        """Returns the length of a run that takes about so many seconds; less than an epoch has fewer pictures."""
        start_s, count_s = measured or Measured(0.0, 60 / self.per_minute)
        count = max(0.0, seconds - start_s) / count_s
        if self.pictures and count < 1:
            return Length(1, max(_LEAST_PICTURES, round(PICTURES * count)))
        return Length(max(1, round(count)), PICTURES)


def read_list(path: Path = LIST) -> list[PublicScript]:
    """Returns all scripts of a list."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    scripts = list[PublicScript]()
    for name, table in tables.items():
        lists = {key: tuple(value) for key, value in table.items() if isinstance(value, list)}
        lists["edits"] = tuple((before, after) for before, after in table.get("edits", ()))
        scripts.append(PublicScript(name, **{**table, **lists}))
    return scripts


def fetch(scripts: Sequence[PublicScript], sources: Path) -> None:
    """Fetches repositories that `sources` lacks, each into the folder OWNER/NAME."""
    for repository, commit in sorted({(script.repository, script.commit) for script in scripts}):
        folder = sources / repository
        if folder.exists():
            continue
        subprocess.run(["git", "init", "-q", str(folder)], check=True)
        url = f"https://github.com/{repository}"
        subprocess.run(["git", "-C", str(folder), "fetch", "-q", "--depth", "1", url, commit], check=True)
        subprocess.run(["git", "-C", str(folder), "checkout", "-q", "FETCH_HEAD"], check=True)


def prepare(script: PublicScript, sources: Path, folder: Path, count: int) -> list[str]:
    """Copies a script into a new folder, with its data and {count}; returns its path there and its arguments.

    Raises:
        ValueError: the script lacks a text that the list edits.
    """
    shutil.copytree(sources / script.repository / script.folder, folder, ignore=shutil.ignore_patterns(".git"))
    if script.data:
        getattr(data, script.data)(folder)
    path = folder / script.script
    text = path.read_text(encoding="utf-8")
    for before, after in script.edits:
        if before not in text:
            raise ValueError(f"{script.name} has no {before!r}")
        text = text.replace(before, after.replace("{count}", str(count)))
    path.write_text(text if script.seeded else _SEEDS + text, encoding="utf-8")
    return [script.script, *(argument.replace("{count}", str(count)) for argument in script.arguments)]
