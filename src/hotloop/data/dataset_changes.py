"""Detects changes of a data set, which its copies in worker processes don't receive."""

from __future__ import annotations

import ctypes
import dis
import functools
import itertools
import mmap
import sys
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotloop.core.installed_code import is_installed

_MAX_OBJECTS, _MAX_ITEMS = 20_000, 1_000
"""Limits of visited objects, in total and per container: a data set may contain millions of names."""

_MAX_BYTES, _SAMPLED_ELEMENTS = 1 << 16, 1_024
"""Largest array that is compared in full, and number of compared elements of a larger array."""

_SMALL_BYTES = 256
"""Largest tensor that is compared by its bytes too: `Tensor.data` and arrays that share memory change no version."""

BUFFERS: tuple[Any, ...] = (bytearray, memoryview, array, mmap.mmap, ctypes.Structure.__mro__[-2])
"""Kinds of memory that Python's own functions write into; the last one is the base of all ctypes objects."""

DESCRIPTORS = (staticmethod, classmethod, property, functools.cached_property)

PLAIN = (bool, int, float, complex, str, bytes, type(None))
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

_CONTAINERS = (list, tuple, set, frozenset, deque, Mapping)


def dataset_summary(dataset: Any) -> tuple[Any, ...]:
    """Returns a summary of the objects that a data set refers to: attributes, items, closures, globals of functions.

    Two summaries differ if a number, text, tensor or array among these objects was changed or replaced. Objects beyond
    the size limits are skipped, and large arrays are compared at sampled elements.
    """
    return tuple(map(value_summary, reachable_values(dataset)))


def value_summary(value: Any) -> Any:
    """Returns what differs if the value itself, without the objects that it refers to, was changed."""
    if isinstance(value, PLAIN):
        return repr(value) if isinstance(value, float | complex) else value
    return _object_summary(value)


def reachable_values(dataset: Any, *, through_code: bool = True) -> Iterator[Any]:
    """Yields what a data set refers to, within the size limits; each object once, plain values each time.

    Args:
        through_code: whether functions, classes and objects count that the code of a function only names.
    """
    visited, waiting, count = set[int](), deque([dataset]), 0
    while waiting and count < _MAX_OBJECTS:
        value = waiting.popleft()
        if isinstance(value, PLAIN):
            count += 1
            yield value
        elif id(value) not in visited:
            visited.add(id(value))
            count += 1
            yield value
            waiting.extend(_referenced_objects(value, through_code))


def unchecked_part(dataset: Any) -> str:
    """Returns the first part whose changes `dataset_summary` may miss, such as `a list of 50,000 items`; else ""."""
    for count, value in enumerate(reachable_values(dataset), 1):
        if count == _MAX_OBJECTS:
            return f"more than {_MAX_OBJECTS:,} objects"
        if isinstance(value, _CONTAINERS) and len(value) > _MAX_ITEMS:
            return f"a {type(value).__name__} of {len(value):,} items"
        if isinstance(value, np.ndarray) and (value.dtype.hasobject or value.nbytes > _MAX_BYTES):
            return f"an array of shape {'x'.join(map(str, value.shape))}"
        if isinstance(value, BUFFERS) and memoryview(value).nbytes > _MAX_BYTES:
            return f"an object of {type(value).__name__} with {memoryview(value).nbytes:,} bytes"
    return ""


_SAMPLE_METHODS = ("__getitem__", "__getitems__", "__call__", "forward")
"""Methods of a data set and its transforms that make a sample."""


def names_in_sample_code(dataset: Any) -> set[str]:
    """Returns the names in the user's functions that make a sample, as far as the code shows them."""
    values = list(reachable_values(dataset, through_code=False))  # a constructor's code makes no sample
    methods = {id(part) for value in values if isinstance(value, type) for part in vars(value).values()}
    names, done = set[str](), set[int]()
    for value in values:
        owner = type(value)
        if isinstance(value, FunctionType):
            waiting: list[Any] = [] if id(value) in methods else [value]
        else:
            waiting = [getattr(owner, name, None) for name in _SAMPLE_METHODS]
        while waiting:
            function = waiting.pop()
            if not isinstance(function, FunctionType) or is_library_object(function) or id(function) in done:
                continue
            done.add(id(function))
            found = set(names_in_code(function.__code__))
            names |= found
            waiting += [getattr(owner, name, None) or function.__globals__.get(name) for name in found]
    return names


def names_in_code(code: CodeType) -> Iterator[str]:
    """Yields the global names and attributes that the code, and functions within, read."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from names_in_code(const)


def _object_summary(value: Any) -> tuple[Any, ...]:
    """Returns values that differ if the object itself, without its parts, was changed."""
    name = type(value).__qualname__
    if isinstance(value, Tensor):
        version = None if value.is_inference() else value._version
        return name, tuple(value.shape), version, id(value), small_content(value)
    if isinstance(value, np.ndarray | np.void):
        return name, value.shape, _content(value)
    if isinstance(value, BUFFERS):
        view = memoryview(value)
        is_small = view.nbytes <= _MAX_BYTES or not view.c_contiguous
        return name, view.tobytes() if is_small else _content(np.frombuffer(view, np.uint8))
    return name, len(value) if isinstance(value, _CONTAINERS) else id(value)


def small_content(tensor: Tensor) -> bytes:
    """Returns the bytes of a small tensor; empty for others."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.nbytes > _SMALL_BYTES:
        return b""
    return bytes(tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).tolist())


def _content(values: Any) -> bytes:
    if values.dtype.hasobject:
        return b""
    if values.nbytes <= _MAX_BYTES:
        return values.tobytes()
    per_dim = round(_SAMPLED_ELEMENTS ** (1 / max(1, values.ndim)))
    return values[tuple(slice(None, None, max(1, size // per_dim)) for size in values.shape)].tobytes()


def _referenced_objects(value: Any, through_code: bool) -> Iterator[Any]:
    """Yields the referenced objects in a fixed order."""
    if isinstance(value, Tensor | np.ndarray | ModuleType):
        return
    if isinstance(value, Mapping):
        yield from itertools.chain.from_iterable(_first_items(value.items()))
    elif isinstance(value, list | tuple | deque):
        yield from _first_items(value)
        yield from attribute_values(value)
    elif isinstance(value, set | frozenset):
        yield from sorted(map(repr, _first_items(value)))
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, DESCRIPTORS):
        yield function_of(value)
    elif isinstance(value, FunctionType):
        yield from _parts_of_function(value, through_code)
    elif isinstance(value, type):
        if not is_library_object(value):
            yield from (part for name, part in vars(value).items() if not name.startswith("__") or callable(part))
    else:
        yield from attribute_values(value)
        yield from type(value).__mro__


def function_of(descriptor: Any) -> Any:
    """Returns the function of one of `DESCRIPTORS`; of a property the one that reads it."""
    if isinstance(descriptor, property):
        return descriptor.fget
    return descriptor.func if isinstance(descriptor, functools.cached_property) else descriptor.__func__


def _parts_of_function(function: FunctionType, through_code: bool) -> Iterator[Any]:
    if is_library_object(function):
        return
    yield from function_parts(function)
    follows_code = through_code and function.__name__ != "__init__" and _is_of_script(str(function.__module__))
    for value in named_globals(function):
        is_followed = follows_code and not isinstance(value, ModuleType)
        if isinstance(value, type | FunctionType):
            is_followed = is_followed and _is_of_script(str(value.__module__))
        if is_followed or isinstance(value, (*PLAIN, list, dict, Tensor, np.ndarray)):
            yield value


def function_parts(function: FunctionType) -> Iterator[Any]:
    """Yields what a function itself refers to: closure, defaults and attributes."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the cell is still empty
            continue
    yield from (function.__defaults__, function.__kwdefaults__, vars(function))


def named_globals(function: FunctionType) -> Iterator[Any]:
    """Yields the globals that the function's code names, and what it names of the script's own modules."""
    names, visited = tuple(names_in_code(function.__code__)), set[int]()
    waiting = deque(function.__globals__.get(name) for name in global_names(function.__code__))
    while waiting:
        value = waiting.popleft()
        yield value
        if isinstance(value, ModuleType) and id(value) not in visited and _is_of_script(value.__name__):
            visited.add(id(value))
            waiting.extend(vars(value)[name] for name in names if name in vars(value))


@functools.lru_cache(maxsize=4096)
def _is_of_script(module: str) -> bool:
    """Whether a module is neither Python's nor installed."""
    if module == "__main__":
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return isinstance(file, str) and not is_installed(file)


@functools.lru_cache(maxsize=4096)
def global_names(code: CodeType) -> tuple[str, ...]:
    """Returns the names of the globals that the code, and functions within, read."""
    names = [one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    for const in code.co_consts:
        if isinstance(const, CodeType):
            names += global_names(const)
    return tuple(dict.fromkeys(names))


def attribute_values(value: Any) -> Iterator[Any]:
    """Yields the values of an object's attributes and slots, without those of its class."""
    if hasattr(value, "__dict__"):
        yield from vars(value).values()
    for owner in type(value).__mro__:
        slots = vars(owner).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield getattr(value, name, None)


def _first_items(items: Any) -> Iterator[Any]:
    return itertools.islice(items, _MAX_ITEMS)


def is_library_object(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] in _LIBRARIES
