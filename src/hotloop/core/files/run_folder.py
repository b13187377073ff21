"""Reads a run's folder: its files of lines with their schemas, the plans by step, and all of it for reports.

journal.jsonl   events
metrics.jsonl   one row per epoch
reached         a step number

Nothing here imports torch or executes the run's source. A damaged line or file is reported and left out; the others count.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hotloop.core.files.atomic_files import read_regular
from hotloop.core.format import is_number
from hotloop.core.records.model_summary import ModelLayers
from hotloop.core.records.training import Evaluation, RunRecord
from hotloop.errors import HotloopError, PlanError, RunError
from hotloop.plan import Plan

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
            is_cut = line.startswith(b"{"[: len(line)]) and not line.rstrip().endswith(b"}") and line.isascii()
            if not is_cut:  # a kill during the write may leave such a line
                bad.append(number)
    return JournalRows(rows, bad)


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


SWITCH_EVENT = "plan_switch"
"""The journal's event of a switch. A resumed run that takes another plan replaces the later switches."""


@dataclass(frozen=True)
class PlanSwitch:
    """A plan, from a step on.

    Attributes:
        step: steps that were done before.
        number: of the switches of its run, from 0.
        is_window: whether the plan takes the steps of a short window beside the plan in use.
        is_searching: whether the run may switch to plans that its journal doesn't have.
    """

    step: int
    plan: Plan
    reason: str
    number: int = 0
    is_window: bool = False
    is_searching: bool = False

    def fields(self) -> dict[str, Any]:
        """Returns the fields of the journal's line."""
        return {
            "step": self.step,
            "number": self.number,
            "plan": self.plan.model_dump(mode="json"),
            "reason": self.reason,
            "window": self.is_window,
            "searching": self.is_searching,
        }

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> PlanSwitch:
        return cls(
            step=int(event["step"]),
            plan=Plan(**event["plan"]),
            reason=str(event["reason"]),
            number=int(event["number"]),
            is_window=bool(event["window"]),
            is_searching=bool(event["searching"]),
        )


@dataclass
class PlanHistory:
    """The switches of one run in order of their steps; the first is of step 0. Empty for a run with one plan."""

    switches: list[PlanSwitch] = field(default_factory=list)
    written: int = 0

    @classmethod
    def from_journal(cls, events: Iterable[Mapping[str, Any]]) -> PlanHistory:
        """Reads the switches.

        Raises:
            RunError: a switch is missing or damaged.
        """
        found = cls()
        for event in events:
            if event.get("event") != SWITCH_EVENT:
                continue
            try:
                switch = PlanSwitch.from_event(event)
            except (KeyError, TypeError, ValueError, ValidationError, PlanError) as error:
                raise _damaged(f"plan switch {found.written} is damaged") from error
            if switch.number != found.written or (found.written == 0 and switch.step):
                raise _damaged(f"plan switch {found.written} is missing")
            found.add(switch)
        return found

    def __bool__(self) -> bool:
        return bool(self.switches)

    def next_switch(self, step: int, plan: Plan, reason: str, **fields: bool) -> PlanSwitch:
        """Returns the switch to write next; `add` it after it is in the journal."""
        return PlanSwitch(step, plan, reason, number=self.written, **fields)

    def add(self, switch: PlanSwitch) -> None:
        """Adds a switch, which replaces those of its own and of later steps."""
        self.switches = [*(one for one in self.switches if one.step < switch.step), switch]
        self.written = switch.number + 1

    def at(self, step: int) -> PlanSwitch:
        """Returns the switch whose plan takes the step after `step` steps."""
        return next(one for one in reversed(self.switches) if one.step <= step or one is self.switches[0])

    def next_step(self, step: int) -> int | None:
        """Returns the step of the first switch after `step`; None without one."""
        return next((one.step for one in self.switches if one.step > step), None)

    @property
    def last(self) -> PlanSwitch:
        return self.switches[-1]

    @property
    def plan_in_use(self) -> Plan:
        """The last plan that isn't of a window."""
        return next(one.plan for one in reversed(self.switches) if not one.is_window)

    def without_search(self) -> list[PlanSwitch]:
        """Returns the switches for the journal of a run that repeats this one."""
        return [replace(one, number=number, is_searching=False) for number, one in enumerate(self.switches)]


def _damaged(given: str) -> RunError:
    return RunError(
        f"the run's journal.jsonl is damaged: {given}",
        expected="each switch of the plan, as hotloop wrote it",
        fix="restore the file from a copy",
    )


R = TypeVar("R", bound=BaseModel)

INTERRUPTIONS = ("stop-after", "SIGHUP", "SIGTERM", "SIGINT", "paused")
"""Reasons of a stop before the end of training; a study pauses trials, and pruned trials stay paused."""

_ALIVE_S = 60.0
"""Seconds after its last figures for which a training on another machine counts as going on."""

_MAX_SOURCE_BYTES = 200_000
"""Larger source files are left out of reports."""

_MAX_SOURCE_FILES = 40


class RowOfFigures(BaseModel):
    """A line of progress.jsonl or system.jsonl."""

    model_config = {"extra": "allow", "frozen": True}
    __pydantic_extra__: dict[str, float | None]

    time: float


@dataclass(frozen=True)
class StoredRun:
    """What a run's folder says.

    Attributes:
        record, plan, layers, evaluation: None where the file is missing or damaged.
        events: of the journal.
        epochs: rows of metrics.jsonl, with `train_accuracy` of a sample from progress.jsonl; a repeated epoch counts as
            its last row.
        progress: rows of progress.jsonl without those that a resumed training repeated.
        system: rows of system.jsonl.
        status: the last state of the training process; empty without one.
        damages: a line for each damaged file.
    """

    path: Path
    record: RunRecord | None
    plan: Plan | None
    layers: ModelLayers | None
    evaluation: Evaluation | None
    events: list[dict[str, Any]]
    epochs: list[dict[str, Any]]
    progress: list[dict[str, Any]]
    system: list[dict[str, Any]]
    status: dict[str, Any]
    damages: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, *, has_curves: bool = True) -> StoredRun:
        """Reads the run in `path`.

        Args:
            has_curves: read also the files that only curves and details need.

        Raises:
            RunError: there is no run.
        """
        if not is_run_folder(path):
            raise no_run_error(path)
        damages: list[str] = []
        files = [path / name for name in ("metrics.jsonl", "progress.jsonl", "system.jsonl")]
        epochs = _latest(_lines(files[0], read_metrics, damages), "epoch")
        progress, system = [_lines(file, _read_figures, damages) if has_curves else [] for file in files[1:]]
        progress = without_repeated_steps(progress)
        return cls(
            path,
            _read_model(path / "run.json", RunRecord, damages, ignored="seal"),
            _read(lambda: Plan.read(path / "plan.toml"), path / "plan.toml", damages),
            _read_model(path / "layers.json", ModelLayers, damages) if has_curves else None,
            _read_model(path / "evaluation" / "evaluation.json", Evaluation, damages) if has_curves else None,
            _lines(path / "journal.jsonl", read_events, damages),
            _with_sampled_accuracy(epochs, progress),
            progress,
            system,
            read_status(path),
            damages,
        )

    @property
    def name(self) -> str:
        return self.record.name if self.record else self.path.name

    @cached_property
    def last(self) -> dict[str, Any]:
        """The last event of the journal that says whether the training goes on; empty without one."""
        kinds = ("start", "resume", "stop", "failure")
        return next((event for event in reversed(self.events) if event["event"] in kinds), {})

    @property
    def first(self) -> dict[str, Any]:
        return next((event for event in self.events if event["event"] in ("start", "resume")), {})

    @cached_property
    def state(self) -> str:
        """`training`, `finished`, `stopped` (can be resumed), `failed`, `killed`, or `new` before the first step."""
        kind = self.last.get("event")
        if kind == "stop":
            return "stopped" if self.last.get("reason") in INTERRUPTIONS else "finished"
        if kind == "failure":
            return "failed"
        if is_alive(self.status):
            return "training"
        return "killed" if kind else "new"

    def last_value(self, field: str) -> Any:
        """Returns a field of the last event that has it; None without one."""
        return next((event[field] for event in reversed(self.events) if event.get(field)), None)

    @property
    def reason(self) -> str:
        """Why the training ended; empty while it goes on."""
        return str(self.last.get("reason") or self.last.get("message") or "")

    @property
    def final(self) -> dict[str, Any] | None:
        """Figures of the test data after the run has finished; None before."""
        for event in reversed(self.events):
            if event["event"] in ("start", "resume"):
                return None
            if event["event"] == "final":
                return event
        return None

    @property
    def monitor(self) -> tuple[str, bool]:
        """The figure that selects the best epoch, and whether a smaller value is better."""
        started = next((event for event in reversed(self.events) if "monitor" in event), None)
        if started is not None:
            return str(started["monitor"]), started.get("goal") != "max"
        validated = any(row.get("validation_loss") is not None for row in self.epochs)
        return ("validation_loss" if validated else "train_loss"), True

    @property
    def best_epoch(self) -> dict[str, Any] | None:
        """The first epoch with the best monitored figure; None without one."""
        figure, is_minimized = self.monitor
        rows = [row for row in self.epochs if row.get(figure) is not None]
        sign = 1 if is_minimized else -1
        return min(rows, key=lambda row: sign * row[figure], default=None)

    @property
    def planned_epochs(self) -> int | None:
        """Epochs of the Task, as the training last said or as the command asked; None if unknown."""
        value = self.status.get("epochs") or (self.record.overrides.get("epochs") if self.record else None)
        if value is None and self.record and self.record.facts.steps and self.record.facts.batches:
            value = self.record.facts.steps // self.record.facts.batches
        return value if isinstance(value, int) else None

    @property
    def step(self) -> int:
        rows = [*self.events, *self.epochs, *self.progress[-1:], self.status]
        return int(max((row["step"] for row in rows if isinstance(row.get("step"), int | float)), default=0))

    @property
    def has_sampled_accuracy(self) -> bool:
        """Whether the training accuracy is of a sample of the training data."""
        return any(row.get("train_accuracy") is not None for row in self.progress)

    @cached_property
    def sessions(self) -> list[tuple[float, float]]:
        """Start and end of each training process by the clock, in seconds since 1970."""
        found: list[tuple[float, float]] = []
        times = [row["time"] for rows in (self.progress, self.system) for row in rows]
        times += [float(self.status["time"])] if isinstance(self.status.get("time"), int | float) else []
        for number, event in enumerate(self.events):
            if event["event"] not in ("start", "resume"):
                continue
            later = self.events[number + 1 :]
            until = next((e["time"] for e in later if e["event"] in ("start", "resume")), float("inf"))
            inside = [e["time"] for e in later if e["time"] < until] + [t for t in times if event["time"] <= t < until]
            if until == float("inf") and self.state == "training":
                inside.append(time.time())
            found.append((event["time"], max(inside, default=event["time"])))
        return found

    @property
    def seconds(self) -> float:
        """Time of all training processes, without the time between them."""
        return sum(end - start for start, end in self.sessions)

    @property
    def sources(self) -> dict[str, str]:
        """Text of the source files; a note in place of a large or binary file."""
        folder = self.path / "source"
        files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        return {
            path.relative_to(folder).as_posix(): _source_text(path)
            for path in files[:_MAX_SOURCE_FILES]
            if "__pycache__" not in path.parts
        }


def no_run_error(path: Path) -> RunError:
    """Returns the error about a folder without a run."""
    if os.path.isfile(path / "study.json"):
        given, fix = (
            f"{path} is a study",
            f"open {path / 'study.html'}, or name the run of a trial, such as {path / 'best'}",
        )
        return RunError(given, expected="a folder that `hotloop train` made", fix=fix)
    what = "is not a run" if os.path.exists(path) else "doesn't exist"  # False for a name that is too long
    return RunError(f"{path} {what}", expected="a folder that `hotloop train` made", fix="check the path")


def is_run_folder(path: Path) -> bool:
    try:
        return (path / "run.json").is_file()
    except OSError:  # a name that is too long
        return False


def find_runs(folder: Path) -> Iterator[Path]:
    """Yields the runs in a folder and below, in the order of their names; `folder` itself may be one."""
    if is_run_folder(folder):
        yield folder
        return
    for root, folders, files in os.walk(folder):
        if "run.json" in files:
            folders.clear()
            yield Path(root)
        else:
            folders[:] = sorted(name for name in folders if not name.startswith("."))


def is_alive(status: dict[str, Any]) -> bool:
    """Returns whether the process that wrote a status still runs; on another machine, whether it wrote lately."""
    if not status:
        return False
    if status.get("host") != socket.gethostname():
        written = status.get("time")
        return isinstance(written, int | float) and time.time() - written < _ALIVE_S
    try:
        process = psutil.Process(int(status["pid"]))
        is_same = abs(process.create_time() - float(status["process_created"])) < 1
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, KeyError, TypeError, ValueError, OverflowError):
        return False


def without_repeated_steps(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns rows by increasing step: what a killed training did after its checkpoint is replaced by its repetition."""
    kept: list[dict[str, Any]] = []
    for row in reversed(rows):
        if row.get("step") is not None and (not kept or row["step"] < kept[-1]["step"]):
            kept.append(row)
    return kept[::-1]


def read_status(path: Path) -> dict[str, Any]:
    """Returns the last state that the training process wrote; empty without one."""
    try:
        found = json.loads(read_regular(path / "status.json") or b"{}")
    except (ValueError, RecursionError, HotloopError):
        return {}
    return _with_finite_values(found) if isinstance(found, dict) else {}


def _read_figures(path: Path) -> JournalRows:
    return read_rows(path, lambda row: RowOfFigures)


def _lines(path: Path, read: Callable[[Path], JournalRows], damages: list[str]) -> list[dict[str, Any]]:
    found = read(path)
    damages += found.damage(path, "the other lines are shown")
    return [_coerced(row) for row in found.rows]


def _coerced(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a valid row with finite numbers or None where texts of numbers were accepted, and events with a time."""
    numbers = {key: float(v) for key, v in row.items() if isinstance(v, str) and key != "event" and is_number(v)}
    found = _with_finite_values(row | numbers)
    has_time = found.get("time") is not None or not {"event", "time"} & found.keys()
    return found if has_time else found | {"time": 0.0}


def _with_finite_values(row: dict[str, Any]) -> dict[str, Any]:
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}


def _latest(rows: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    return [row for _, row in sorted({row[key]: row for row in rows}.items())]


def _with_sampled_accuracy(epochs: list[dict[str, Any]], progress: list[dict[str, Any]]) -> list[dict[str, Any]]:
    measured = {row.get("epoch"): row["train_accuracy"] for row in progress if row.get("train_accuracy") is not None}
    first = ("epoch", "step", "train_loss")
    return [
        {key: row[key] for key in first if key in row} | {"train_accuracy": measured[row["epoch"]]} | row
        if row["epoch"] in measured
        else row
        for row in epochs
    ]


def _read(read: Callable[[], Any], path: Path, damages: list[str]) -> Any:
    try:
        return read()
    except (HotloopError, OSError, ValueError, RecursionError):
        damages.append(f"{path} is damaged and left out")
        return None


def _read_model(path: Path, model: type[R], damages: list[str], ignored: str = "") -> R | None:
    def read() -> R | None:
        content = read_regular(path)
        if content is None:
            return None
        document = json.loads(content)
        return model.model_validate({name: value for name, value in document.items() if name != ignored})

    try:
        found: R | None = read()
    except (HotloopError, ValidationError, ValueError, AttributeError, RecursionError):
        damages.append(f"{path} is damaged and left out")
        return None
    return found


def _source_text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        return f"({error.strerror})"
    if len(content) > _MAX_SOURCE_BYTES:
        return f"({len(content):,} bytes, left out)"
    return content.decode(errors="replace")
