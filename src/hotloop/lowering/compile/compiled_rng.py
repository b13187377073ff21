"""Draws from a generator that the step itself has put somewhere else, which a compiled step would not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from hotloop.core.patches import Patches
from hotloop.lowering.object_state.side_effects import capture_error


def is_random_op(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws: attention does only where it has dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(function, "tags", ()):
        return False
    schema = function._schema.arguments
    given = {one.name: one.default_value for one in schema} | dict(
        zip((one.name for one in schema), args, strict=False)
    )
    return bool((given | kwargs).get("dropout_p", True))


def has_no_draws(graph: GraphModule) -> bool:
    """Whether a captured graph surely draws nothing: it is made of operations of torch's own that don't."""
    return all(_has_no_draws(node.target) for node in graph.graph.nodes if node.op.startswith("call_"))


def _has_no_draws(target: Any) -> bool:
    if isinstance(target, OpOverload):
        return target.namespace in _TORCH_NAMESPACES and torch.Tag.nondeterministic_seeded not in target.tags
    return isinstance(target, BuiltinFunctionType) or target in (torch.sym_float, torch.sym_sqrt)


_TORCH_NAMESPACES = ("aten", "prims", "mkldnn")


@contextmanager
def refuse_rng_reset(device: torch.device) -> Iterator[None]:
    """Refuses draws after torch's generator was set, other than back to where it is.

    `torch.utils.checkpoint` does so to draw a mask of dropout again, `torch.random.fork_rng` to draw the same each time.

    Args:
        device: whose generator may be set, beside the CPU's.

    Raises:
        PlanError: there is such a draw.
    """
    watch, patches = _DrawCounter(), Patches()
    for module in {torch, torch.random, *([] if device.type == "cpu" else [torch.get_device_module(device)])}:
        for name in vars(module).keys() & {"get_rng_state"}:
            patches.patch(module, name, watch.noting)
        for name in vars(module).keys() & {"set_rng_state", "set_rng_state_all", "manual_seed", "manual_seed_all"}:
            patches.patch(module, name, watch.track_state)
    try:
        with watch:
            yield
    finally:
        patches.undo()


class _DrawCounter(TorchDispatchMode):
    """Counts draws, so as to know which state of the generator is that of now: a trace draws nothing, and moves none."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.elsewhere = False
        self._states: dict[int, tuple[Any, int]] = {}

    def noting(self, read: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(read)
        def noted(*args: Any, **kwargs: Any) -> Any:
            state = read(*args, **kwargs)
            self._states[id(state)] = state, -1 if self.elsewhere else self.count
            return state

        return noted

    def track_state(self, move: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(move)
        def moved(*args: Any, **kwargs: Any) -> Any:
            known = [self._states[id(one)][1] for one in (*args, *kwargs.values()) if id(one) in self._states]
            self.elsewhere = known != [self.count]
            return move(*args, **kwargs)

        return moved

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_random_op(function, args, kwargs or {}):
            if self.elsewhere:
                raise capture_error(
                    "it sets torch's generator and draws from it, as a checkpoint does that computes dropout again, "
                    "where a compiled step would draw other numbers",
                    "draws in the order of the step alone",
                    fix="take dropout out of what is checkpointed, or choose compile=none and graphs=none",
                )
            self.count += 1
        return function(*args, **(kwargs or {}))


def check_recurrent(model: nn.Module, device: torch.device) -> None:
    """cuDNN reads the weights of a recurrent layer as one piece of memory, which is no operation on them.

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
    """cuDNN's recurrent layers draw from a state of their own, which would not follow from the step's seed.

    Raises:
        PlanError: a captured step has such draws.
    """
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten._cudnn_rnn.default):
        if node.args[_DROPOUT_OPS]:
            raise capture_error(
                "cuDNN's recurrent layers with dropout draw from a state of their own", "dropout as a layer"
            )


_DROPOUT_OPS = [one.name for one in torch.ops.aten._cudnn_rnn.default._schema.arguments].index("dropout")
