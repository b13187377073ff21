"""Copies of a loss for trial calls: a copy shares no mutable state with the loss."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from hotloop.core.installed_code import is_package_path
from hotloop.data.dataset_changes import names_in_code
from hotloop.errors import describe_error

_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "hotloop"}


class LossNotCopied(Exception):
    """A part of the loss can't be copied; the text names the part and the reason."""


def copy_loss(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a copy of the loss, including its closures, its defaults and the globals that its code names.

    Raises:
        LossNotCopied: a part of the loss can't be copied.
    """
    return _copy_value(loss, {}, "the loss")


def _copy_value(value: Any, known: dict[int, Any], name: str) -> Any:
    if id(value) in known:
        return known[id(value)]
    if inspect.ismodule(value) or inspect.isclass(value):
        return value
    if isinstance(value, partial):
        arguments = [_copy_value(item, known, name) for item in value.args]
        keywords = {key: _copy_value(item, known, key) for key, item in value.keywords.items()}
        return partial(_copy_value(value.func, known, name), *arguments, **keywords)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _copy_value(value.__self__, known, name))
    if isinstance(value, FunctionType):
        return value if _is_library_function(value) else _copy_function(value, known)
    try:
        return copy.deepcopy(value, known)
    except Exception as error:
        raise LossNotCopied(f"{name} can't be copied ({describe_error(error)})") from error


def _copy_function(function: FunctionType, known: dict[int, Any]) -> FunctionType:
    namespace = dict(function.__globals__)
    cells = [CellType() for _ in function.__closure__ or ()]
    made = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, tuple(cells))
    known[id(function)] = made
    made.__kwdefaults__ = function.__kwdefaults__
    made.__defaults__ = (
        tuple(_copy_value(item, known, function.__name__) for item in function.__defaults__ or ()) or None
    )
    vars(made).update({key: _copy_value(item, known, key) for key, item in vars(function).items()})
    for name, cell, own in zip(function.__code__.co_freevars, function.__closure__ or (), cells, strict=True):
        try:
            content = cell.cell_contents
        except ValueError:  # a variable without a value yet
            continue
        own.cell_contents = _copy_value(content, known, name)
    for name in set(names_in_code(function.__code__)) & namespace.keys():
        namespace[name] = _copy_value(namespace[name], known, name)
    return made


def _is_library_function(function: FunctionType) -> bool:
    package = str(function.__module__).partition(".")[0]
    return package in _LIBRARIES or is_package_path(function.__code__.co_filename)
