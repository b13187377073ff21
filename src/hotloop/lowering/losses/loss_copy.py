"""Trial calls of a loss: on copies that share no mutable state with the loss, in float64, and to find a sum over the batch."""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections.abc import Callable
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.core.installed_code import is_package_path
from hotloop.core.random.rng import preserve_generators
from hotloop.core.torch_private import TorchDispatchMode, tree_any, tree_map_only
from hotloop.data.batch_tree import map_tensors, tree_tensors
from hotloop.data.dataset_changes import names_in_code
from hotloop.data.row_count import count_rows
from hotloop.errors import describe_error
from hotloop.task import Task

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


_RELATIVE_TOLERANCE = 1e-4
"""Relative tolerance of a multiple of a loss."""


def check_loss_sum(task: Task, output: Any, target: Any, device: torch.device) -> str:
    """Returns one line if the loss grows with the batch, or if the check fails; empty otherwise.

    The check calls a copy of the loss on repeated outputs and targets, and restores the random generators. The check doesn't
    call the model.

    Args:
        output: the model's output for one batch.
        target: the target of the same batch.
    """
    if task.loss is None or task.objective.sums_samples or task.objective.reduction == "sum":
        return ""
    try:
        once, *several = _losses_of_copies(task, output, target, device)
    except LossNotCopied as error:
        return f"the test for a loss that is a sum over the batch is left out: {error}"
    except Exception as error:
        return f"the test for a loss that is a sum over the batch failed to run: {describe_error(error)}"
    if not several or not math.isfinite(once) or not once:
        return ""
    if any(abs(more - times * once) > _RELATIVE_TOLERANCE * abs(once) for times, more in enumerate(several, 2)):
        return ""
    return (
        "the loss is a sum over the batch: twice the samples have twice the loss, so the loss and the size of "
        "a step depend on batch_size; divide it by the number of samples"
    )


def _losses_of_copies(task: Task, output: Any, target: Any, device: torch.device) -> list[float]:
    """Returns the losses of the batch, of two copies and of three copies of it; empty if its rows can't be repeated."""
    whole = (output, target)
    rows, doubt = count_rows(whole)
    if doubt or not all(value.ndim and len(value) == rows for value in tree_tensors(whole)):
        return []
    found = []
    with preserve_generators(device), torch.no_grad():
        generators = torch.get_rng_state()
        for times in (1, 2, 3):
            torch.set_rng_state(generators)
            repeated = map_tensors(lambda value, times=times: torch.cat([value.detach()] * times), whole)  # type: ignore[misc]
            loss = copy_loss(task.loss)  # type: ignore[arg-type]
            found.append(float(loss(*repeated)))
    return found


_WIDE_DTYPES = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def widen_model(model: nn.Module) -> nn.Module:
    """Converts the model to float64 in place, including complex tensors, which `module.double()` skips; returns the model."""
    return model.double()._apply(to_float64)


class Float64Mode(TorchDispatchMode):
    """Converts the other operands of each operation with a float64 operand to float64.

    Class weights of a loss, for example, may be in a closure, in arguments of a `functools.partial` or in globals, which
    `module.double()` doesn't convert.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not function._schema.is_mutable and tree_any(_is_float64, (args, kwargs)):
            args, kwargs = tree_map_only(Tensor, to_float64, (args, kwargs))
            if kwargs.get("dtype") in _WIDE_DTYPES:  # a cast to the model's dtype, which is float64 here
                kwargs = {**kwargs, "dtype": _WIDE_DTYPES[kwargs["dtype"]]}
        return function(*args, **kwargs)


def to_float64(value: Tensor) -> Tensor:
    """Returns a float32 or complex64 tensor in double precision; other tensors unchanged."""
    return value.to(_WIDE_DTYPES[value.dtype]) if value.dtype in _WIDE_DTYPES else value


def _is_float64(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _WIDE_DTYPES.values()
