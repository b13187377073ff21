"""One training call of a module: what is recorded of it for a proof, and reasons why a module of a script stays as it is."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, distributed, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from hotloop.core.installed_code import is_installed
from hotloop.core.torch_private import dispatch_mode_count, function_mode_count, peek_interpreter_stack, tracing_state
from hotloop.profiler.base.transparency import hide_from_compiler

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")

_COPIES, _SPARE_BYTES = 8, 512 << 20
"""Free memory that a proof needs: multiples of the module's tensors, and bytes for its activations and the compiler."""

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)

_TWICE = re.compile(r"create_graph\s*=(?!\s*False)|autograd\.functional|\bhessian\b|\bfunctorch\b")

TWICE = "a compiled module can't be differentiated twice"


@hide_from_compiler
class RecordedCall:
    """A call that can be repeated in a fork of the process, at the end of the script's backward.

    Args:
        module: the script's own object, not a copy.
        args, kwargs: of the call, plain tensors on the CPU and plain values; the tensors are copied.

    Attributes:
        gradients: of the result's tensors that the script's backward reached, by place among all leaves.
        unfit: why the call can't be compared; empty if it can.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module, self.gradients = module, dict[int, Tensor]()
        self.unfit = ""
        self.arguments = pytree.tree_map(_copy, (args, kwargs))
        self.buffers = {name: value.clone() for name, value in module.named_buffers()}
        self.random = torch.get_rng_state()
        self._other_random = _other_generators()
        self._versions = self._parameter_versions()
        self._is_over = False

    def watch(self, result: Any, then: Callable[[], None]) -> None:
        """Records the result's gradients in the script's backward, and calls `then` at the end of that backward."""
        self.unfit = self.unfit or why_unfit_leaves(result, "its result")
        if self._other_random != _other_generators():
            self.unfit = self.unfit or "its forward draws from Python's or NumPy's generator"
        for place, value in enumerate(pytree.tree_leaves(result)):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda gradient, place=place: self._note(place, gradient, then))

    def _note(self, place: int, gradient: Tensor, then: Callable[[], None]) -> None:
        if torch.is_grad_enabled():
            self.unfit = self.unfit or f"the script differentiates it twice, and {TWICE}"
        if not self._is_over and not self.gradients:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(then))
        if not self._is_over:
            self.gradients[place] = gradient.detach().clone()

    def _end(self, then: Callable[[], None]) -> None:
        if not self._is_over:
            self._is_over = True
            then()

    @property
    def has_its_parameters(self) -> bool:
        """Whether the module still has the parameters of the call."""
        return self._versions == self._parameter_versions()

    def _parameter_versions(self) -> list[tuple[int, int]]:
        return [(id(value), value._version) for value in self.module.parameters()]


@hide_from_compiler
def notice_gradient(result: Any, then: Callable[[], None]) -> None:
    """Calls `then` once a backward reaches one of the result's tensors."""
    handles: list[RemovableHandle] = []

    def reached(gradient: Tensor) -> None:
        if handles:
            for handle in handles:
                handle.remove()
            handles.clear()
            then()

    leaves = (leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.grad_fn is not None)
    handles.extend(leaf.register_hook(reached) for leaf in leaves)


def call_signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what a compiled module assumes of a call: kinds, shapes, strides and dtypes of tensors, and plain values."""
    if not kwargs and all(type(value) is Tensor for value in args):  # the usual call, in a third of the time
        return tuple(map(_leaf_signature, args)), torch.get_num_threads()
    leaves, tree = pytree.tree_flatten((args, kwargs))
    return (
        tree,
        tuple(map(_leaf_signature, leaves)),
        torch.get_num_threads(),
    )


def has_differentiated_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an input is a leaf whose gradient the script reads, as penalties that differentiate twice do."""
    is_plain = not kwargs and all(type(value) is Tensor for value in args)
    leaves = args if is_plain else pytree.tree_leaves((args, kwargs))
    return any(isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf for leaf in leaves)


def _leaf_signature(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        strides = leaf.stride() if leaf.layout == torch.strided else leaf.layout
        return type(leaf), leaf.shape, strides, leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), leaf if isinstance(leaf, bool | int | float | str | None) else None


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone(memory_format=torch.preserve_format).requires_grad_(leaf.requires_grad)


def _other_generators() -> Any:
    state: Any = np.random.get_state(legacy=False)
    return hash(random.getstate()), state["state"]["pos"], state["has_gauss"], hash(state["state"]["key"].tobytes())


def why_unfit_module(module: nn.Module) -> str:
    """Returns why a module can't be exchanged; empty if it can, as far as its own attributes show."""
    return (
        _why_unfit_process()
        or _why_unfit_kind(module)
        or _why_unfit_tensors(module)
        or why_hooked(module)
        or _why_differentiated_twice()
    )


def why_hooked(module: nn.Module) -> str:
    """Returns which part of a module has hooks, which a compiled module would lose if they change; empty without."""
    for name, part in module.named_modules():
        if any(getattr(part, kind) for kind in _HOOKS):
            return f"{_shown(name, part)} has hooks"
        if "forward" in vars(part):
            return f"the script replaces the forward of {_shown(name, part)}"
    return next(
        (f"the parameter {name} has hooks" for name, value in module.named_parameters() if value._backward_hooks), ""
    )


def why_unfit_leaves(values: Any, what: str) -> str:
    """Returns why arguments or a result can't be compared; empty if all leaves are plain tensors and values."""
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor):
            if type(leaf) not in (Tensor, nn.Parameter) or leaf.layout != torch.strided or leaf.device.type != "cpu":
                return f"{what} has a {type(leaf).__name__} that is no plain tensor on the CPU"
            if leaf.is_complex() or leaf.dtype in (torch.float16, torch.bfloat16):
                return f"{what} is {str(leaf.dtype).removeprefix('torch.')}"
        elif not isinstance(leaf, _PLAIN):
            return f"{what} has a {type(leaf).__name__}, which can't be compared"
    return ""


def is_plain_training_call(module: nn.Module) -> bool:
    """Whether a call now computes gradients of a module in training mode, outside of torch's other modes."""
    return (
        module.training
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not dispatch_mode_count()
        and not function_mode_count()
        and not tracing_state()
        and peek_interpreter_stack() is None
        and not nn.modules.module._has_any_global_hook()
    )


def why_short_of_memory(module: nn.Module) -> str:
    tensors = [*module.parameters(), *module.buffers()]
    needed = _COPIES * sum(value.nbytes for value in tensors) + _SPARE_BYTES
    return "its proof needs more memory than is free" if needed > psutil.virtual_memory().available else ""


def _why_unfit_process() -> str:
    if sys.platform != "linux":
        return "modules are compiled and compared in a fork of the process, which only Linux allows here"
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return "several ranks share the training, and each of them would choose by its own race"
    if torch.are_deterministic_algorithms_enabled():
        return "the script demands deterministic algorithms"
    if torch.is_autocast_enabled("cpu"):
        return "autocast computes in reduced precision, and a proof needs float32"
    return ""


def _why_unfit_kind(module: nn.Module) -> str:
    for name, part in module.named_modules():
        kinds = {kind.__name__ for kind in type(part).__mro__}
        if wrappers := kinds.intersection(_WRAPPERS):
            return f"it is wrapped by {min(wrappers)}"
        if isinstance(part, torch.jit.ScriptModule):
            return f"{_shown(name, part)} is a TorchScript module"
        if isinstance(part, nn.RNNBase | nn.RNNCellBase):
            return f"{_shown(name, part)} is recurrent"
        if "OptimizedModule" in kinds or part._compiled_call_impl is not None:
            return "the script compiles it"
        if type(part).__call__ is not nn.Module.__call__:
            return f"{_shown(name, part)} replaces nn.Module.__call__"
    return ""


def _why_unfit_tensors(module: nn.Module) -> str:
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided:
            return f"{name} is no plain tensor"
        if value.device.type != "cpu":
            return f"{name} is on {value.device.type}; modules are exchanged on a CPU only"
        if isinstance(value, nn.Parameter) and value.dtype != torch.float32:
            return f"{name} is {str(value.dtype).removeprefix('torch.')}, and a proof needs float32"
    return ""


def _why_differentiated_twice() -> str:
    """Reads the script's own files, since a compiled module fails only in the script's second differentiation."""
    for path in _script_files():
        if found := _TWICE.search(_text(path)):
            return f"{path.name} has {found.group().strip('= ')}, and {TWICE}"
    return ""


def _script_files() -> Iterator[Path]:
    """Yields the source files of imported modules that are neither Python's nor installed."""
    own = str(Path(__file__).parents[1])
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and not file.startswith(own) and not is_installed(file):
            yield Path(file)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _shown(name: str, module: nn.Module) -> str:
    return f"its part {name} ({type(module).__name__})" if name else "it"
