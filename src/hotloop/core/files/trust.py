"""Permission to execute the code in a run folder: for the user's own runs, and for runs that the user trusts.

The ids of trusted runs are stored outside the run folder. So a copied or moved run remains trusted, and a folder can't
claim trust for itself.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.files.user_folders import data_folder
from hotloop.core.records.study import StudyRecord
from hotloop.core.records.training import RunRecord
from hotloop.errors import HotloopError, RunError

TRUST_VARIABLE = "HOTLOOP_TRUST"
"""Environment variable; 1 trusts all runs, for unattended resumes on replacement machines."""


def run_id(record: RunRecord | StudyRecord) -> str:
    """Returns the run's id; for runs of older versions, a hash of name and creation time."""
    if record.id:
        return record.id
    started = "\n".join(["before ids", record.name, record.created])
    return hashlib.sha256(started.encode(errors="replace")).hexdigest()


def require_trust(record: RunRecord | StudyRecord, path: Path, asked: bool, say: Callable[[str], None]) -> None:
    """Checks that a run's code may execute.

    Args:
        asked: whether the user grants trust, which is then stored.

    Raises:
        RunError: the run isn't trusted.
    """
    if not asked:
        check_trusted(record, path)
        return
    for note in store_trust(record, path):
        say(note)


def store_trust(record: RunRecord | StudyRecord, path: Path) -> list[str]:
    """Stores trust in a run; returns a line for the user after a failure.

    Args:
        path: the run folder, written into the file for its readers.
    """
    stored = _trust_file(record)
    if stored is None:
        return [f"the run can't be stored as yours, since you have no home folder: {_trust_hint()}"]
    try:
        if not stored.is_file():
            write_atomic(stored, f"{record.created} {path.absolute()}\n".encode(errors="backslashreplace"))
    except HotloopError as error:
        return [f"the run can't be stored as yours ({error.given}): {_trust_hint()}"]
    return []


def check_trusted(record: RunRecord | StudyRecord, path: Path) -> None:
    """Raises RunError if a run with code was neither started nor trusted by the user."""
    if record.source is None or os.environ.get(TRUST_VARIABLE) == "1":
        return
    stored = _trust_file(record)
    if stored is None or not stored.is_file():
        age = "" if record.id else ", or by a version of hotloop that stored no ids"
        raise RunError(
            f"{path} is a foreign run: it was started by somebody else, on another machine{age},"
            f" and {path / 'source'} holds code that would run now",
            expected="a run that you started here, or one that you trust",
            fix=f"read the code, then give --trust once; in a job that nobody attends, set {TRUST_VARIABLE}=1",
        )


def _trust_file(record: RunRecord | StudyRecord) -> Path | None:
    """Returns the file that marks a run as trusted; its name depends on the code's digest, so changes end the trust."""
    folder = data_folder()
    digest = record.source.digest if record.source else ""
    name = hashlib.sha256(f"{run_id(record)}\n{digest}".encode(errors="replace")).hexdigest()
    return None if folder is None else folder / "trusted" / name[:32]


def _trust_hint() -> str:
    return f"evaluate, predict, export and resume need --trust or {TRUST_VARIABLE}=1"
