"""Notices each change of the objects that a data set refers to, in this process and in its forks.

`dataset_changes` has a summary that leaves out what is large. Here nothing is left out: an object whose changes can't be
noticed makes the data set unfit.
"""

from __future__ import annotations

import copyreg
import functools
import io
import operator
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotloop.data.dataset_changes import (
    BUFFERS,
    DESCRIPTORS,
    PLAIN,
    attribute_values,
    function_of,
    function_parts,
    is_library_object,
    named_globals,
    small_content,
    value_summary,
)

_MAX_OBJECTS, _MAX_ITEMS = 20_000, 1_000
"""Limits of followed objects in total, and of items of a container that are followed; further items must be constants."""

_MAX_BYTES = 1 << 22
"""Largest array that is compared at each check."""

_MAX_BUFFER_BYTES = 1 << 16
"""Largest other memory that is compared at each check."""

_CONSTANTS = (*PLAIN, PurePath, np.generic)

_CONTAINERS = (list, tuple, set, frozenset, deque)

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)

_CODE = (
    *(type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, functools.partial),
    *DESCRIPTORS,
    *(GetSetDescriptorType, MemberDescriptorType, MethodDescriptorType),
    *(WrapperDescriptorType, ClassMethodDescriptorType),
)


class DatasetWatch:
    """The objects that a data set refers to, with their state at one moment.

    Args:
        dataset: the data set; several objects may be given as a tuple.

    Attributes:
        unfit: why a change could stay unnoticed, or a fork would share an object; empty if neither is so.
    """

    def __init__(self, dataset: Any) -> None:
        self._known: list[tuple[Any, tuple[Any, ...], Any]] = []
        self.unfit = self._follow(dataset)

    def _follow(self, dataset: Any) -> str:
        visited, waiting = set[int](), deque([dataset])
        while waiting:
            value = waiting.popleft()
            if _is_constant_value(value) or id(value) in visited:
                continue
            visited.add(id(value))
            if len(visited) > _MAX_OBJECTS:
                return f"it refers to more than {_MAX_OBJECTS:,} objects, whose changes can't be noticed at each batch"
            if why := _why_unfit(value):
                return why
            parts = _parts(value)
            self._known.append((value, parts, _content(value)))
            waiting.extend(part for part in parts if not _is_flat(part))
        return ""

    def has_changed(self) -> bool:
        """Whether an object was changed or replaced since."""
        for value, parts, content in self._known:
            now = _parts(value)
            if len(parts) != len(now) or not all(map(operator.is_, parts, now)) or content != _content(value):
                return True
        return False


def _parts(value: Any) -> tuple[Any, ...]:
    """Returns the objects that a value refers to, in a fixed order."""
    if isinstance(value, Tensor | ModuleType) or _is_table(value):
        return ()
    if isinstance(value, np.ndarray):
        return tuple(value.flat) if value.dtype.hasobject else ()
    if isinstance(value, _CODE):
        return tuple(_parts_of_code(value))
    items: tuple[Any, ...] = ()
    if isinstance(value, Mapping):
        items = (*value.keys(), *value.values())
    elif isinstance(value, _CONTAINERS):
        items = tuple(value)
    if type(value) in (dict, *_CONTAINERS):
        return items
    return (*items, *attribute_values(value), *type(value).__mro__)


def _parts_of_code(value: Any) -> Iterator[Any]:
    if isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, BuiltinFunctionType):
        yield value.__self__
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, DESCRIPTORS):
        yield function_of(value)
    elif is_library_object(value) or str(getattr(value, "__module__", "")).partition(".")[0] in sys.stdlib_module_names:
        return
    elif isinstance(value, type):
        yield from (
            part
            for name, part in vars(value).items()
            if not name.startswith(("__", "_abc_")) or isinstance(part, FunctionType)
        )
    elif isinstance(value, FunctionType):
        yield from function_parts(value)
        yield from (part for part in named_globals(value) if not isinstance(part, ModuleType))


def _content(value: Any) -> Any:
    """Returns the state of a value that has no parts."""
    if isinstance(value, Tensor):
        version = None if value.is_inference() else value._version
        return tuple(value.shape), value.data_ptr(), version, small_content(value)
    if isinstance(value, np.void):
        return value.tobytes()
    if isinstance(value, BUFFERS):
        return value_summary(value)
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject or _is_constant(value) else value.tobytes()
    if _is_table(value):
        numbers = sys.modules["pandas"].util.hash_pandas_object(value).to_numpy()
        return tuple(getattr(value, "columns", ())), numbers.tobytes()
    return None


def _why_unfit(value: Any) -> str:
    """Returns why an object can't be followed, or used in a fork; empty if it can."""
    kind = type(value).__name__
    if isinstance(value, _CODE):
        return ""
    if isinstance(value, Tensor):
        is_plain = value.device.type == "cpu" and value.layout == torch.strided
        return "" if is_plain else f"it holds a tensor that is {value.layout} on {value.device.type}"
    if isinstance(value, io.IOBase):
        return "it holds an open file, which can't be compared, and which its processes would share"
    if any(value is known for known in _global_generators()):
        return ""  # whose states are compared
    if isinstance(value, _GENERATORS):
        return f"it has a random generator of its own ({kind})"
    if isinstance(value, Iterator):
        return f"it holds an iterator ({kind})"
    unnoticed = f"it refers to {_described(value)}, whose changes can't be noticed at each batch"
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return "" if all(map(_is_flat, value.flat)) else unnoticed
        return "" if value.nbytes <= _MAX_BYTES or _is_constant(value) else unnoticed
    if _is_table(value):
        return "" if all(map(_is_flat, value.to_numpy().flat)) else unnoticed
    if isinstance(value, Mapping | list | tuple | set | frozenset | deque):
        items = (*value.keys(), *value.values()) if isinstance(value, Mapping) else value
        if len(value) > _MAX_ITEMS and not all(map(_is_flat, items)):
            return unnoticed
    elif isinstance(value, BUFFERS):
        if memoryview(value).nbytes > _MAX_BUFFER_BYTES:
            return unnoticed
    elif _is_opaque(value):
        return unnoticed
    return (
        ""
        if _is_copyable(value)
        else f"it holds an object that can't be compared, and that its processes would share ({kind})"
    )


def _global_generators() -> tuple[Any, ...]:
    return random.random.__self__, np.random.rand.__self__, torch.default_generator  # type: ignore[attr-defined]  # types lack `__self__`


def _is_opaque(value: Any) -> bool:
    """Whether a change of the value itself can't be seen in its attributes."""
    is_image = type(value).__module__.partition(".")[0] == "PIL" and hasattr(value, "tobytes")
    return is_image or (not hasattr(value, "__dict__") and type(value).__hash__ is None)


def _is_copyable(value: Any) -> bool:
    """Whether Python can copy an object; locks, sockets and connections can't be copied."""
    try:
        return (
            type(value) is MappingProxyType
            or type(value) in copyreg.dispatch_table
            or value.__reduce_ex__(2) is not None
        )
    except Exception:  # `__reduce_ex__` of the script's own class may raise anything
        return False


def _is_flat(item: Any) -> bool:
    """Whether an item of a long container can't change."""
    return _is_constant_value(item) or (type(item) is tuple and all(map(_is_constant_value, item)))


def _is_constant_value(value: Any) -> bool:
    """Whether a value can't change; a record of NumPy can."""
    return isinstance(value, _CONSTANTS) and not isinstance(value, np.void)


def _is_constant(array: np.ndarray) -> bool:
    """Whether nothing can write into an array, such as one of a file that is open for reading."""
    base: Any = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return False
        base = base.base
    return True


def _is_table(value: Any) -> bool:
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, pandas.DataFrame | pandas.Series)


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of shape {'x'.join(map(str, value.shape))}"
    if isinstance(value, Mapping | list | tuple | set | frozenset | deque):
        return f"a {type(value).__name__} of {len(value):,} items"
    return f"an object of {type(value).__module__}.{type(value).__name__}"
