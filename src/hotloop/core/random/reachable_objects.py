"""Walks the objects that a user's object reaches through attributes, items, and variables of its functions."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotloop.core.installed_code import is_package_path

MAX_OBJECTS = 20_000
"""Largest number of objects in a walk, which takes about 60 ms."""

MAX_ITEMS = 256
"""Items of a container that a walk opens; of further items, up to `_MAX_SCANNED`, a walk lists only matches."""

_MAX_SCANNED = 100_000

_LEAF_TYPES = (
    *(Tensor, np.ndarray, np.generic, torch.UntypedStorage, torch.dtype, torch.device, torch.Size),
    *(type(None), bool, int, float, complex, bytes, bytearray, str, range, slice, type(...)),
)
_LIBRARY_ATTRIBUTES = {nn.Module: set(vars(nn.Module())), torch.optim.Optimizer: {"state", "param_groups", "defaults"}}
_HOOKS = sorted(name for name in _LIBRARY_ATTRIBUTES[nn.Module] if name.endswith("_hooks"))
_SKIPPED_MODULES = sys.stdlib_module_names | {"torch", "numpy", "hotloop"}
_SKIPPED_OBJECTS = (_SKIPPED_MODULES - {"types", "collections", "argparse"}) | {
    *("pandas", "polars", "pyarrow", "PIL", "h5py", "zarr", "dask", "xarray", "matplotlib")
}
_WALKED_MODULES = ("torch.utils.data", "torchvision", "hotloop.data")
_CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__", "__setstate__", "__init_subclass__"})

ObjectPlace = tuple[Callable[[Any, Any], Any], Any, Any]
"""`(get, holder, key)`; `get(holder, key)` returns the current object at the place."""

_Child = tuple[str, Any, ObjectPlace | None]


@dataclass(frozen=True, slots=True)
class ReachedObject:
    """An object of a walk.

    Attributes:
        path: the names that lead to the object, such as `data.transform.steps[2].rng`.
        value: the object.
        place: its place; None if nothing can replace the object there.
    """

    path: str
    value: Any
    place: ObjectPlace | None


@dataclass
class ObjectWalk:
    """The result of a walk.

    Attributes:
        matches: the wanted objects; an object at several places is listed several times.
        named: the objects of classes with a wanted name.
        functions: (path, function) of the user's own functions.
        attributes: the attribute dictionaries, nearest objects first.
        is_cut_short: paths of containers with more than `MAX_ITEMS` items.
        is_complete: False if there are more objects than a walk visits.
    """

    matches: list[ReachedObject] = field(default_factory=list)
    named: list[ReachedObject] = field(default_factory=list)
    functions: list[tuple[str, FunctionType]] = field(default_factory=list)
    attributes: list[dict[str, Any]] = field(default_factory=list)
    is_cut_short: list[str] = field(default_factory=list)
    is_complete: bool = True


def walk_objects(
    owners: Mapping[str, Any], is_wanted: Callable[[type], bool], names: Set[str] = frozenset()
) -> ObjectWalk:
    """Visits the objects that the owners reach, nearest first, in the same order in each process.

    A walk visits attributes, items of containers, closures, default arguments, partial functions, the objects of bound
    methods, classes, and globals that functions read. A walk doesn't open tensors, arrays, tables and modules'
    parameters. Of functions of installed packages, a walk visits only wanted globals.

    Args:
        owners: by their names in messages.
        is_wanted: whether objects of a class are wanted.
        names: names of classes whose objects are listed in `ObjectWalk.named`.
    """
    return _Walker(is_wanted, names).walk(owners)


class _Walker:
    def __init__(self, is_wanted: Callable[[type], bool], names: Set[str]) -> None:
        self._is_wanted, self._names = is_wanted, names
        self._found = ObjectWalk()
        self._seen: dict[int, Any] = {}  # references to the objects, so that Python reuses no id
        self._classes: set[type] = set()

    def walk(self, owners: Mapping[str, Any]) -> ObjectWalk:
        queue: deque[ReachedObject] = deque()
        self._add(queue, "", ((name, value, None) for name, value in owners.items()))
        while queue:
            reached = queue.popleft()
            value, kind = reached.value, type(reached.value)
            if self._is_wanted(kind):
                self._found.matches.append(reached)
            elif len(self._seen) == MAX_OBJECTS:
                self._found.is_complete = False
                break
            elif id(value) not in self._seen:
                self._seen[id(value)] = value
                if kind.__name__ in self._names:
                    self._found.named.append(reached)
                self._add(queue, reached.path, self._open_object(reached.path, value))
        return self._found

    def _add(self, queue: deque[ReachedObject], path: str, children: Iterable[_Child]) -> None:
        for name, item, place in children:
            if not _is_leaf(type(item)):  # type: ignore[arg-type]
                queue.append(ReachedObject(path + name, item, place))

    def _open_object(self, path: str, value: Any) -> Iterator[_Child]:
        if isinstance(value, dict):
            yield from self._items(path, value, value.items())
        elif isinstance(value, list | tuple | deque):
            yield from self._items(path, value, enumerate(value))
        elif isinstance(value, set | frozenset):
            yield from (("{}" if len(value) > 1 else "[0]", item, None) for item in islice(value, MAX_ITEMS))
        elif isinstance(value, FunctionType):
            yield from self._function_parts(path, value)
        elif isinstance(value, type):
            yield from self._class_parts(value, _belongs_to_user(value), constructors=True)
        elif not isinstance(value, ModuleType):
            yield from self._object_parts(value)
        elif _belongs_to_user(value):
            yield from ((f".{name}", item, (operator.getitem, vars(value), name)) for name, item in vars(value).items())

    def _items(self, path: str, container: Any, items: Iterable[tuple[Any, Any]]) -> Iterator[_Child]:
        queue = iter(items)
        for key, item in islice(queue, MAX_ITEMS):
            yield f"[{key!r}]", item, (operator.getitem, container, key)
        if len(container) <= MAX_ITEMS:
            return
        self._found.is_cut_short.append(path)
        values = container.values() if isinstance(container, dict) else container
        if any(map(self._is_wanted, set(map(type, islice(values, _MAX_SCANNED))))):
            for key, item in islice(queue, _MAX_SCANNED):
                if self._is_wanted(type(item)):
                    yield f"[{key!r}]", item, (operator.getitem, container, key)

    def _object_parts(self, value: Any) -> Iterator[_Child]:
        yield from _callable_parts(value)
        kind = type(value)
        if not _is_open(kind):  # type: ignore[arg-type]
            return
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            self._found.attributes.append(own)
            library = [names for base, names in _LIBRARY_ATTRIBUTES.items() if isinstance(value, base)]
            for name in sorted(own.keys() - set().union(*library), key=str):
                yield f".{name}", own[name], (operator.getitem, own, name)
        if isinstance(value, nn.Module):
            yield from (
                (f".{name}", own[name], (operator.getitem, own, name)) for name in _HOOKS if own and own.get(name)
            )
            yield from ((f".{name}", item, None) for name, item in value._modules.items())
        if isinstance(value, torch.jit.ScriptModule):
            yield from _script_attributes(value)
        for name, descriptor in _slots_of(kind):  # type: ignore[arg-type]
            with suppress(AttributeError):  # the slot has no value yet
                yield f".{name}", descriptor.__get__(value), (getattr, value, name)
        for base in () if kind in self._classes else kind.__mro__:
            if base not in self._classes:
                self._classes.add(base)
                yield from self._class_parts(base, _belongs_to_user(base), constructors=False)

    def _class_parts(self, kind: type, is_users: bool, *, constructors: bool) -> Iterator[_Child]:
        if not is_users:
            for name, get, holder, key in _library_matches(kind, self._is_wanted):
                yield f".{name}", get(holder, key), (get, holder, key)
            return
        for name, item in list(vars(kind).items()):
            if name in _CONSTRUCTORS and not constructors:
                continue
            if isinstance(item, property | functools.cached_property | staticmethod | classmethod):
                item = getattr(item, "fget", None) or getattr(item, "func", None) or getattr(item, "__func__", None)
            if isinstance(item, FunctionType) or not (name.startswith("__") or inspect.ismemberdescriptor(item)):
                yield f".{name}", item, (getattr, kind, name)
        if constructors:
            yield from ((f".{base.__name__}", base, None) for base in kind.__bases__)

    def _function_parts(self, path: str, function: FunctionType) -> Iterator[_Child]:
        code, own = function.__code__, vars(function)
        yield from ((f".{name}", item, (operator.getitem, own, name)) for name, item in own.items())
        defaults = function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        yield from ((f".{name}", item, None) for name, item in zip(names, defaults, strict=False))
        yield from ((f".{name}", item, None) for name, item in (function.__kwdefaults__ or {}).items())
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            with suppress(ValueError):  # a variable that has no value yet
                yield f".{name}", cell.cell_contents, None
        is_users = _belongs_to_user(function)
        if is_users and function.__name__ not in _CONSTRUCTORS:
            self._found.functions.append((path, function))
        for name, holder, key in _globals_of(function):
            if is_users or self._is_wanted(type(holder[key])):
                yield f".{name}", holder[key], (operator.getitem, holder, key)


def _callable_parts(value: Any) -> Iterator[_Child]:
    if isinstance(value, MethodType):
        yield from (("", value.__self__, None), ("", value.__func__, None))
    elif isinstance(value, functools.partial):
        yield from (("", value.func, None), (".args", value.args, None), (".keywords", value.keywords, None))
    elif isinstance(value, BuiltinFunctionType) and not isinstance(value.__self__, ModuleType):
        yield "", value.__self__, None
    elif callable(value) and type(value).__module__ == "functools" and hasattr(value, "__wrapped__"):
        yield "", value.__wrapped__, None


def _script_attributes(module: Any) -> Iterator[_Child]:
    kind = getattr(module, "_concrete_type", None)  # a loaded module has no concrete type and no generator
    for name in () if kind is None else kind.get_attributes():
        with suppress(AttributeError):
            yield f".{name}", getattr(module, name), (getattr, module, name)


@cache
def _slots_of(kind: type) -> tuple[tuple[str, Any], ...]:
    bases = [base for base in kind.__mro__ if "__slots__" in vars(base)]
    return tuple(item for base in bases for item in vars(base).items() if inspect.ismemberdescriptor(item[1]))


@cache
def _is_leaf(kind: type) -> bool:
    return issubclass(kind, _LEAF_TYPES)


@cache
def _is_open(kind: type) -> bool:
    """Returns whether attributes of such objects may contain the user's objects."""
    module = str(kind.__module__)
    if issubclass(kind, nn.Module | torch.optim.Optimizer):
        return True
    if module.startswith(_WALKED_MODULES):
        return not kind.__name__.startswith("_")  # a loader's own iterator is created anew
    return module.partition(".")[0] not in _SKIPPED_OBJECTS or kind.__name__ in ("_local", "vectorize")


def _belongs_to_user(value: Any) -> bool:
    if isinstance(value, ModuleType):
        name, file = value.__name__, str(getattr(value, "__file__", "") or "")
    else:
        name = str(value.__module__)
        file = value.__code__.co_filename if isinstance(value, FunctionType) else ""
        file = file or str(getattr(sys.modules.get(name), "__file__", "") or "")
    return name.partition(".")[0] not in _SKIPPED_MODULES and not is_package_path(file)


def _globals_of(function: FunctionType) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yields `(name, namespace, key)` of a function's globals, also in the user's modules: `settings.rng`."""
    namespace, names = function.__globals__, names_of(function.__code__)
    for name in names:
        value = namespace.get(name, sys.modules.get(name))  # the function may contain the import
        if not isinstance(value, ModuleType):
            if name in namespace:
                yield name, namespace, name
        elif _belongs_to_user(value):
            yield from ((f"{name}.{inner}", vars(value), inner) for inner in names if inner in vars(value))


@cache
def names_of(code: CodeType) -> tuple[str, ...]:
    inside = [name for item in code.co_consts if isinstance(item, CodeType) for name in names_of(item)]
    return tuple(dict.fromkeys([*code.co_names, *inside]))


@cache
def _library_matches(kind: type, is_wanted: Callable[[type], bool]) -> tuple[tuple[str, Any, Any, Any], ...]:
    """Returns the places of wanted objects in an installed class and in its functions' globals, which don't change."""
    if str(kind.__module__).partition(".")[0] in _SKIPPED_MODULES:
        return ()
    found: list[tuple[str, Any, Any, Any]] = []
    for name, item in vars(kind).items():
        if is_wanted(type(item)):
            found.append((name, getattr, kind, name))
        elif isinstance(item, FunctionType):
            places = ((f"{name}.{inner}", holder, key) for inner, holder, key in _globals_of(item))
            found += [
                (path, operator.getitem, holder, key) for path, holder, key in places if is_wanted(type(holder[key]))
            ]
    return tuple(found)
