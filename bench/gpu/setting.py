"""What the parts of a check are given, and what they give back. This file imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CLAIMS = ROOT / "claims"


class Skipped(Exception):
    """A part doesn't apply to this machine; the text says why."""


@dataclass(frozen=True)
class Result:
    """What a part found.

    Attributes:
        figure: the finding in a few words, for the table.
        figures: all numbers, for the record.
        wrong: why the part failed; empty if it passed.
    """

    figure: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    wrong: str = ""


@dataclass(frozen=True)
class Setting:
    """Where and how a part runs.

    Attributes:
        device: `cuda`, `mps` or `cpu`.
        is_rehearsal: whether sizes are small, and times aren't judged.
        scratch: a folder for caches and outputs, which later visits find again.
    """

    device: str
    is_rehearsal: bool
    scratch: Path

    @property
    def size(self) -> str:
        """Of networks and data, as `bench.gpu.tasks` names it."""
        return "small" if self.is_rehearsal else "full"

    @property
    def judges_times(self) -> bool:
        """Whether a slow step makes a part fail: a rehearsal's times say nothing."""
        return not self.is_rehearsal and self.device != "cpu"

    def task(self, name: str, **parameters: Any) -> list[str]:
        """The arguments of the command that name a Task."""
        given = {"name": name, "size": self.size, **parameters}
        return ["bench.gpu.tasks:task", *(word for key, value in given.items() for word in ("-p", f"{key}={value}"))]

    def fitted(self, axes: str) -> dict[str, str]:
        """The axes `graphs=step compile=step` without those that this device, or a rehearsal, can't run."""
        found = dict(pair.split("=") for pair in axes.split())
        absent = set() if self.device == "cuda" else {"graphs"}
        absent |= {"rewrites"} if self.device == "mps" else set()
        if self.device == "cpu" and "precision" in found and not _has_bf16():
            absent |= {"precision"}
        return {axis: value for axis, value in found.items() if axis not in absent}


def _has_bf16() -> bool:
    from hotloop.core.hardware import machine

    return "bf16" in machine.cpu_precisions(machine.read_processor().vectors)


def caches(folder: Path) -> dict[str, str]:
    """Environment variables of processes that keep measured rates, found plans and compiled code in this folder."""
    return {"XDG_CACHE_HOME": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}


def environment(folder: Path, *, is_rehearsal: bool = False) -> dict[str, str]:
    """This process's own environment, with `caches` in place of the user's.

    Small networks are faster on one thread, also where other programs use the cores.
    """
    threads = {"OMP_NUM_THREADS": "1"} if is_rehearsal else {}
    return {**os.environ, **threads, **caches(folder)}
