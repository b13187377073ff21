"""Searches that ended with the baseline, cached in the user's folder, so that none is repeated without benefit."""

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
"""Factor of a longer run that is worth another search."""


class FailedSearch(Record):
    """A search without a better plan.

    Attributes:
        key: Task, machine, versions and the axes that are set.
        steps: of the run; None for a stream.
        step_s: seconds of the baseline's step.
        time_limit_s: the user's; None without one.
        left_open: whether the plan of the rules is undecided.
    """

    version: int = 1
    key: dict[str, Any]
    steps: int | None
    step_s: float
    time_limit_s: float | None
    left_open: bool

    def covers(self, steps: int | None) -> bool:
        """Whether a search for a run of `steps` steps would have no more time."""
        if self.time_limit_s is not None:
            return self.time_limit_s >= Budget.of(self.step_s, steps, None).racing_s
        if steps is None or self.steps is None:
            return steps == self.steps
        return steps <= _LONGER_RUN_FACTOR * self.steps


def search_key(fingerprint: str, machine: str, versions: Mapping[str, str], axes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the key of a search; `axes` are those that are set, with the device."""
    where = {"task": fingerprint, "machine": machine, "versions": dict(versions)}
    return {**where, "axes": dict(sorted(axes.items()))}


def save_failed_search(search: FailedSearch) -> None:
    """Caches a search; on failure the next one searches again."""
    try:
        write_atomic(_path(search.key), search.model_dump_json(indent=2))
    except HotloopError:
        return


def delete_failed_search(key: dict[str, Any]) -> None:
    with suppress(OSError):
        _path(key).unlink(missing_ok=True)


def load_failed_search(key: dict[str, Any]) -> FailedSearch | None:
    """Returns the failed search with this key; None without a valid one."""
    try:
        found = FailedSearch.model_validate_json(_path(key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if found.key == json.loads(json.dumps(key)) else None


def _path(key: dict[str, Any]) -> Path:
    return races_folder().parent / "searches" / f"{key_digest(key)}.json"
