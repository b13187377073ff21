"""The line-based files of a run folder, each with its schema. Damaged lines are skipped and reported.

journal.jsonl   events
metrics.jsonl   a row per epoch
reached         the number of a step
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hotloop.core.files.atomic_files import read_regular
from hotloop.errors import RunError

Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]


class JournalEvent(BaseModel):
    """A line of the journal; each kind of event has further fields."""

    model_config = ConfigDict(extra="allow", frozen=True)

    event: str
    time: float = 0.0


class StepEvent(JournalEvent):
    """The events `start`, `resume`, `stop` and `checkpoint`."""

    step: Count


class FinalEvent(JournalEvent):
    """The figures of the selected weights after training."""

    reason: str
    weights: Literal["best", "last"]
    epoch: Count


class MetricsRow(BaseModel):
    """A row of the metrics: an epoch's number, its last step, and figures by name."""

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, float | None]

    epoch: Annotated[int, Field(strict=True, ge=1, lt=2**63)]
    step: Count


EVENT_TYPES: dict[str, type[BaseModel]] = dict.fromkeys(("start", "resume", "stop", "checkpoint"), StepEvent) | {
    "final": FinalEvent
}


@dataclass(frozen=True)
class JournalRows:
    """The lines of a file.

    Attributes:
        rows: the valid lines.
        bad: the numbers of the damaged lines, from 1.
        problem: why the path can't be read, such as a directory in place of a file; empty without a problem.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    bad_lines: list[int] = field(default_factory=list)
    problem: str = ""

    def damage(self, path: Path, instead: str) -> list[str]:
        """Returns a line for the user if lines are damaged; `instead` names the replacement."""
        if self.problem:
            return [f"{self.problem}: {instead}"]
        if not self.bad_lines:
            return []
        first, count = self.bad_lines[0], len(self.bad_lines)
        return [
            f"{path} is damaged in {f'line {first}' if count == 1 else f'{count} lines from line {first} on'}: {instead}"
        ]


def read_events(path: Path) -> JournalRows:
    """Returns the journal's events; an incomplete line, which a kill leaves at a process's end, is no damage."""
    return _read_rows(
        path,
        lambda row: EVENT_TYPES.get(row["event"], JournalEvent) if isinstance(row.get("event"), str) else JournalEvent,
    )


def read_metrics(path: Path) -> JournalRows:
    return _read_rows(path, lambda row: MetricsRow)


def _read_rows(path: Path, schema: Any) -> JournalRows:
    try:
        content = read_regular(path)
    except RunError as error:
        return JournalRows(problem=error.given)
    rows, bad = [], []
    for number, line in enumerate((content or b"").split(b"\n"), 1):
        if not line.strip():
            continue
        row = _parse_row(line)
        try:
            if row is None:
                raise ValueError
            schema(row).model_validate(row)
            rows.append(row)
        except ValueError:  # ValidationError is a ValueError
            if not _is_incomplete(line):
                bad.append(number)
    return JournalRows(rows, bad)


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _is_incomplete(line: bytes) -> bool:
    """Whether a line is incomplete: a kill while a line is written leaves its beginning."""
    return line.startswith(b"{"[: len(line)]) and not line.rstrip().endswith(b"}") and line.isascii()


def read_step(path: Path) -> tuple[int | None, str]:
    """Returns the step that a file contains, or None, and the file's problem; empty without a problem."""
    try:
        content = read_regular(path)
    except RunError as error:
        return None, error.given
    if not content:  # the process was killed after it created the file and before it wrote
        return None, ""
    if content.isdigit() and len(content) <= 20 and int(content) < 2**63:  # isdigit of bytes accepts ASCII digits alone
        return int(content), ""
    return None, f"{path} is damaged"
