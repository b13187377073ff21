"""The values in the user's objects, alone or with their owner: an object, class, closure, module or container."""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from functools import cache, cached_property, partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from hotloop.core.installed_code import is_package_path

PutValue = Callable[[Any], None]
HeldValue = tuple[str, Any, PutValue | None]
"""`(name, value, put)`, where `put` replaces the value; `put` is None if the value can't be replaced."""

_MODULE_ATTRIBUTES = vars(nn.Module()).keys()
_WRAPPING_PACKAGES = ("torch.utils.data", "hotloop.data")
"""Packages whose objects and functions wrap the user's objects."""


def values_in(value: Any, own: Set[str]) -> Iterator[HeldValue]:
    """Yields the values in an object, class, function or module.

    Args:
        own: installed packages that count as the user's code, because the step or the loss belongs to them.
    """
    if isinstance(value, torch.jit.ScriptModule):
        return
    if isinstance(value, nn.Module):
        yield from _module_values(value)
    elif isinstance(value, type):
        yield from ((name, item, _make_setter(value, name)) for name, item in class_members(value, own))
    elif inspect.ismodule(value):
        yield from ((name, item, partial(vars(value).__setitem__, name)) for name, item in module_members(value, own))
    elif inspect.isroutine(value) or isinstance(value, partial):
        yield from _function_values(value, own)
    elif isinstance(value, torch.optim.Optimizer):
        yield from _object_values(value, _torch_attributes())
    elif str(type(value).__module__).startswith(_WRAPPING_PACKAGES):
        yield from _object_values(value, ())
    else:
        for name, item in object_attributes(value, own):
            known = vars(value) if hasattr(value, "__dict__") else {}
            yield name, item, partial(known.__setitem__, name) if name in known else _make_setter(value, name)


@cache
def _torch_attributes() -> Set[str]:
    plain = vars(torch.optim.SGD([torch.zeros(())], lr=0.1)).keys()
    of_some = {
        "_need_device_dtype_check_for_fused",
        "_step_supports_amp_scaling",
        "_warned_capturable_if_run_uncaptured",
    }
    return plain | of_some | {"step", "_opt_called"}


def _make_setter(owner: Any, name: str) -> PutValue | None:
    if name.endswith("()") or name.startswith("class "):
        return None
    return partial(setattr, owner, name)


def _object_values(value: Any, left_out: Iterable[str]) -> Iterator[HeldValue]:
    own = getattr(value, "__dict__", {})
    yield from ((name, item, partial(own.__setitem__, name)) for name, item in own.items() if name not in left_out)
    if package_name(type(value)) != "torch":
        yield (*class_entry(value), None)


def _module_values(module: nn.Module) -> Iterator[HeldValue]:
    yield from ((name, part, None) for name, part in module._modules.items())
    yield from ((name, value, None) for name, value in module._parameters.items())
    yield from ((name, value, None) for name, value in module._buffers.items())
    yield from _object_values(module, _MODULE_ATTRIBUTES)


def _function_values(function: Any, own: Set[str]) -> Iterator[HeldValue]:
    if inspect.ismethod(function):
        yield "self", function.__self__, None
    if isinstance(function, partial):
        parts: dict[str, Any] = {"args": function.args, "keywords": function.keywords, "func": function.func}
        yield from ((name, part, None) for name, part in parts.items())
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return
    wraps = str(function.__module__).startswith(_WRAPPING_PACKAGES)
    if is_third_party(function, own) and not wraps:
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):  # the variable has no value yet
            yield name, cell.cell_contents, partial(setattr, cell, "cell_contents")
    if wraps:
        return
    yield from ((name, item, partial(vars(function).__setitem__, name)) for name, item in vars(function).items())
    yield from ((f"default {place}", item, None) for place, item in enumerate(function.__defaults__ or ()))
    yield from ((name, item, None) for name, item in (function.__kwdefaults__ or {}).items())
    yield from _global_values(list(dict.fromkeys(names_in(function.__code__))), function.__globals__, own, set())


def _global_values(
    names: Iterable[str], namespace: dict[str, Any], own: Set[str], seen: set[int]
) -> Iterator[HeldValue]:
    """Yields the globals with these names, and those in the user's modules among them, such as `settings.step`."""
    for name in names:
        value = namespace.get(name, sys.modules.get(name))  # the function may contain the import
        if not inspect.ismodule(value):
            yield from [(name, value, partial(namespace.__setitem__, name))] if name in namespace else ()
        elif id(value) not in seen and not is_third_party(value, own):
            seen.add(id(value))
            inner = _global_values(names, vars(value), own, seen)
            yield from ((f"{name}.{one}", item, put) for one, item, put in inner)


def container_items(container: Any) -> Iterator[HeldValue]:
    """Yields a container's items by key or index."""
    if isinstance(container, Mapping):
        for number, (key, item) in enumerate(container.items()):
            name = str(key) if isinstance(key, bool | int | float | str | None) else f"[{number}]"
            yield name, item, partial(container.__setitem__, key) if isinstance(container, dict) else None
    else:
        can_set = isinstance(container, list | deque)
        for place, item in enumerate(container):
            yield str(place), item, partial(container.__setitem__, place) if can_set else None


NamedValues = Iterator[tuple[str, Any]]

_SKIPPED_MODULES = sys.stdlib_module_names | {"torch", "numpy", "hotloop"}
_SKIPPED_OBJECTS = _SKIPPED_MODULES - {"types", "collections"}  # objects of these two contain a user's values


def package_name(function: Any) -> str:
    """Returns the package of a function, or of the class of an object."""
    if isinstance(function, partial):
        return package_name(function.func)
    return str(getattr(function, "__module__", None)).partition(".")[0]


def object_attributes(value: Any, own: Set[str]) -> NamedValues:
    """Yields an object's attributes, including slots, and its class if that is the user's.

    Args:
        own: installed packages that count as the user's, because the step or the loss belongs to them.
    """
    kind = type(value)
    if package_name(kind) in _SKIPPED_OBJECTS and not isinstance(value, torch.optim.Optimizer):
        return
    yield from getattr(value, "__dict__", {}).items()
    if is_third_party(kind, own):
        return
    for base in kind.__mro__:
        members = {} if is_third_party(base, own) else vars(base)
        for name in [name for name, item in members.items() if inspect.ismemberdescriptor(item)]:
            with suppress(AttributeError):  # a slot without a value
                yield name, getattr(value, name)
    yield class_entry(value)


def class_entry(value: Any) -> tuple[str, Any]:
    """Returns the class of an object under a name that no attribute has."""
    return f"class {type(value).__name__}", type(value)


def class_members(kind: type, own: Set[str]) -> NamedValues:
    """Yields the attributes, methods and base classes of a user's class."""
    if is_third_party(kind, own):
        return
    for name, item in vars(kind).items():
        if isinstance(item, property | cached_property):
            yield f"{name}()", item.fget if isinstance(item, property) else item.func
        elif inspect.isroutine(item):
            yield f"{name}()", item
        elif not name.startswith("__"):
            yield name, item
    yield from ((f"class {base.__name__}", base) for base in kind.__bases__)


def module_members(module: ModuleType, own: Set[str]) -> NamedValues:
    """Yields the names and values of a user's Python module."""
    if not is_third_party(module, own):
        yield from ((name, item) for name, item in vars(module).items() if not name.startswith("__"))


def function_references(function: Any, own: Set[str]) -> NamedValues:
    """Yields what a user's function reads beside its arguments: object, attributes, defaults, closure and globals."""
    if inspect.ismethod(function):
        yield "self", function.__self__
    if isinstance(function, partial):
        yield from (("args", function.args), ("keywords", function.keywords), ("func", function.func))
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType) or is_third_party(function, own):
        return
    code, defaults = function.__code__, function.__defaults__ or ()
    yield from vars(function).items()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=False)
    yield from (function.__kwdefaults__ or {}).items()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):  # a variable without a value
            yield name, cell.cell_contents
    yield from _named_values(list(dict.fromkeys(names_in(code))), function.__globals__, own, set())


def names_in(code: CodeType) -> Iterator[str]:
    """Yields the globals and attributes that code names, including nested functions."""
    yield from code.co_names
    for item in code.co_consts:
        if isinstance(item, CodeType):
            yield from names_in(item)


def _named_values(names: Iterable[str], namespace: Mapping[str, Any], own: Set[str], seen: set[int]) -> NamedValues:
    """Yields the values with these names, also in the user's modules among them: `settings.step`."""
    for name in names:
        value = namespace.get(name, sys.modules.get(name))  # the function itself may import it
        if not inspect.ismodule(value):
            yield from [(name, value)] if name in namespace else ()
        elif id(value) not in seen and not is_third_party(value, own):
            seen.add(id(value))
            yield from ((f"{name}.{inner}", item) for inner, item in _named_values(names, vars(value), own, seen))


def is_third_party(value: Any, own: Set[str]) -> bool:
    """Checks whether a function, class or module is part of Python, torch or an installed package.

    Such code may store values, such as a cache: its results are assumed to be the same in each step.
    """
    name = value.__name__ if inspect.ismodule(value) else str(value.__module__)
    package = name.partition(".")[0]
    if package in _SKIPPED_MODULES:
        return True
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return package not in own and is_package_path(file)
