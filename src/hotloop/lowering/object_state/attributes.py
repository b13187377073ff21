"""Plain values in attributes of the Task's own objects, as part of State: counters, phases, short lists, small tensors.

A step may count its calls in an attribute, and a schedule in a variable of its closure. A changed value is saved and
restored by its place, such as `step/calls`. A changed value that can't be saved is reported.
"""

from __future__ import annotations

import enum
import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import numpy as np
from torch import nn

from hotloop.core.random.rng import preserve_generators
from hotloop.core.state import host_copy
from hotloop.data.sources import Samples, Stream
from hotloop.lowering.object_state.contents import CONTAINERS, SCALARS, StoredValue, are_equal, is_same, read_content
from hotloop.lowering.object_state.owners import HeldValue, PutValue, container_items, package_name, values_in
from hotloop.task import Task

_IMMUTABLE = (bool, int, float, str, type(None), bytes, complex, enum.Enum, tuple, frozenset, np.generic)
_MAX_OBJECTS = 256
"""Largest container of objects whose items are compared individually."""

_FUNCTIONS = ("step", "loss", "schedule", "weight", "prepare", "augment", "collate", "metrics", "predict", "callbacks")
_SOURCES = ("data", "validation", "test", "collate")
"""Roots whose random generators are seeded before each sample in each process. State excludes these generators."""

_BEFORE_ATTRIBUTE = "_attributes_before"


FoundValues = dict[str, StoredValue]


class TaskAttributes:
    """The plain values in objects of a Task and its Program that the rest of State doesn't contain.

    Args:
        objects: the Program's own objects by name, such as its model.
        saved: returns the `id`s of the tensors that State contains already.
    """

    def __init__(self, task: Task, objects: Mapping[str, Any], saved: Callable[[], Collection[int]]) -> None:
        self._shared, self._objects, self._saved = task_objects(task), dict(objects), saved
        self._first = initial_values(task)

    @cached_property
    def _start(self) -> FoundValues:
        """The values before the first step, and before the first State was captured or restored."""
        return self._current_values()

    @cached_property
    def _initial_values(self) -> FoundValues:
        return self._start | {place: value for place, value in self._first.items() if place in self._start}

    def begin(self) -> None:
        """Records the values before the first step; only the first call has an effect."""
        _ = self._initial_values

    def changed(self) -> tuple[dict[str, Any], list[str]]:
        """Returns the changed contents by place, and a line for each changed value that can't be saved."""
        now = self._current_values()
        moved = _rebound_places(self._initial_values, now)
        places = [
            place
            for place in {**self._initial_values, **now}
            if not is_same(self._initial_values.get(place), now.get(place))
        ]
        savable = {place for place in places if self._can_be_saved(place, now) and not _is_within(place, moved)}
        contents = {place: now[place].content for place in places if place in savable}
        since = [place for place in places if not is_same(self._start.get(place), now.get(place))]
        lost = dict.fromkeys(place for place in since if place not in savable)
        outer = [place for place in lost if not _is_inside(place, savable) and not _is_inside(place, lost)]
        names = [place.replace("/", ".") for place in outer if not place.startswith("callbacks/")]
        return contents, [f"training changes {name}, which no checkpoint stores" for name in names]

    def compiled_attributes(self) -> list[str]:
        """Returns a line for each of the user's modules or functions that torch compiles at its first calls."""
        found = [
            (place.replace("/", "."), value.compiled_by) for place, value in self._start.items() if value.compiled_by
        ]
        why = "and its last bits depend on the calls before: a resumed run may differ in them"
        return [f"{name} is compiled by {compiler} while it is called, {why}" for name, compiler in found]

    def _can_be_saved(self, place: str, now: FoundValues) -> bool:
        value, was = now.get(place), self._initial_values.get(place)
        if value is None or value.put is None or value.is_alias:
            return False
        if was is not None:
            return was.put is not None and not was.is_alias
        parent = self._initial_values.get(place.rpartition("/")[0])  # a new attribute
        return value.is_complete and parent is not None and parent.owner is not None

    def restore(self, contents: Mapping[str, Any] | None, below: tuple[str, ...] = ("",)) -> None:
        """Restores saved contents; other changed values get their initial content.

        Args:
            contents: the saved contents by place; None changes nothing.
            below: prefixes of the places to restore.
        """
        if contents is None or not below:
            return
        now = self._current_values()
        wanted = {
            place: value.content for place, value in self._initial_values.items() if value.put is not None
        } | dict(contents)
        wanted = {place: content for place, content in wanted.items() if place.startswith(below)}
        moved = _rebound_places(self._initial_values, now)
        _put_all({place: content for place, content in wanted.items() if not _is_within(place, moved)}, now)
        for place in now.keys() - self._start.keys() - wanted.keys():
            parent, _, name = place.rpartition("/")
            if now[place].is_complete and place.startswith(below) and (owner := now[parent].owner) is not None:
                vars(owner).pop(name, None)

    def _current_values(self) -> FoundValues:
        saved = self._saved()
        return find_values(self._shared, saved) | find_values(self._objects, saved)


def _put_all(contents: Mapping[str, Any], now: FoundValues) -> None:
    for place, content in contents.items():
        value, (parent, _, name) = now.get(place), place.rpartition("/")
        if value is None:
            owner = now[parent].owner if parent in now else None
            if owner is not None and not _has_attribute(owner, name):
                vars(owner)[name] = host_copy(content)
        elif value.put is not None and not value.is_alias and not are_equal(value.content, content):
            value.put(host_copy(content))


def _has_attribute(owner: Any, name: str) -> bool:
    """Checks an object's own attributes; a module's parameters and buffers count."""
    return name in vars(owner) or (isinstance(owner, nn.Module) and name in {*owner._parameters, *owner._buffers})


def _rebound_places(before: FoundValues, now: FoundValues) -> set[str]:
    """Returns places that refer to another object than before, such as a selected item of a list.

    Values below such a place belong to another object.
    """
    aliases = {
        place for place in {**before, **now} if any(place in one and one[place].is_alias for one in (before, now))
    }
    moved = {place for place in aliases if not is_same(before.get(place), now.get(place))}
    targets = {one[place].content for place in moved for one in (before, now) if place in one and one[place].is_alias}
    return moved | targets


def restore_model_attributes(model: nn.Module, contents: Mapping[str, Any] | None) -> None:
    """Restores the contents of a State in a model that the model factory has just returned."""
    own = {place: content for place, content in (contents or {}).items() if place.startswith("model/")}
    if own:
        _put_all(own, find_values({"model": model}, {id(one) for one in (*model.parameters(), *model.buffers())}))


def task_objects(task: Task) -> dict[str, Any]:
    """Returns the Task's own objects by name, except modules: each Program has copies of the model and of a loss module."""
    functions = {name: getattr(task, name) for name in _FUNCTIONS}
    roots = {name: one for name, one in functions.items() if one is not None and not isinstance(one, nn.Module)}
    roles = task.roles
    for name, source in (("data", roles.train), ("validation", roles.validation), ("test", roles.raw_test)):
        if isinstance(source, Samples):
            roots[name] = source.dataset
        elif isinstance(source, Stream):
            roots[name] = source.loader
    return roots


def schedule_functions(schedule: Any) -> list[Any]:
    """Returns the functions that a torch learning-rate scheduler calls; for other classes, the scheduler itself."""
    if not str(type(schedule).__module__).startswith("torch."):
        return [schedule]
    values = [value for name, value in vars(schedule).items() if name != "optimizer"]
    inner = [one for value in values if isinstance(value, list | tuple) for one in value]
    return [one for one in (*values, *inner) if callable(one)]


def initial_values(task: Task) -> FoundValues:
    """Returns the values of the Task's own objects at the first call in this process."""
    known = vars(task)
    if _BEFORE_ATTRIBUTE not in known:
        known[_BEFORE_ATTRIBUTE] = find_values(task_objects(task), ())
    return known[_BEFORE_ATTRIBUTE]


def pass_initial_values(task: Task, other: Task) -> None:
    """Gives a changed copy of a Task the initial values of the Task's objects."""
    vars(other)[_BEFORE_ATTRIBUTE] = initial_values(task)


def worker_changes(task: Task, workers: int | None, ranks: int = 1) -> list[str]:
    """Returns a line for each attribute that the data set changes when another process loads samples.

    Each worker and each rank has a copy of the data set, and checkpoints store at most one copy. Random generators are
    excluded.

    Args:
        workers: the plan's number of workers; None for the number of the data's own loader.
        ranks: the number of ranks.
    """
    source = task.roles.train
    if not isinstance(source, Samples) or not len(source):
        return []
    has_workers = bool(source.workers if workers is None else workers)
    if not has_workers and ranks == 1:
        return []
    root = {"data": source.dataset}
    # training reports the errors of samples
    with preserve_generators(), preserve_attributes(task), suppress(Exception):
        initial = find_values(root, ())
        for place in (0, len(source) - 1):
            source.dataset[place]
        now = find_values(root, ())
        places = [place for place in {**initial, **now} if not is_same(initial.get(place), now.get(place))]
        outer = [place for place in places if not _is_inside(place, places)]
        where = "in each worker's copy of the data set, which no checkpoint stores"
        if not has_workers:
            where = "in each rank's copy of the data set, of which a checkpoint stores that of rank 0"
        return [f"loading samples changes {place.replace('/', '.')} {where}" for place in outer]
    return []


@contextmanager
def preserve_attributes(task: Task) -> Iterator[None]:
    """Restores the Task's own objects after the context, such as after a trial of its step."""
    initial_values(task)
    initial = find_values(task_objects(task), ())
    try:
        yield
    finally:
        now = find_values(task_objects(task), ())
        _put_all({place: value.content for place, value in initial.items() if value.put is not None}, now)


def find_values(roots: Mapping[str, Any], left_out: Collection[int]) -> FoundValues:
    """Returns the values that the objects refer to, by place.

    Args:
        roots: the objects by name.
        left_out: the `id`s of tensors to skip.
    """
    found: FoundValues = {}
    places: dict[int, str] = {}
    references = []  # references, so that Python reuses no id
    own = {package_name(root) for root in roots.values() if not isinstance(root, nn.Module)}
    queue: deque[tuple[str, str, Any, PutValue | None]] = deque(
        (name, name, root, None) for name, root in roots.items()
    )

    def visit(root: str, parent: str, items: Iterable[HeldValue]) -> None:
        for name, item, put in items:
            if type(item) in SCALARS:
                found[f"{parent}/{name}"] = StoredValue(item, put, is_complete=True)
            elif id(item) not in left_out:
                queue.append((root, f"{parent}/{name}", item, put))

    while queue:
        root, place, value, put = queue.popleft()
        if not isinstance(value, _IMMUTABLE):
            if id(value) in places:
                found[place] = StoredValue(places[id(value)], is_alias=True)
                continue
            if (name := _stable_name(value)) and name not in found:  # one place, independent of the path to the object
                found[place], place = StoredValue(name, is_alias=True), name
            places[id(value)] = place
            references.append(value)
        if (one := read_content(value, put)) is not None:
            if not (one.is_random and root in _SOURCES):
                found[place] = one
        elif isinstance(value, CONTAINERS):
            found[place] = StoredValue((type(value).__name__, len(value)))
            if len(value) <= _MAX_OBJECTS:
                visit(root, place, container_items(value))
        else:
            owner = value if isinstance(getattr(value, "__dict__", None), dict) else None
            found[place] = StoredValue(type(value).__name__, owner=owner)
            visit(root, place, values_in(value, own))
    return found


def _stable_name(value: Any) -> str:
    """Returns the name of a class, a module or a function without a closure; empty for other objects."""
    if isinstance(value, type):
        return f"class {value.__qualname__}"
    if inspect.ismodule(value):
        return f"module {value.__name__}"
    return f"{value.__qualname__}()" if inspect.isfunction(value) and not value.__closure__ else ""


def _is_within(place: str, others: Collection[str]) -> bool:
    return place in others or _is_inside(place, others)


def _is_inside(place: str, others: Collection[str]) -> bool:
    """Checks whether an object that contains the place is in `others`."""
    ends = (end for end, letter in enumerate(place) if letter == "/")
    return any(place[:end] in others for end in ends)
