"""Whether the code in a run's folder may run: that of this user's own runs may, and that of runs the user said to trust.

A run has an id. The ids of trusted runs are stored outside of the folder, so that copies and moves keep the trust, and
nothing inside a folder that somebody else sends can claim it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from hotloop.errors import HotloopError, RunError
from hotloop.files import write_atomic
from hotloop.places import data_folder
from hotloop.records import RunRecord

TRUST = "HOTLOOP_TRUST"
"""Set to 1 in the environment, the code of all runs may run: for resumes on replacement machines that nobody attends."""


def id_of(record: RunRecord) -> str:
    """A run's id; that of a run of a version before ids follows from what it was started from."""
    if record.id:
        return record.id
    started = "\n".join(["before ids", record.name, record.created])
    return hashlib.sha256(started.encode(errors="replace")).hexdigest()


def allow(record: RunRecord, path: Path, asked: bool, say: Callable[[str], None]) -> None:
    """Lets a run's code run, if it may.

    Args:
        asked: whether the user says to trust the run, from now on.

    Raises:
        RunError: it may not.
    """
    if not asked:
        check_trusted(record, path)
        return
    for note in trust(record, path):
        say(note)


def trust(record: RunRecord, path: Path) -> list[str]:
    """Stores that a run's code may run; returns a line for the user if that failed.

    Args:
        path: the run's folder, for whoever reads the stored file.
    """
    stored = _stored(record)
    if stored is None:
        return [f"the run can't be stored as yours, since you have no home folder: {_later()}"]
    try:
        if not stored.is_file():
            write_atomic(stored, f"{record.created} {path.absolute()}\n".encode(errors="backslashreplace"))
    except HotloopError as error:
        return [f"the run can't be stored as yours ({error.given}): {_later()}"]
    return []


def check_trusted(record: RunRecord, path: Path) -> None:
    """Raises RunError if a run's code may not run: this user neither started the run nor said to trust it."""
    if record.source is None or os.environ.get(TRUST) == "1":
        return
    stored = _stored(record)
    if stored is None or not stored.is_file():
        age = "" if record.id else ", or by a version of hotloop that stored no ids"
        raise RunError(
            f"{path} is a foreign run: it was started by somebody else, on another machine{age},"
            f" and {path / 'source'} holds code that would run now",
            expected="a run that you started here, or one that you trust",
            fix=f"read the code, then give --trust once; where nobody attends, set {TRUST}=1",
        )


def _stored(record: RunRecord) -> Path | None:
    """The file that says so: it is of the run and its code together, so that a copy with other code isn't trusted."""
    folder = data_folder()
    digest = record.source.digest if record.source else ""
    name = hashlib.sha256(f"{id_of(record)}\n{digest}".encode(errors="replace")).hexdigest()
    return None if folder is None else folder / "trusted" / name[:32]


def _later() -> str:
    return f"evaluate, predict, export and resume need --trust or {TRUST}=1"
