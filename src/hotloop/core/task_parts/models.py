"""Models of a Task: modes, copies, tensors without separate memory per element, and differences of Keras.

A module that the model factory puts into evaluation mode, such as a frozen batch normalisation, stays in this mode
during training. A switch may change weights: a module may merge weights in `eval()`, and a schedule-free optimizer
replaces weights by their average. hotloop restores such weights bit by bit.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, is_lazy

from hotloop.core.torch_private import tree_leaves
from hotloop.errors import TaskError, describe_error, is_out_of_memory


def modules_in_eval(model: nn.Module) -> frozenset[str]:
    """Returns the names of the modules that stay in evaluation mode during training.

    A model that is in evaluation mode as a whole, such as a library's pretrained model, is trained in training mode.
    """
    modes = {name: module.training for name, module in model.named_modules()}
    return frozenset(name for name, training in modes.items() if not training) if any(modes.values()) else frozenset()


def describe_modes(model: nn.Module) -> str:
    """Returns a line on modules that the model factory returned in evaluation mode; empty without such modules."""
    names = sorted(modules_in_eval(model))
    if names:
        module, more = model.get_submodule(names[0]), f" and {len(names) - 1} more" * (len(names) > 1)
        place = f"{names[0]!r} ({type(module).__name__})" if names[0] else "the model itself"
        return f"{place}{more} in evaluation mode throughout training, as the model factory returned the model"
    if not model.training:
        return (
            "the model factory returned the model in evaluation mode as a whole: all of it is trained in training mode"
        )
    return ""


def set_training(model: nn.Module, in_eval: Collection[str]) -> nn.Module:
    """Switches the model to training mode except for the named modules; returns the model.

    Calls the root's `train()`, which a class may override. The named modules' own `train()` might change weights, so
    the function sets only their flag.
    """
    model.train()
    for name in in_eval:
        model.get_submodule(name).training = False
    return model


def switchable_optimizers(optimizer: torch.optim.Optimizer, wrapped: Sequence[torch.optim.Optimizer] = ()) -> list[Any]:
    """Returns the optimizers with `train()` and `eval()`: `optimizer`, or else those of `wrapped`."""
    if _has_both_modes(optimizer):
        return [optimizer]
    return list(filter(_has_both_modes, wrapped))


def _has_both_modes(optimizer: Any) -> bool:
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


@contextmanager
def evaluation_mode(modules: Sequence[nn.Module], optimizers: Sequence[Any] = ()) -> Iterator[None]:
    """Switches optimizers, then modules, to evaluation mode; restores modes and weights after the context."""
    modes = [(module, module.training) for root in modules for module in root.modules()]
    roots = [root.training for root in modules]
    contents = _SavedContents(modules) if optimizers or any(map(may_rewrite_weights, modules)) else None
    with torch.no_grad():
        for optimizer in optimizers:
            optimizer.eval()
        for root in modules:
            root.eval()
    try:
        yield
    finally:
        with torch.no_grad():
            for root, training in zip(modules, roots, strict=True):
                root.train(training)
            for optimizer in optimizers:
                optimizer.train()
        for module, training in modes:
            module.training = training
        if contents is not None:
            contents.restore()


def may_rewrite_weights(model: nn.Module) -> bool:
    """Returns whether a module overrides `train` or `eval`, and so may change weights at a switch."""
    return any(_has_mode_override(module) for module in model.modules())


def _has_mode_override(module: nn.Module) -> bool:
    kind = type(module)
    if kind.__module__.startswith("torch."):
        return False
    return any(
        name in vars(module) or getattr(kind, name) is not getattr(nn.Module, name) for name in ("train", "eval")
    )


class _SavedContents:
    def __init__(self, modules: Sequence[nn.Module]) -> None:
        owners = [module for root in modules for module in root.modules()]
        self._members = [(owner, dict(owner._parameters), dict(owner._buffers)) for owner in owners]
        tensors = [value for root in modules for value in (*root.parameters(), *root.buffers())]
        built = {id(value): value for value in tensors if not is_lazy(value)}.values()
        self._tensors = [(tensor, tensor.data, tensor.detach().clone()) for tensor in built]

    @torch.no_grad()
    def restore(self) -> None:
        for owner, parameters, buffers in self._members:
            _restore_contents(owner._parameters, parameters)
            _restore_contents(owner._buffers, buffers)
        for tensor, data, numbers in self._tensors:
            if tensor.data_ptr() != data.data_ptr() or tensor.shape != data.shape:
                tensor.data = data
            tensor.data.copy_(numbers)


def _restore_contents(now: dict[str, Any], before: dict[str, Any]) -> None:
    if any(now.get(name) is not value for name, value in before.items()):
        now.clear()
        now.update(before)


class NotCopiedError(TaskError):
    """A model can't be copied."""


def copy_model(model: nn.Module) -> nn.Module:
    """Returns a deep copy of a model.

    Unlike `copy.deepcopy`, the function also copies uninitialised buffers, and attributes that each forward computes
    from parameters, such as the `weight` of `torch.nn.utils.weight_norm` and of pruned layers.

    Raises:
        NotCopiedError: the model has an object that can't be copied.
    """
    known: dict[int, Any] = {
        id(value): UninitializedBuffer(dtype=value.dtype)  # type: ignore[call-arg]
        for value in model.buffers()
        if isinstance(value, UninitializedBuffer)
    }
    attributes = [value for module in model.modules() for value in tree_leaves(vars(module))]
    computed = [value for value in attributes if isinstance(value, Tensor) and not value.is_leaf]
    known |= {id(value): value.detach().clone() for value in computed}
    try:
        return copy.deepcopy(model, known)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise NotCopiedError(
            f"the model can't be copied: {describe_error(error)}",
            expected="modules that copy.deepcopy takes",
            fix="build it in a function, and store nothing in its attributes that can't be copied",
        ) from error


def check_memory(model: nn.Module, owner: str = "model") -> None:
    """Rejects tensors that a checkpoint can't store, and parameters that an optimizer can't update.

    Raises:
        TaskError: a tensor is sparse or quantized, or a trainable parameter has elements that share memory.
    """
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for what, tensors in (("parameter", parameters), ("buffer", buffers)):
        for name, value in tensors.items():
            if not is_lazy(value) and (value.layout is not torch.strided or value.is_quantized):
                kind = "quantized" if value.is_quantized else f"sparse ({value.layout})"
                raise TaskError(
                    f"the {what} {name!r} of the {owner} is {kind}",
                    expected="a dense tensor, which a checkpoint can hold",
                    fix="register the tensors that it is made of, such as its indices and values, as buffers, and "
                    "build it from them in the forward pass",
                )
    for name, value in parameters.items():
        if value.requires_grad and not is_lazy(value) and has_overlap(value):
            raise TaskError(
                f"elements of the parameter {name!r} of the {owner} share memory: its shape is {tuple(value.shape)} and its "
                f"strides are {value.stride()}",
                expected="a parameter with memory for each element, which an optimizer can update",
                fix="make it from a clone, or expand it in the forward pass",
            )


def has_overlap(value: Tensor) -> bool:
    """Returns whether two elements of a tensor share memory, as in an expanded tensor."""
    dims = sorted((stride, size) for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1)
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Returns whether two dense tensors share the memory of any element."""
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata or not (one.numel() and other.numel()):
        return False
    first, second = _byte_range(one), _byte_range(other)
    if first.stop <= second.start or second.stop <= first.start:
        return False
    if one.itemsize != other.itemsize:
        return True
    places = torch.arange(max(first.stop, second.stop) // one.itemsize)
    first_elements, second_elements = (
        places.as_strided(value.shape, value.stride(), value.storage_offset()).flatten() for value in (one, other)
    )
    return bool(torch.isin(first_elements, second_elements).any())


def _byte_range(value: Tensor) -> range:
    reach = sum(stride * (size - 1) for stride, size in zip(value.stride(), value.shape, strict=True))
    first = int(value.storage_offset())
    return range(first * value.itemsize, (first + int(reach) + 1) * value.itemsize)


def is_gapless(value: Tensor) -> bool:
    """Whether a tensor's elements fill a contiguous range of memory, each once, in any order, as fused kernels need."""
    filled = 1
    dimensions = [(stride, size) for stride, size in zip(value.stride(), value.shape, strict=True) if size != 1]
    for stride, size in sorted(dimensions):
        if stride != filled:
            return value.numel() == 0
        filled *= size
    return True


def call_arguments(model: nn.Module) -> dict[str, Any]:
    """Returns the keyword arguments of a call of `model`: a Keras model takes `training` in each call."""
    return {"training": model.training} if _is_keras(type(model).__mro__) else {}


@lru_cache(maxsize=256)
def _is_keras(bases: tuple[type, ...]) -> bool:
    return any(base.__module__.startswith("keras.") for base in bases)


def default_device(model: nn.Module | None) -> AbstractContextManager[Any]:
    """Makes Keras create tensors on the model's device (None: the CPU), not on its default, the accelerator."""
    if "keras.src.backend.torch" not in sys.modules:
        return nullcontext()
    parameter = next(model.parameters(), None) if model is not None else None
    return sys.modules["keras"].device("cpu" if parameter is None else str(parameter.device))


def restart_names() -> None:
    """Makes Keras number its layers from the beginning.

    Keras counts layers per process, and parameter names contain the numbers (`dense_3`). Without a restart, a second
    copy of a model would have other names than its checkpoint.
    """
    naming = sys.modules.get("keras.src.utils.naming")
    if naming is not None:
        naming.reset_uids()


def is_built(module: nn.Module) -> bool:
    """Returns whether a module has all its variables; Keras creates variables at the first input."""
    return getattr(module, "built", True) is not False
