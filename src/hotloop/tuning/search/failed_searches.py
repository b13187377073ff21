"""Searches that ended with the baseline, kept in the user's cache folder, so that none is made twice in vain."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.files.user_folders import key_digest
from hotloop.core.records.training import Record
from hotloop.errors import HotloopError
from hotloop.tuning.search.budget import Budget
from hotloop.tuning.search.race_cache import races_folder

_LONGER_RUN_FACTOR = 1.5
"""Times as long a run pays for another search."""


class FailedSearch(Record):
    """A search that found nothing.

    Attributes:
        key: what it depends on: Task, machine, versions, the compiler's among them, and the axes that were set.
        steps: of the run that it was made for; None for a stream.
        step_s: of the baseline.
        time_limit_s: what the user gave it; None where it was what the run pays for.
        left_open: whether it found nothing against the plan of the rules either.
    """

    version: int = 1
    key: dict[str, Any]
    steps: int | None
    step_s: float
    time_limit_s: float | None
    left_open: bool

    def covers(self, steps: int | None) -> bool:
        """Whether a search for a run of so many steps would have no more time."""
        if self.time_limit_s is not None:
            return self.time_limit_s >= Budget.of(self.step_s, steps, None).racing_s
        if steps is None or self.steps is None:
            return steps == self.steps
        return steps <= _LONGER_RUN_FACTOR * self.steps


def search_key(fingerprint: str, machine: str, versions: Mapping[str, str], axes: Mapping[str, Any]) -> dict[str, Any]:
    """The key of a search.

    Args:
        axes: those that were set, the device among them.
    """
    where = {"task": fingerprint, "machine": machine, "versions": dict(versions)}
    return {**where, "axes": dict(sorted(axes.items()))}


def save_failed_search(search: FailedSearch) -> None:
    """Remembers it; where that fails, the next one searches again."""
    try:
        write_atomic(_path(search.key), search.model_dump_json(indent=2))
    except HotloopError:
        return


def delete_failed_search(key: dict[str, Any]) -> None:
    """For a search that found something."""
    with suppress(OSError):
        _path(key).unlink(missing_ok=True)


def load_failed_search(key: dict[str, Any]) -> FailedSearch | None:
    """The last search in vain with this key; None where there is none, or none that can be read."""
    try:
        found = FailedSearch.model_validate_json(_path(key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if found.key == json.loads(json.dumps(key)) else None


def _path(key: dict[str, Any]) -> Path:
    return races_folder().parent / "searches" / f"{key_digest(key)}.json"
