"""Permission to execute the code in a run folder: for the user's own runs, and for runs that the user trusts.

Trusted runs are stored outside of their folders: the id, with a digest of all that decides which code runs. So a copied
or moved run remains trusted, a folder can't claim trust for itself, and a changed copy needs trust again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.files.source_files import folder_digest
from hotloop.core.files.user_folders import data_folder, foreign_access, make_private_folder
from hotloop.core.records.study import StudyRecord
from hotloop.core.records.training import RunRecord
from hotloop.errors import HotloopError, RunError

TRUST_VARIABLE = "HOTLOOP_TRUST"
"""Environment variable; 1 trusts all runs, for unattended resumes on replacement machines."""


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
    """Stores trust in the code of a run; returns a line for the user after a failure.

    Args:
        path: the run folder, with its source files.

    Raises:
        RunError: the source files have a link, or can't be read.
    """
    if record.source is None:
        return []
    stored = _trust_file(record, path)
    if stored is None:
        return [f"the run can't be stored as yours, since you have no home folder: {_trust_hint()}"]
    try:
        make_private_folder(stored.parent)
        if (access := foreign_access(stored.parent)) is not None:
            return [f"the run can't be stored as yours, since {access}: {_trust_hint()}"]
        if not stored.is_file():
            write_atomic(stored, f"{record.created} {path.absolute()}\n".encode(errors="backslashreplace"))
    except HotloopError as error:
        return [f"the run can't be stored as yours ({error.given}): {_trust_hint()}"]
    return []


def check_trusted(record: RunRecord | StudyRecord, path: Path) -> None:
    """Raises RunError if a run with code was neither started nor trusted by the user, or was changed since."""
    if record.source is None or os.environ.get(TRUST_VARIABLE) == "1":
        return
    stored = _trust_file(record, path)
    access = None if stored is None else foreign_access(stored.parent)
    if stored is not None and stored.is_file() and access is None:
        return
    fix = f"read the code, then give --trust once; in a job that nobody attends, set {TRUST_VARIABLE}=1"
    if access is not None:
        raise RunError(f"the runs that you trust are unknown, since {access}", fix=fix)
    if stored is not None and any(stored.parent.glob(f"{stored.name.partition('-')[0]}-*")):
        raise RunError(
            f"the Task's source in {path / 'source'} was changed since you started or trusted the run, or the entry that"
            " names the source was, and the code would run now",
            expected="the files and the entry of that time",
            fix=f"put them back; or {fix}",
        )
    raise RunError(
        f"{path} is a foreign run: it was started by somebody else or on another machine,"
        f" and {path / 'source'} holds code that would run now",
        expected="a run that you started here, or one that you trust",
        fix=fix,
    )


def _trust_file(record: RunRecord | StudyRecord, path: Path) -> Path | None:
    """Returns the file that marks a run's code as trusted.

    The name consists of the id, and of a digest of the files and of the entry that says which of them runs with which
    arguments and beside which data.
    """
    folder, source = data_folder(), record.source
    entry = "" if source is None else json.dumps(source.model_dump(mode="json"), sort_keys=True)
    code = [hashlib.sha256(entry.encode(errors="replace")).hexdigest(), folder_digest(path / "source")]
    parts = [record.id, "\n".join([record.id, *code])]
    name = "-".join(hashlib.sha256(part.encode(errors="replace")).hexdigest()[:32] for part in parts)
    return None if folder is None else folder / "trusted" / name


def _trust_hint() -> str:
    return f"evaluate, predict, export and resume need --trust or {TRUST_VARIABLE}=1"
