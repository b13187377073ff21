"""The private parts of PyTorch that packages of hotloop share, each under one name.

`lowering/compile`, `lowering/rewrites` and `profiler` import the parts of torch's compiler and profiler that only they use.
`tests/core/test_torch_private.py` checks each name here, and fails first under another version of torch.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._C._profiler import _RecordFunctionFast as RecordFunctionFast
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch._utils import ExceptionWrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._pytree import (
    tree_any,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)
from torch.utils.data._utils import signal_handling, worker
from torch.utils.data._utils.fetch import _MapDatasetFetcher as MapDatasetFetcher

__all__ = [
    "DisableTorchDispatch",
    "DisableTorchFunction",
    "ExceptionWrapper",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "MapDatasetFetcher",
    "OpOverload",
    "ReadOnlyDispatchMode",
    "RecordFunctionFast",
    "TorchDispatchMode",
    "current_autograd_node",
    "current_graph_task_id",
    "disable_current_modes",
    "dispatch_mode_count",
    "function_mode_count",
    "next_sequence_number",
    "peek_interpreter_stack",
    "signal_handling",
    "tracing_state",
    "tree_any",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "worker",
]

DisableTorchDispatch: Any = torch._C._DisableTorchDispatch
DisableTorchFunction: Any = torch._C.DisableTorchFunction

dispatch_mode_count = torch._C._len_torch_dispatch_stack
function_mode_count = torch._C._len_torch_function_stack
tracing_state = torch._C._get_tracing_state

next_sequence_number = torch._C._autograd._get_sequence_nr
"""Number of the next node of the autograd graph that this thread makes."""

current_autograd_node: Any = torch._C._current_autograd_node
"""Returns the node that a backward pass of this thread computes; None outside a backward pass."""

current_graph_task_id = torch._C._current_graph_task_id
"""Number of the backward pass that runs in this thread; -1 outside a backward pass."""


class ReadOnlyDispatchMode(TorchDispatchMode):
    """A base class of dispatch modes that only observe operators.

    Raises:
        NotImplementedError: the step has an operator that torch runs under no mode, such as `torch.cond`.
    """

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        compiler = sys.modules.get("torch._dynamo")
        if isinstance(error, NotImplementedError) and compiler is not None:
            compiler.reset()  # Dynamo caches the operator's branches as traced under this mode
