"""Detection of changed data sets: worker processes have a copy, which doesn't follow changes in the training process."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor

_MAX_OBJECTS, _MAX_ITEMS = 20_000, 1_000
"""Limits of visited objects: in total and per container. A data set may contain millions of names."""

_MAX_BYTES, _SAMPLED_ELEMENTS = 1 << 16, 1_024
"""Largest array that is compared in full, and number of compared elements of a larger one. NumPy, unlike torch, doesn't
count writes."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LIBRARIES = (
    "torch",
    "torchvision",
    "torchaudio",
    "numpy",
    "builtins",
    "collections",
    "functools",
    "pathlib",
    "PIL",
    "hotloop",
)


def dataset_summary(dataset: Any) -> tuple[Any, ...]:
    """Returns a summary of the objects that a data set refers to: attributes, items, closures, and globals that its functions
    read.

    Two summaries differ if a number, text, tensor or array among these objects was changed or replaced. Objects beyond the
    size limits are skipped, and large arrays are compared at sampled elements.
    """
    found, seen, waiting = list[Any](), set[int](), deque([dataset])
    while waiting and len(found) < _MAX_OBJECTS:
        one = waiting.popleft()
        if isinstance(one, _PLAIN):
            found.append(repr(one) if isinstance(one, float | complex) else one)
        elif id(one) not in seen:
            seen.add(id(one))
            found.append(_object_summary(one))
            waiting.extend(_referenced_objects(one))
    return tuple(found)


def _object_summary(one: Any) -> tuple[Any, ...]:
    """Returns values that differ if the object itself, apart from its parts, was changed."""
    name = type(one).__qualname__
    if isinstance(one, Tensor):
        version = None if one.is_inference() else one._version
        return name, tuple(one.shape), version, id(one)
    if isinstance(one, np.ndarray):
        return name, one.shape, _content(one)
    return name, len(one) if isinstance(one, list | tuple | set | frozenset | Mapping) else id(one)


def _content(array: np.ndarray) -> bytes:
    if array.dtype.hasobject:
        return b""
    if array.nbytes <= _MAX_BYTES:
        return array.tobytes()
    steps = tuple(
        slice(None, None, max(1, size // round(_SAMPLED_ELEMENTS ** (1 / array.ndim)))) for size in array.shape
    )
    return array[steps].tobytes()


def _referenced_objects(one: Any) -> Iterator[Any]:
    """Yields the objects that an object refers to, in a fixed order."""
    if isinstance(one, Tensor | np.ndarray | ModuleType):
        return
    if isinstance(one, Mapping):
        for key, value in _first_items(one.items()):
            yield from (key, value)
    elif isinstance(one, list | tuple):
        yield from _first_items(one)
    elif isinstance(one, set | frozenset):
        yield from sorted(map(repr, _first_items(one)))
    elif isinstance(one, MethodType):
        yield from (one.__self__, one.__func__)
    elif isinstance(one, functools.partial):
        yield from (one.func, one.args, one.keywords)
    elif isinstance(one, FunctionType):
        yield from _parts_of_function(one)
    elif isinstance(one, type):
        if not _is_library_object(one):
            yield from (value for name, value in vars(one).items() if not name.startswith("__") or callable(value))
    else:
        yield from _attributes(one)
        yield from type(one).__mro__


def _parts_of_function(function: FunctionType) -> Iterator[Any]:
    if _is_library_object(function):
        return
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the cell is still empty
            continue
    yield function.__defaults__
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, (*_PLAIN, list, dict, Tensor, np.ndarray)):
            yield value


def _attributes(one: Any) -> Iterator[Any]:
    if hasattr(one, "__dict__"):
        yield from vars(one).values()
    for owner in type(one).__mro__:
        slots = vars(owner).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield getattr(one, name, None)


def _first_items(items: Any) -> Iterator[Any]:
    for number, item in enumerate(items):
        if number == _MAX_ITEMS:
            return
        yield item


def _is_library_object(one: Any) -> bool:
    return str(getattr(one, "__module__", "")).partition(".")[0] in _LIBRARIES
