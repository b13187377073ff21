"""Refuses random draws that a compiled step can't repeat, such as draws after the step has set a generator's state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from hotloop.core.patches import Patches
from hotloop.core.torch_private import OpOverload, TorchDispatchMode
from hotloop.lowering.object_state.side_effects import capture_error


def is_random_op(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws random numbers; attention draws only with dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(function, "tags", ()):
        return False
    arguments = function._schema.arguments
    values = {argument.name: argument.default_value for argument in arguments}
    values |= {argument.name: value for argument, value in zip(arguments, args, strict=False)}
    return bool((values | kwargs).get("dropout_p", True))


def has_no_draws(graph: GraphModule) -> bool:
    """Whether a captured graph consists of torch's own operations without draws."""
    return all(_has_no_draws(node.target) for node in graph.graph.nodes if node.op.startswith("call_"))


def _has_no_draws(target: Any) -> bool:
    if isinstance(target, OpOverload):
        return target.namespace in _TORCH_NAMESPACES and torch.Tag.nondeterministic_seeded not in target.tags
    return isinstance(target, BuiltinFunctionType) or target in (torch.sym_float, torch.sym_sqrt)


_TORCH_NAMESPACES = ("aten", "prims", "mkldnn")


@contextmanager
def refuse_rng_reset(device: torch.device) -> Iterator[None]:
    """Refuses draws after torch's generator was set to another state than its current one.

    `torch.utils.checkpoint` sets the state to repeat a dropout mask, `fork_rng` to draw the same numbers each time.

    Args:
        device: the device whose generator may be set, besides the CPU's.

    Raises:
        PlanError: there is such a draw.
    """
    counter, patches = _DrawCounter(), Patches()
    for module in {torch, torch.random, *([] if device.type == "cpu" else [torch.get_device_module(device)])}:
        for name in vars(module).keys() & {"get_rng_state"}:
            patches.patch(module, name, counter.record_state)
        for name in vars(module).keys() & {"set_rng_state", "set_rng_state_all", "manual_seed", "manual_seed_all"}:
            patches.patch(module, name, counter.track_state)
    try:
        with counter:
            yield
    finally:
        patches.undo()


class _DrawCounter(TorchDispatchMode):
    """Counts draws, which identifies the generator's current state: a trace doesn't advance the generator."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.is_moved = False
        self._states: dict[int, tuple[Any, int]] = {}

    def record_state(self, read: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(read)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            state = read(*args, **kwargs)
            self._states[id(state)] = state, -1 if self.is_moved else self.count
            return state

        return recorded

    def track_state(self, move: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(move)
        def moved(*args: Any, **kwargs: Any) -> Any:
            counts = [self._states[id(arg)][1] for arg in (*args, *kwargs.values()) if id(arg) in self._states]
            self.is_moved = counts != [self.count]
            return move(*args, **kwargs)

        return moved

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_random_op(function, args, kwargs or {}):
            if self.is_moved:
                raise capture_error(
                    "the step sets torch's generator and draws from it, as activation checkpointing with "
                    "dropout does, and a compiled step would draw other numbers",
                    "draws without setting the generator",
                    fix="take dropout out of the checkpointed layers, or choose compile=none and graphs=none",
                )
            self.count += 1
        return function(*args, **(kwargs or {}))


def check_recurrent(model: nn.Module, device: torch.device) -> None:
    """Refuses recurrent layers on CUDA: cuDNN reads their weights as one buffer, which no graph operation shows.

    Raises:
        PlanError: the model has such a layer there.
    """
    used = device.type == "cuda" and torch.backends.cudnn.enabled
    layer = next((name for name, module in model.named_modules() if isinstance(module, nn.RNNBase)), None)
    if used and layer is not None:
        raise capture_error(
            f"{layer or 'the model'} is one of torch's recurrent layers, whose weights cuDNN reads as one piece of memory",
            "layers made of tensor operations alone",
            fix="choose compile=none and graphs=none",
        )


def check_draws(graph: GraphModule) -> None:
    """Refuses cuDNN's recurrent layers with dropout: their generator state doesn't follow from the step's seed.

    Raises:
        PlanError: a captured step has such draws.
    """
    cudnn_rnn = torch.ops.aten._cudnn_rnn.default
    dropout = [argument.name for argument in cudnn_rnn._schema.arguments].index("dropout")
    if any(node.args[dropout] for node in graph.graph.find_nodes(op="call_function", target=cudnn_rnn)):
        raise capture_error(
            "cuDNN's recurrent layers with dropout draw from a state of their own", "dropout as a layer"
        )
