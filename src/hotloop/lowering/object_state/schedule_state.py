"""Restoring the saved state of a learning-rate schedule."""

from __future__ import annotations

from typing import Any

from hotloop.core.state import host_copy
from hotloop.core.task_parts.schedules import schedule_state, schedules_of
from hotloop.errors import CheckpointError


def restore_schedule(schedule: Any, saved: dict[str, Any]) -> None:
    """Loads a state that `schedule_state` returned.

    Raises:
        CheckpointError: the state belongs to another schedule.
    """
    now = schedule_state(schedule)
    missing = [
        key for key in now.keys() - saved.keys() if not key.startswith("_")
    ]  # torch versions differ in private keys
    if missing or (saved and schedule is None):
        what = " and ".join(f"a {type(one).__name__}" for one in schedules_of(schedule)) or "none"
        raise CheckpointError(
            f"the checkpoint is of another learning-rate schedule: the Task has {what}",
            expected=f"the one with {', '.join(sorted(saved))}" if saved else "none",
            fix="use the Task that the run was started with",
        )
    if schedule is not None:
        schedule.load_state_dict(host_copy(saved))


def steps_left_in_schedule(schedule: Any) -> int | None:
    """Returns the number of steps until the schedule's end; None if it has no end."""
    bounded = [one for one in schedules_of(schedule) if getattr(one, "total_steps", None) is not None]
    return min((one.total_steps - one.last_epoch for one in bounded), default=None)
