"""Learning-rate schedulers of a Task: one, or several by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from hotloop.core.state import host_copy
from hotloop.errors import CheckpointError, TaskError, call_user_code, type_name

_MARK = -987654321
"""A number of steps that no scheduler reaches."""


class NamedSchedules:
    """Schedulers by name (`members`), such as one for each of several optimizers."""

    def __init__(self, members: Mapping[str, Any]) -> None:
        self.members = dict(members)

    def step(self) -> None:
        for member in self.members.values():
            member.step()

    def state_dict(self) -> dict[str, Any]:
        return {name: schedule_state(member) for name, member in self.members.items()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        for name, member in self.members.items():
            member.load_state_dict(saved[name])


def schedules_of(schedule: Any) -> list[Any]:
    """Returns the members of a `NamedSchedules`, or a list of the single scheduler; empty for None."""
    if isinstance(schedule, NamedSchedules):
        return list(schedule.members.values())
    return [] if schedule is None else [schedule]


def schedule_state(schedule: Any) -> dict[str, Any]:
    """Returns a scheduler's state without functions, which belong to the Task; empty for None."""
    if schedule is None:
        return {}
    return _without_functions(call_user_code("the schedule's state_dict", schedule.state_dict))


def _without_functions(tree: Any) -> Any:
    if isinstance(tree, Counter):  # MultiStepLR has a Counter
        return tree
    if isinstance(tree, dict):
        return {key: _without_functions(value) for key, value in tree.items() if not _are_functions(value)}
    if isinstance(tree, list | tuple):
        return type(tree)(map(_without_functions, tree)) if type(tree) in (list, tuple) else tree
    return tree


def _are_functions(value: Any) -> bool:
    return bool(value) and all(map(callable, value)) if isinstance(value, list | tuple) else callable(value)


def check_schedule(made: Any) -> Any:
    """Returns the result of a schedule factory as one scheduler.

    Raises:
        TaskError: `made` is no scheduler, or its state excludes the state of an inner scheduler.
    """
    members = made if isinstance(made, Mapping) and made else {"": made}
    for name, member in members.items():
        methods = ("step", "state_dict", "load_state_dict")
        if not isinstance(name, str) or not all(callable(getattr(member, method, None)) for method in methods):
            raise TaskError(
                f"the schedule factory returned {type_name(made)}"
                + f" with {name!r}: {type_name(member)}" * (member is not made),
                expected="a torch.optim.lr_scheduler.LRScheduler",
                fix="return the scheduler from it",
            )
        _check_inner(member)
        _check_storable(member)
    return NamedSchedules(made) if isinstance(made, Mapping) else made


def _check_inner(schedule: Any) -> None:
    for path, inner in _inner_schedules(schedule, type(schedule).__name__, {id(schedule)}):
        if not _is_saved(inner, schedule):
            raise TaskError(
                f"the schedule's state_dict() leaves out that of the {type(inner).__name__} in {path}, so a resumed run"
                " would have other learning rates",
                expected="a scheduler whose state_dict() and load_state_dict() save and load that state too",
                fix="chain them by torch's SequentialLR or ChainedScheduler, or define both methods",
            )


def _check_storable(schedule: Any) -> None:
    for value in _value_leaves(schedule_state(schedule)):
        if not (value is None or isinstance(value, bool | int | float | str | Tensor | np.generic)):
            raise TaskError(
                f"the state_dict() of the schedule ({type(schedule).__name__}) has {type_name(value)} in it, which no"
                " checkpoint can hold",
                expected="numbers, texts, tensors, and lists, tuples or dicts of them",
                fix="define state_dict() and load_state_dict() so that they save and load its numbers",
            )


def _inner_schedules(holder: Any, path: str, seen: set[int]) -> Iterator[tuple[str, LRScheduler]]:
    """Yields the paths and schedulers in a scheduler's attributes, lists, tuples and dicts, at any depth."""
    if isinstance(holder, list | tuple):
        items = [(f"{path}[{place}]", value) for place, value in enumerate(holder)]
    elif isinstance(holder, dict):
        items = [(f"{path}[{key!r}]", value) for key, value in holder.items()]
    else:
        items = [(f"{path}.{name}", value) for name, value in getattr(holder, "__dict__", {}).items()]
    for where, value in items:
        if id(value) in seen or not isinstance(value, LRScheduler | list | tuple | dict):
            continue
        seen.add(id(value))
        if isinstance(value, LRScheduler):
            yield where, value
        yield from _inner_schedules(value, where, seen)


def _is_saved(inner: LRScheduler, schedule: Any) -> bool:
    """Returns whether the outer scheduler's state changes with the inner scheduler's number of steps."""
    before = dict(vars(inner))
    inner.last_epoch = _MARK
    try:
        state = call_user_code("the schedule's state_dict", schedule.state_dict)
        return any(value is _MARK for value in _value_leaves(state))
    finally:
        vars(inner).clear()
        vars(inner).update(before)


def _value_leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        for value in tree.values():
            yield from _value_leaves(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _value_leaves(value)
    else:
        yield tree


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
