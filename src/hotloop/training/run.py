"""A run: the folder of one training, independent of the Task's file.

run.json          what was trained, from which source, with which versions; plan.toml: how
source/           the Task's file and the local modules it imports
journal.jsonl     events in order, append-only
metrics.jsonl     a line per epoch; metrics.csv has the same as a table
checkpoints/      the last two; best/ has the best epoch's weights
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import ValidationError

from hotloop import __version__
from hotloop.core.files.atomic_files import append, open_regular, read_regular, translate_write_errors, write_atomic
from hotloop.core.files.run_folder import JournalRows, StoredRun, no_run_error, read_events, read_metrics, read_step
from hotloop.core.hardware.machine import machine_name
from hotloop.core.records.training import EpochRecord, RunRecord
from hotloop.errors import HotloopError, RunError, shorten
from hotloop.plan import Plan
from hotloop.report.notebook import as_data_frame, run_html
from hotloop.training.checkpoint import CheckpointFolder

_UNFINISHED = ".unfinished"

_DIGITS = 20
"""Digits of the number in the file `reached`."""

_STALE_LOCK_S = 2.0
"""Seconds for which a starting worker of a killed training may still have the lock."""

_WRITTEN_AXES = tuple(axis for axis, field in Plan.model_fields.items() if field.default is not None)
"""Axes that a plan file of a run has."""


class Run:
    """The folder of one training; `plan` is the last plan, `plan_reasons` its reasons, `task` the Task if known.

    Args:
        writes: False on ranks other than the first, which write and lock nothing.
    """

    def __init__(self, path: Path, record: RunRecord, plan: Plan, *, writes: bool = True) -> None:
        self.path, self.record, self.plan, self.writes = path, record, plan, writes
        self.checkpoints = CheckpointFolder(path / "checkpoints")
        self.task: Any = None
        self.plan_reasons: list[str] = []
        self._lock = FileLock(path / ".lock")
        self._reached: io.FileIO | None = None
        self._is_changed = False

    @classmethod
    def create(cls, path: Path, record: RunRecord, plan: Plan, files: Mapping[str, bytes]) -> Run:
        """Creates a run in `path`.

        Raises:
            RunError: `path` has a run or other files, is a file, or can't be written.
        """
        cls.check_new(path)
        with translate_write_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            (path / _UNFINISHED).touch()  # after a kill from here on, a new run may take the folder
            shutil.rmtree(path / "source", ignore_errors=True)
        for name, content in files.items():
            write_atomic(path / "source" / name, content)
        write_atomic(path / "plan.toml", plan.to_toml())
        write_atomic(path / "run.json", _with_seal(record, plan))  # this makes the folder a run
        (path / _UNFINISHED).unlink()
        return cls(path, record, plan)

    @staticmethod
    def check_new(path: Path) -> None:
        """Raises RunError if `path` can't become a new run."""
        with translate_write_errors(path):
            path.exists()  # its name may be too long
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
    def open(cls, path: str | Path, *, writes: bool = True) -> Run:
        """Opens the run in `path`.

        Raises:
            RunError: there is no run, or it can't be read.
        """
        path = Path(path)
        with translate_write_errors(path):
            found = is_run(path)
        if not found:
            raise no_run_error(path)
        document = _read_document(path / "run.json")
        try:
            record = RunRecord.model_validate({key: value for key, value in document.items() if key != "seal"})
        except ValidationError as error:
            first = error.errors()[0]
            field = shorten(".".join(map(str, first["loc"])))
            raise _damaged(path / "run.json", f"{field}: {first['msg']}") from error
        plan = Plan.read(path / "plan.toml")
        lacking = [axis for axis in _WRITTEN_AXES if axis not in plan.model_fields_set]
        if lacking:
            more = " and more" * (len(lacking) > 3)
            raise _damaged(path / "plan.toml", f"it doesn't say {', '.join(lacking[:3])}{more}")
        run = cls(path, record, plan, writes=writes)
        text = (read_regular(path / "plan.toml") or b"").decode()
        run._is_changed = document.get("seal") != _seal(document, text)
        return run

    def __repr__(self) -> str:
        figures = {key: round(v, 4) for key, v in (self.final or {}).items() if isinstance(v, float)}
        reason = "" if self.reason in ("", "finished") else f", reason={self.reason!r}"
        return f"Run({str(self.path)!r}, epochs={len(self.epochs)}, final={figures or None}{reason})"

    def _repr_html_(self) -> str:
        return run_html(StoredRun.read(self.path))

    @property
    def history(self) -> Any:
        """The completed epochs as a pandas DataFrame; a list of dicts without pandas."""
        return as_data_frame(self.epochs)

    @property
    def source(self) -> Path:
        return self.path / "source"

    def as_written(self) -> Run:
        """Reads the run from its folder again."""
        return Run.open(self.path) if self.writes else self

    def lock(self) -> None:
        """Locks the run for this process, and removes incomplete files of a killed one.

        Raises:
            RunError: another process trains in the run.
        """
        if not self.writes:
            return
        with translate_write_errors(self.path):
            if not (self._acquire_lock(0) or self._acquire_stale_lock()):
                raise RunError(f"{self.path} is being trained by another process", fix="wait for it, or stop it")
            for leftover in self.path.rglob(".*.part"):
                leftover.unlink(missing_ok=True)

    def _acquire_lock(self, timeout_s: float) -> bool:
        try:
            self._lock.acquire(timeout=timeout_s)
        except Timeout:
            return False
        return True

    def _acquire_stale_lock(self) -> bool:
        """Waits for workers of a killed training; False if a living training ended meanwhile, which changed the run."""
        before = self._journal_bytes()
        if not self._acquire_lock(_STALE_LOCK_S):
            return False
        if self._journal_bytes() != before:
            self._lock.release()
            return False
        return True

    def _journal_bytes(self) -> int | None:
        """Returns the size of the journal; None without a journal."""
        path = self.path / "journal.jsonl"
        return path.stat().st_size if path.exists() else None

    def unlock(self) -> None:
        if self._reached is not None:
            self._reached.close()
            self._reached = None
        if self.writes:
            self._lock.release()

    def discard(self) -> bool:
        """Removes the folder of a run without a step or a checkpoint; otherwise returns False."""
        if not self.writes or self.reached() or self.checkpoints.files():
            return False
        shutil.rmtree(self.path, ignore_errors=True)
        return True

    def keep(self, *, plan: Plan | None = None, record: RunRecord | None = None) -> None:
        """Stores another plan or record."""
        before = self.plan, self.record
        self.plan, self.record = plan or self.plan, record or self.record
        if self.writes and self.plan != before[0]:
            write_atomic(self.path / "plan.toml", self.plan.to_toml())
        if self.writes and (self.plan, self.record) != before:
            write_atomic(self.path / "run.json", _with_seal(self.record, self.plan))

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
        """Records reasons as `note_inexact` does, and reports new reasons."""
        for reason in reasons:
            if self.note_inexact(reason):
                say(reason)

    def log(self, event: str, **fields: Any) -> None:
        """Appends a line to the journal, durably."""
        if self.writes:
            line = _as_line({"event": event, "time": round(time.time(), 3), **fields})
            append(self.path / "journal.jsonl", line.encode())

    def log_start(self, event: str, **fields: Any) -> None:
        self.log(event, **fields, plan=self.plan.brief(), plan_reasons=self.plan_reasons, machine=machine_name())

    def log_failure(self, error: HotloopError) -> None:
        """Appends an error that ends the training; a full disk is no second error."""
        with suppress(HotloopError):
            parts = {"given": error.given, "expected": error.expected, "fix": error.fix}
            self.log("failure", kind=type(error).__name__, message=str(error), **parts)

    def journal(self) -> list[dict[str, Any]]:
        """Returns the journal's events without damaged lines, see `damages`."""
        return self._events().rows

    def _events(self) -> JournalRows:
        return read_events(self.path / "journal.jsonl")

    def damages(self) -> list[str]:
        """Returns a line for each damaged file that says what is used instead."""
        found = read_step(self.path / "reached")[1]
        changed = f"run.json or plan.toml in {self.path} was changed since hotloop wrote it, and is used as it is now"
        return [
            *([changed] if self._is_changed else []),
            *self._events().damage(self.path / "journal.jsonl", "the other lines are used"),
            *read_metrics(self.path / "metrics.jsonl").damage(
                self.path / "metrics.jsonl", "the newest good checkpoint has the epochs, too"
            ),
            *([f"{found}: the last step in the journal is used"] if found else []),
        ]

    def mark(self, step: int) -> None:
        """Records at low cost that steps before `step` may be done; after a kill this tells how many are repeated."""
        if not self.writes:
            return
        path = self.path / "reached"
        with translate_write_errors(path):
            if self._reached is None:
                self._reached = io.FileIO(open_regular(path, os.O_RDWR | os.O_CREAT), "r+")
                if self._reached.seek(0, os.SEEK_END) > _DIGITS:  # it is damaged
                    self._reached.truncate(_DIGITS)
            self._reached.seek(0)
            self._reached.write(b"%0*d" % (_DIGITS, step))  # a fixed length in place: a kill can't tear the number

    def reached(self) -> int:
        """Returns the step of the last `mark`; if the mark is damaged, the last step in the journal, or 0."""
        step, damage = read_step(self.path / "reached")
        if damage:
            return max((event["step"] for event in self.journal() if "step" in event), default=0)
        return step or 0

    def last_saved(self) -> int | None:
        """Returns the step of the last checkpoint in the journal; None without a checkpoint."""
        return next((event["step"] for event in reversed(self.journal()) if event["event"] == "checkpoint"), None)

    def write_metrics(self, history: list[EpochRecord]) -> None:
        """Rewrites both tables."""
        if not self.writes:
            return
        rows = [record.flat() for record in history]
        write_atomic(self.path / "metrics.jsonl", "".join(map(_as_line, rows)))
        write_atomic(self.path / "metrics.csv", _as_csv(rows, header=True))

    def add_metrics(self, record: EpochRecord) -> None:
        """Appends one epoch to both tables."""
        if not self.writes:
            return
        row = record.flat()
        table = self.path / "metrics.csv"
        first = not table.exists() or table.stat().st_size == 0
        for name, text in (("metrics.jsonl", _as_line(row)), ("metrics.csv", _as_csv([row], header=first))):
            path = self.path / name
            with (
                translate_write_errors(path),
                open(open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file,
            ):
                file.write(text.encode())

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """The completed epochs, as `train --json` prints them."""
        return read_metrics(self.path / "metrics.jsonl").rows

    @property
    def reason(self) -> str:
        """Why training stopped last, such as `finished` or `SIGINT`; empty during training or after a kill."""
        last: dict[str, Any] = next(
            (e for e in reversed(self.journal()) if e["event"] in ("start", "resume", "stop")), {}
        )
        return str(last.get("reason", ""))

    @property
    def final(self) -> dict[str, Any] | None:
        """Metrics of the test data after the run has finished; None before."""
        for event in reversed(self.journal()):
            if event["event"] in ("start", "resume"):
                return None
            if event["event"] == "final":
                return {key: value for key, value in event.items() if key not in ("event", "time")}
        return None


def is_run(path: Path) -> bool:
    return (path / "run.json").is_file()


def _read_document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(read_regular(path) or b"")
        if isinstance(document, dict):
            return document
    except (ValueError, RecursionError):
        pass
    raise _damaged(path, "it is no JSON object")


def _damaged(path: Path, why: str) -> RunError:
    return RunError(
        f"{path} is damaged, or another version of hotloop wrote it: {why}",
        expected=f"what hotloop {__version__} writes",
        fix="restore it from a copy, or start a new run",
    )


def _seal(document: Mapping[str, Any], plan: str) -> str:
    """Returns a checksum of run.json and plan.toml."""
    own = {key: value for key, value in document.items() if key != "seal"}
    return hashlib.sha256((json.dumps(own, sort_keys=True) + plan).encode()).hexdigest()


def _with_seal(record: RunRecord, plan: Plan) -> str:
    document = record.model_dump(mode="json")
    return json.dumps({**document, "seal": _seal(document, plan.to_toml())}, indent=2)


def _as_line(row: Mapping[str, Any]) -> str:
    """Returns a line of JSON; NaN and infinity become null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def _as_csv(rows: list[dict[str, Any]], *, header: bool) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    if header and rows:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
