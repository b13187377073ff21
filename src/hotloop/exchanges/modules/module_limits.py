"""Reasons why a module of a script stays as it is."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, distributed, nn
from torch._C._functorch import peek_interpreter_stack
from torch.utils import _pytree as pytree

from hotloop.core.installed_code import is_installed

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")

_COPIES, _SPARE_BYTES = 8, 512 << 20
"""Free memory that a proof needs: multiples of the module's tensors, and bytes for its activations and the compiler."""

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


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
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and not torch._C._get_tracing_state()
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


_TWICE = re.compile(r"create_graph\s*=(?!\s*False)|autograd\.functional|\bhessian\b|\bfunctorch\b")

TWICE = "a compiled module can't be differentiated twice"


def _why_differentiated_twice() -> str:
    """Reads the script's own files, since a compiled module fails only in the script's second differentiation."""
    for path in _script_files():
        if found := _TWICE.search(_text(path)):
            return f"{path.name} has {found.group().strip('= ')}, and {TWICE}"
    return ""


def _script_files() -> Iterator[Path]:
    """Yields the source files of imported modules that are neither Python's nor installed."""
    own = str(Path(__file__).parents[2])
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
