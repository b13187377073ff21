"""Results of one device on disk: a folder with `record.json`, the step times as `steps.csv`, and output of failures."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.gpu.facts import Facts
from bench.gpu.processes import Ended
from hotloop.core.files.atomic_files import write_atomic
from hotloop.errors import HotloopError

COLUMNS = ("network", "parameters", "batch", "device", "plan", "step_ms", "windows")
"""Of `steps.csv`; `step_ms` is the median over so many windows."""

Stored = dict[str, Any]
"""A result in a record: `status`, `figure`, `seconds`, `taken`, `torch`, `figures`, and `output`, a file, of a failure."""


class Record:
    """A record that grows by one result at a time, each written at once and whole.

    Args:
        folder: is made with the first result.
        facts: of the device and its circumstances.
        command: what was called.
    """

    def __init__(self, folder: Path, facts: Facts, command: str, is_rehearsal: bool) -> None:
        self.folder = folder
        self._head = {
            "claim": f"gpu-{facts.slug}",
            "command": command,
            **facts.circumstances,
            "device": facts.device,
            "chip": facts.chip,
            "source": facts.source,
            "rehearsal": is_rehearsal,
        }
        before = read(folder)
        if before is not None:
            self._head["taken"] = before["taken"]
        self.results: dict[str, Stored] = {} if before is None else before["checks"]

    def store(self, key: str, ended: Ended) -> None:
        """Adds the result of a part; the output of a failure is written beside the record first."""
        stored: Stored = {
            "status": "failed" if ended.status == "late" else ended.status,
            "figure": ended.figure,
            "seconds": round(ended.seconds, 1),
            "taken": datetime.now(UTC).isoformat(timespec="seconds"),
            "torch": self._head.get("versions", {}).get("torch"),
            "figures": ended.figures,
        }
        output = self.folder / f"{key.replace('/', '-')}.txt"
        if stored["status"] == "failed":
            write_atomic(output, ended.output or "no output\n")
            stored["output"] = output.name
        self.results[key] = stored
        write_atomic(self.folder / "record.json", json.dumps({**self._head, "checks": self.results}, indent=2) + "\n")
        if stored["status"] != "failed":
            output.unlink(missing_ok=True)
        if rows := list(step_rows(self.results)):
            write_atomic(self.folder / "steps.csv", table_of(rows))


def read(folder: Path) -> dict[str, Any] | None:
    """The record in a folder; None where there is none.

    Raises:
        HotloopError: the file is none of these checks' records.
    """
    path = folder / "record.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        found = None
    if not isinstance(found, dict) or not {"chip", "source", "checks", "taken"} <= found.keys():
        raise HotloopError(f"{path} is no record of the GPU checks", fix="name another folder, or remove this file")
    return found


def step_rows(results: Mapping[str, Stored]) -> Iterable[dict[str, Any]]:
    """The measured steps of all parts of the check `steps`."""
    for key, stored in results.items():
        if key.startswith("steps/"):
            yield from stored["figures"].get("rows", [])


def table_of(rows: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def fitting(found: Mapping[str, Any], facts: Facts, is_rehearsal: bool) -> bool:
    """Whether results of a record count for this chip and this source."""
    own = (facts.chip, facts.device, facts.source, is_rehearsal)
    return (found["chip"], found.get("device"), found["source"], found.get("rehearsal", False)) == own


def known_results(home: Path, facts: Facts, is_rehearsal: bool) -> dict[str, Stored]:
    """The newest result of each part for this chip and this source, in all records of a folder of records."""
    found: dict[str, Stored] = {}
    for path in sorted(home.glob("*_gpu-*/record.json")):
        try:
            record = read(path.parent)
        except HotloopError:
            continue
        if record is not None and fitting(record, facts, is_rehearsal):
            for key, stored in record["checks"].items():
                if key not in found or found[key]["taken"] <= stored["taken"]:
                    found[key] = stored
    return found


def new_folder(home: Path, facts: Facts, is_rehearsal: bool) -> Path:
    """Where today's results belong: a folder that has none of another source or another torch."""
    name = f"{datetime.now(UTC):%Y-%m-%d}_gpu-{facts.slug}"
    torch = facts.circumstances.get("versions", {}).get("torch")
    number = 1
    while True:
        folder = home / (name if number == 1 else f"{name}-{number}")
        found = read(folder)
        if found is None:
            return folder
        if fitting(found, facts, is_rehearsal) and found.get("versions", {}).get("torch") == torch:
            return folder
        number += 1
