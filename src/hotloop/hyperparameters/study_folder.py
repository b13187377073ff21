"""The folder of a study.

study.json     the settings, stored before the first trial
study.db       Optuna's storage, which its dashboard opens
source/        the Task's source files
records/       the state of each run of a trial
trials/        run folders
best           a link to the winner's run folder
study.html     the page
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import optuna
from filelock import FileLock, Timeout
from pydantic import ValidationError
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError, OperationalError

from hotloop.core.files.atomic_files import read_regular, translate_write_errors, write_atomic
from hotloop.core.files.run_folder import read_step
from hotloop.core.files.source_files import files_of, source_digest
from hotloop.core.records.study import StudyRecord, TrialProgress
from hotloop.errors import DiskError, StudyError
from hotloop.hyperparameters.samplers import STUDY_NAME, direction

_FILE = "study.json"

_LOCK_S = 5.0
"""Seconds to wait for a folder: the last processes of a killed study end within seconds."""


class StudyFolder:
    """A study's files; one process at a time works in the folder."""

    def __init__(self, path: Path, record: StudyRecord) -> None:
        self.path, self.record = path, record
        self._lock = _lock_of(path)
        self._optuna: optuna.Study | None = None

    @classmethod
    def create(cls, path: Path, record: StudyRecord, files: Mapping[str, bytes]) -> StudyFolder:
        """Creates a study; a kill before the end leaves a folder that a new study may take."""
        for name, content in files.items():
            write_atomic(path / "source" / name, content)
        write_atomic(path / _FILE, record.model_dump_json(indent=2))
        return cls(path, record)

    @staticmethod
    def check_new(path: Path) -> None:
        """Raises StudyError if `path` can't become a new study."""
        with translate_write_errors(path, "--study"):
            if (path / _FILE).is_file():
                raise StudyError(
                    f"{path} holds a study already",
                    expected="a new folder",
                    fix=f"go on by `hotloop study --resume {path}`, or choose another with --study",
                )
            others = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
            if others - {"source", "logs", ".lock", "plan.toml"} or (path.exists() and not path.is_dir()):
                raise StudyError(f"{path} exists and is no study", expected="a new folder", fix="choose another")

    @classmethod
    def open(cls, path: Path) -> StudyFolder:
        """Opens a study.

        Raises:
            StudyError: there is no study, or its settings can't be read.
        """
        with translate_write_errors(path):
            content = read_regular(path / _FILE) if (path / _FILE).is_file() else None
        if content is None:
            raise StudyError(f"{path} is no study", expected="a folder of `hotloop study`", fix="check the path")
        try:
            return cls(path, StudyRecord.model_validate_json(content))
        except ValidationError as error:
            raise StudyError(f"{path / _FILE} is damaged", fix="restore it from a copy") from error

    def check_source(self) -> None:
        """Raises StudyError if the folder lacks the source of the study's start, with which all trials train."""
        source = self.record.source
        if source is not None and source_digest(files_of(self.path / "source")) != source.digest:
            raise StudyError(
                f"the Task's source in {self.path / 'source'} was changed since the study was started",
                expected=f"the files with digest {source.digest[:12]}",
                fix="put them back, or start a new study",
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the folder for this process.

        Raises:
            DiskError, StudyError: another process works in the folder, or Optuna's storage can't be used.
        """
        with translate_storage_errors(self.path):
            _acquire(self._lock, self.path)
            try:
                yield
            finally:
                if self._optuna is not None:
                    engine = _engine(self._optuna)
                    _set_journal(engine, "delete")  # one file, which can be read on a read-only disk
                    engine.dispose()
                    self._optuna = None
                self._lock.release()

    @property
    def optuna(self) -> optuna.Study:
        """Optuna's study in SQLite."""
        if self._optuna is None:
            self._optuna = optuna.create_study(
                study_name=STUDY_NAME,
                storage=f"sqlite:///{self.path / 'study.db'}",
                direction=direction(self.record),
                sampler=optuna.samplers.RandomSampler(seed=0),
                load_if_exists=True,
            )
            if _set_journal(engine := _engine(self._optuna), "wal"):
                event.listen(engine, "connect", _reduce_syncs)
                engine.dispose()
        return self._optuna

    def run_path(self, number: int, repeat: int = 0) -> Path:
        return self.path / "trials" / f"{number:04d}{f'-{repeat + 1}' if self.record.repeats > 1 else ''}"

    def progress(self, number: int, repeat: int = 0) -> TrialProgress:
        """Returns the stored state of a run of a trial, or a state without epochs."""
        path = self._progress_path(number, repeat)
        content = read_regular(path) if path.is_file() else None
        if content is None:
            return TrialProgress(number=number, repeat=repeat)
        try:
            return TrialProgress.model_validate_json(content)
        except ValidationError:  # the run's own files have the state
            return TrialProgress(number=number, repeat=repeat)

    def store_progress(self, progress: TrialProgress) -> None:
        before = self.progress(progress.number, progress.repeat)
        inexact = list(dict.fromkeys([*before.inexact, *progress.inexact]))
        seconds = before.seconds + progress.seconds
        total = progress.model_copy(update={"seconds": seconds, "inexact": inexact})
        write_atomic(self._progress_path(progress.number, progress.repeat), total.model_dump_json())

    def _progress_path(self, number: int, repeat: int) -> Path:
        return self.path / "records" / f"{number:04d}-{repeat + 1}.json"

    def reached(self, number: int, repeat: int) -> int:
        """Returns the last step of a run of a trial that may be done."""
        return read_step(self.run_path(number, repeat) / "reached")[0] or 0

    def link_best(self, run: Path) -> None:
        """Makes `best` a link to the winner's run folder."""
        link, new = self.path / "best", self.path / ".best.part"
        new.unlink(missing_ok=True)
        new.symlink_to(os.path.relpath(run, self.path))
        new.replace(link)


@contextmanager
def translate_storage_errors(path: Path) -> Iterator[None]:
    """Translates errors of SQLite, in the study's folder `path`, into DiskError or StudyError."""
    try:
        yield
    except (DBAPIError, optuna.exceptions.StorageInternalError) as error:
        failure = error if isinstance(error, DBAPIError) else error.__cause__
        if not isinstance(failure, DBAPIError):
            raise
        if isinstance(failure, OperationalError):
            raise DiskError(
                f"{path / 'study.db'} can't be used: {failure.orig}",
                expected="a file that can be written, on a disk with free space",
                fix=f"correct this, and go on with: hotloop study --resume {path}",
            ) from error
        raise StudyError(
            f"{path / 'study.db'} is damaged: {failure.orig}",
            expected="a database of SQLite",
            fix="restore the file from a copy, or remove the file: --resume makes it again from the trials, with --trials",
        ) from error


def _engine(study: optuna.Study) -> Any:
    return study._storage._backend.engine  # type: ignore[attr-defined]  # Optuna 5 has no public access to the engine


def _set_journal(engine: Any, mode: str) -> bool:
    """Sets SQLite's journal, and returns whether the file has it.

    With `wal` and fewer syncs a trial is stored in 6 ms instead of 90. A power cut can undo the last trials, which the
    study computes again from their records.
    """
    try:
        with engine.connect() as connection:
            return bool(connection.exec_driver_sql(f"PRAGMA journal_mode={mode}").scalar() == mode)
    except OperationalError:  # a dashboard reads the file, or the file system has no shared memory
        return False


def _reduce_syncs(connection: Any, record: object) -> None:
    connection.execute("PRAGMA synchronous=normal")


def _lock_of(path: Path) -> FileLock:
    """Returns the lock of a study's folder; a process that has the lock may acquire the lock again."""
    return FileLock(path / ".lock", is_singleton=True)


def _acquire(lock: FileLock, path: Path) -> None:
    with translate_write_errors(path):
        try:
            lock.acquire(timeout=_LOCK_S)
        except Timeout:
            raise StudyError(f"{path} is in use by another process", fix="wait for it, or stop it") from None


@contextmanager
def new_folder(path: Path) -> Iterator[None]:
    """Makes the folder of a new study, and locks the folder within the context.

    Raises:
        StudyError: the folder can't become a new study, or another process works in the folder.
    """
    StudyFolder.check_new(path)
    with translate_write_errors(path, "--study"):
        path.mkdir(parents=True, exist_ok=True)
    _acquire(lock := _lock_of(path), path)
    try:
        StudyFolder.check_new(path)  # another process may have made a study meanwhile
        yield
    finally:
        lock.release()


def make_folder(name: str) -> Path:
    """Makes and returns `studies/<name>-<date>-<time>`, with a number if that exists."""
    path = Path("studies") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    for candidate in itertools.chain([path], numbered):
        with translate_write_errors(candidate, "--study"), suppress(FileExistsError):
            candidate.mkdir(parents=True)
            return candidate
    raise AssertionError("the numbers never end")
