"""Whether a data set is another one than before: worker processes have a copy, which doesn't see what the training process changes."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor

_MOST_OBJECTS, _MOST_ITEMS = 20_000, 1_000
"""Visited in all, and in one container: a data set may hold millions of names."""

_MOST_BYTES, _SAMPLED = 1 << 16, 1_024
"""Of an array compared in full, and the elements compared of a larger one; NumPy doesn't count writes, as torch does."""

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


def summary(dataset: Any) -> tuple[Any, ...]:
    """Of what a data set leads to: attributes, items, closures, and globals that its own functions read.

    Two summaries differ where a number, a text, a tensor or an array among them was changed or replaced. Beyond limits of
    size nothing is visited, and elements of large arrays are compared in part.
    """
    found, seen, waiting = list[Any](), set[int](), deque([dataset])
    while waiting and len(found) < _MOST_OBJECTS:
        one = waiting.popleft()
        if isinstance(one, _PLAIN):
            found.append(repr(one) if isinstance(one, float | complex) else one)
        elif id(one) not in seen:
            seen.add(id(one))
            found.append(_of(one))
            waiting.extend(_parts(one))
    return tuple(found)


def _of(one: Any) -> tuple[Any, ...]:
    """What shows by itself that an object was changed."""
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
    if array.nbytes <= _MOST_BYTES:
        return array.tobytes()
    every = tuple(slice(None, None, max(1, size // round(_SAMPLED ** (1 / array.ndim)))) for size in array.shape)
    return array[every].tobytes()


def _parts(one: Any) -> Iterator[Any]:
    """What an object leads to, in an order that is the same each time."""
    if isinstance(one, Tensor | np.ndarray | ModuleType):
        return
    if isinstance(one, Mapping):
        for key, value in _first(one.items()):
            yield from (key, value)
    elif isinstance(one, list | tuple):
        yield from _first(one)
    elif isinstance(one, set | frozenset):
        yield from sorted(map(repr, _first(one)))
    elif isinstance(one, MethodType):
        yield from (one.__self__, one.__func__)
    elif isinstance(one, functools.partial):
        yield from (one.func, one.args, one.keywords)
    elif isinstance(one, FunctionType):
        yield from _parts_of_function(one)
    elif isinstance(one, type):
        if not _is_of_library(one):
            yield from (value for name, value in vars(one).items() if not name.startswith("__") or callable(value))
    else:
        yield from _attributes(one)
        yield from type(one).__mro__


def _parts_of_function(function: FunctionType) -> Iterator[Any]:
    if _is_of_library(function):
        return
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
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


def _first(items: Any) -> Iterator[Any]:
    for number, item in enumerate(items):
        if number == _MOST_ITEMS:
            return
        yield item


def _is_of_library(one: Any) -> bool:
    return str(getattr(one, "__module__", "")).partition(".")[0] in _LIBRARIES
