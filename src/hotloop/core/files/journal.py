"""The line-based files of a run folder and their schemas. Damaged lines are skipped and reported.

journal.jsonl   events
metrics.jsonl   one row per epoch
reached         a step number
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


class PlanSwitchEvent(StepEvent):
    """Another plan from a step on."""

    number: Count
    plan: dict[str, Any]
    reason: str
    window: bool
    searching: bool


class FinalEvent(JournalEvent):
    """The figures of the selected weights after training."""

    reason: str
    weights: Literal["best", "last"]
    epoch: Count


class MetricsRow(BaseModel):
    """An epoch's number, its last step, and figures by name."""

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, float | None]

    epoch: Annotated[int, Field(strict=True, ge=1, lt=2**63)]
    step: Count


EVENT_TYPES: dict[str, type[BaseModel]] = dict.fromkeys(("start", "resume", "stop", "checkpoint"), StepEvent) | {
    "final": FinalEvent,
    "plan_switch": PlanSwitchEvent,
}


@dataclass(frozen=True)
class JournalRows:
    """The lines of a file.

    Attributes:
        rows: the valid lines.
        bad_lines: numbers of damaged lines, from 1.
        problem: why the path can't be read, such as a folder in place of a file; empty otherwise.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    bad_lines: list[int] = field(default_factory=list)
    problem: str = ""

    def damage(self, path: Path, instead: str) -> list[str]:
        """Returns a line for the user about damage; `instead` names the replacement."""
        if self.problem:
            return [f"{self.problem}: {instead}"]
        if not self.bad_lines:
            return []
        first, count = self.bad_lines[0], len(self.bad_lines)
        return [
            f"{path} is damaged in {f'line {first}' if count == 1 else f'{count} lines from line {first} on'}: {instead}"
        ]


def read_events(path: Path) -> JournalRows:
    """Returns the journal's events; an incomplete line, which a kill leaves, doesn't count as damage."""
    return read_rows(path, lambda row: EVENT_TYPES.get(str(row.get("event")), JournalEvent))


def read_metrics(path: Path) -> JournalRows:
    return read_rows(path, lambda row: MetricsRow)


def read_rows(path: Path, schema: Any) -> JournalRows:
    try:
        content = read_regular(path)
    except RunError as error:
        return JournalRows(problem=error.given)
    rows, bad = [], []
    for number, line in enumerate((content or b"").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError
            schema(row).model_validate(row)
            rows.append(row)
        except (ValueError, RecursionError):  # ValidationError is a ValueError
            if not _is_incomplete(line):
                bad.append(number)
    return JournalRows(rows, bad)


def _is_incomplete(line: bytes) -> bool:
    """Returns whether a kill during the write may have left the line."""
    return line.startswith(b"{"[: len(line)]) and not line.rstrip().endswith(b"}") and line.isascii()


def read_step(path: Path) -> tuple[int | None, str]:
    """Returns the step number in a file or None, and the file's problem; empty without one."""
    try:
        content = read_regular(path)
    except RunError as error:
        return None, error.given
    if not content:  # a kill between creation and write
        return None, ""
    if content.isdigit() and len(content) <= 20 and int(content) < 2**63:  # ASCII digits alone
        return int(content), ""
    return None, f"{path} is damaged"
