"""The state of a learning-rate schedule, as part of State."""

from __future__ import annotations

from typing import Any

from hotloop.errors import CheckpointError
from hotloop.state import host_copy


def schedule_state(schedule: Any) -> dict[str, Any]:
    """A scheduler's state without its functions, which are the Task's; empty without a scheduler."""
    saved = schedule.state_dict() if schedule is not None else {}
    return {key: value for key, value in saved.items() if not callable(value)}


def restore_schedule(schedule: Any, saved: dict[str, Any]) -> None:
    now = schedule_state(schedule)
    missing = [key for key in now.keys() - saved.keys() if not key.startswith("_")]  # torch adds private ones
    if missing or (saved and schedule is None):
        what = f"a {type(schedule).__name__}" if schedule is not None else "none"
        raise CheckpointError(
            f"the checkpoint is of another learning-rate schedule: the Task has {what}",
            expected=f"the one with {', '.join(sorted(saved))}" if saved else "none",
            fix="use the Task that the run was started with",
        )
    if schedule is not None:
        schedule.load_state_dict(host_copy(saved))
