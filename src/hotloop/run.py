"""A run: a folder that holds all there is to know of one training, and outlives the Task's file.

run.json          what was trained, from which source, with which versions
plan.toml         how
source/           the Task's file and the local modules it imports
journal.jsonl     what happened, in order; lines are only ever added
metrics.jsonl     a line per epoch; metrics.csv is the same as a table
checkpoints/      the last good ones; best/ holds the best epoch's weights
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import ValidationError

from hotloop.checkpoint import Checkpoints
from hotloop.errors import RunError
from hotloop.files import explained, write_atomic
from hotloop.plan import Plan
from hotloop.records import EpochRecord, RunRecord

_UNFINISHED = ".unfinished"

_LETS_GO_S = 2.0
"""A worker that was being started when its training was killed holds the run until it comes to run itself."""


class Run:
    """The folder of one training.

    Attributes:
        path: the folder.
        record: what it says of itself.
        plan: how it was last run.
        checkpoints: its checkpoints.
        task: the Task, where this process has it.
    """

    def __init__(self, path: Path, record: RunRecord, plan: Plan) -> None:
        self.path, self.record, self.plan = path, record, plan
        self.checkpoints = Checkpoints(path / "checkpoints")
        self.task: Any = None
        self._lock = FileLock(path / ".lock")
        self._reached: io.FileIO | None = None

    @classmethod
    def create(cls, path: Path, record: RunRecord, plan: Plan, files: Mapping[str, bytes]) -> Run:
        """A new run in `path`, which must be empty or not yet there.

        Raises:
            RunError: `path` holds a run already, is a file, or can't be written.
        """
        cls.check_new(path)
        with explained(path):
            path.mkdir(parents=True, exist_ok=True)
            (path / _UNFINISHED).touch()  # a kill from here on leaves no run, and nothing in the way of a new one
            shutil.rmtree(path / "source", ignore_errors=True)
        for name, content in files.items():
            write_atomic(path / "source" / name, content)
        write_atomic(path / "plan.toml", plan.to_toml())
        write_atomic(path / "run.json", record.model_dump_json(indent=2))  # this makes the folder a run
        (path / _UNFINISHED).unlink()
        return cls(path, record, plan)

    @staticmethod
    def check_new(path: Path) -> None:
        """Raises RunError if `path` can't become a new run."""
        if is_run(path):
            raise RunError(
                f"{path} holds a run already",
                expected="a new folder",
                fix=f"go on with it by --resume {path}, or choose another with --run",
            )
        if (path / _UNFINISHED).is_file():
            return
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunError(f"{path} exists and is not a run", expected="a new folder", fix="choose another with --run")

    @classmethod
    def open(cls, path: Path) -> Run:
        """The run in `path`.

        Raises:
            RunError: there is none, or it can't be read.
        """
        if not is_run(path):
            what = "is not a run" if path.exists() else "doesn't exist"
            raise RunError(f"{path} {what}", expected="a folder that `hotloop train` made", fix="check the path")
        try:
            record = RunRecord.model_validate_json((path / "run.json").read_text(encoding="utf-8"))
        except (ValidationError, UnicodeDecodeError) as error:
            raise RunError(
                f"{path / 'run.json'} can't be read", expected="what hotloop wrote", fix="restore it"
            ) from error
        return cls(path, record, Plan.read(path / "plan.toml"))

    def __repr__(self) -> str:
        figures = {key: round(v, 4) for key, v in (self.final or {}).items() if isinstance(v, float)}
        return f"Run({str(self.path)!r}, epochs={len(self.epochs)}, final={figures or None})"

    @property
    def source(self) -> Path:
        return self.path / "source"

    def as_written(self) -> Run:
        """The run as its folder has it now."""
        return Run.open(self.path)

    def lock(self) -> None:
        """Claims the run for this process until it ends or `unlock`s, and removes what a killed one left half-written.

        Raises:
            RunError: another process is training in it.
        """
        with explained(self.path):
            if not (self._takes(0) or self._takes_from_the_dead()):
                raise RunError(f"{self.path} is being trained by another process", fix="wait for it, or stop it")
            for leftover in self.path.rglob(".*.part"):
                leftover.unlink(missing_ok=True)

    def _takes(self, timeout_s: float) -> bool:
        try:
            self._lock.acquire(timeout=timeout_s)
        except Timeout:
            return False
        return True

    def _takes_from_the_dead(self) -> bool:
        """Waits for what a killed training's workers hold; where a living one ends meanwhile, the run isn't as it was read."""
        before = self._journalled()
        if not self._takes(_LETS_GO_S):
            return False
        if self._journalled() != before:
            self._lock.release()
            return False
        return True

    def _journalled(self) -> int | None:
        """Bytes in the journal; None where there is none."""
        path = self.path / "journal.jsonl"
        return path.stat().st_size if path.exists() else None

    def unlock(self) -> None:
        if self._reached is not None:
            self._reached.close()
            self._reached = None
        self._lock.release()

    def discard(self) -> bool:
        """Removes the folder of a run that has come to nothing: no step done, and so no checkpoint; False if it has."""
        if self.reached() or self.checkpoints.files():
            return False
        shutil.rmtree(self.path, ignore_errors=True)
        return True

    def keep(self, *, plan: Plan | None = None, record: RunRecord | None = None) -> None:
        """Notes that the run goes on under another plan, or with other overrides."""
        if plan is not None and plan != self.plan:
            self.plan = plan
            write_atomic(self.path / "plan.toml", plan.to_toml())
        if record is not None and record != self.record:
            self.record = record
            write_atomic(self.path / "run.json", record.model_dump_json(indent=2))

    def note_inexact(self, reason: str) -> bool:
        """Records why a resumed run may differ from an uninterrupted run; False if the reason was recorded before."""
        facts = self.record.facts
        if reason in facts.inexact:
            return False
        facts = facts.model_copy(update={"exact": False, "inexact": [*facts.inexact, reason]})
        self.keep(record=self.record.model_copy(update={"facts": facts}))
        self.log("inexact", reason=reason)
        return True

    def note_all_inexact(self, reasons: Iterable[str], say: Callable[[str], None]) -> None:
        """Records reasons as `note_inexact` does, and says those that are new."""
        for reason in reasons:
            if self.note_inexact(reason):
                say(reason)

    def log(self, event: str, **fields: Any) -> None:
        """Adds a line to the journal, durably."""
        line = _as_line({"event": event, "time": round(time.time(), 3), **fields})
        path = self.path / "journal.jsonl"
        with explained(path), path.open("ab") as file:
            if file.tell() and not _ends_line(path):
                file.write(b"\n")  # a kill tore the line before; it stays apart
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())

    def journal(self) -> list[dict[str, Any]]:
        """The journal's events; a line torn by a kill is passed over."""
        path = self.path / "journal.jsonl"
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        return [event for line in lines if (event := _parsed(line)) is not None]

    def mark(self, step: int) -> None:
        """Notes, cheaply, that steps before `step` may be done; tells after a kill how many are repeated."""
        path = self.path / "reached"
        with explained(path):
            if self._reached is None:
                self._reached = io.FileIO(path, "r+" if path.exists() else "w")
            self._reached.seek(0)
            self._reached.write(b"%020d" % step)  # as long as ever, in one piece, in place: a kill can't tear it

    def reached(self) -> int:
        """The step noted last; 0 if there is none."""
        path = self.path / "reached"
        text = path.read_text() if path.exists() else ""
        return int(text) if text.isdigit() else 0

    def write_metrics(self, history: list[EpochRecord]) -> None:
        """Writes both tables anew."""
        rows = [record.flat() for record in history]
        write_atomic(self.path / "metrics.jsonl", "".join(map(_as_line, rows)))
        write_atomic(self.path / "metrics.csv", _as_csv(rows, header=True))

    def add_metrics(self, record: EpochRecord) -> None:
        """Adds one epoch to both tables."""
        row = record.flat()
        table = self.path / "metrics.csv"
        first = not table.exists() or table.stat().st_size == 0
        for name, text in (("metrics.jsonl", _as_line(row)), ("metrics.csv", _as_csv([row], header=first))):
            with explained(self.path / name), (self.path / name).open("a", encoding="utf-8", newline="") as file:
                file.write(text)

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """The epochs done, as `train --json` prints them."""
        path = self.path / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [row for line in lines if (row := _parsed(line)) is not None]

    @property
    def final(self) -> dict[str, Any] | None:
        """The figures on the test data, once the run has finished; None before."""
        for event in reversed(self.journal()):
            if event["event"] in ("start", "resume"):
                return None
            if event["event"] == "final":
                return {key: value for key, value in event.items() if key not in ("event", "time")}
        return None


class Following(Run):
    """A run as ranks other than the first have it: they train along, and write nothing."""

    def as_written(self) -> Run:
        return self

    def lock(self) -> None:
        pass

    def unlock(self) -> None:
        pass

    def discard(self) -> bool:
        return False

    def keep(self, *, plan: Plan | None = None, record: RunRecord | None = None) -> None:
        self.plan, self.record = plan or self.plan, record or self.record

    def log(self, event: str, **fields: Any) -> None:
        pass

    def mark(self, step: int) -> None:
        pass

    def write_metrics(self, history: list[EpochRecord]) -> None:
        pass

    def add_metrics(self, record: EpochRecord) -> None:
        pass


def is_run(path: Path) -> bool:
    return (path / "run.json").is_file()


def _ends_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _as_line(row: Mapping[str, Any]) -> str:
    """A line of JSON, which has no NaN and no infinity: such figures become null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def _as_csv(rows: list[dict[str, Any]], *, header: bool) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    if header and rows:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
