"""Draws from a generator that the step itself has put somewhere else, which a compiled step would not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hotloop.lowering.drawing import draws
from hotloop.lowering.side_effects import refused
from hotloop.patches import Patches


@contextmanager
def no_rewound_draws(device: torch.device) -> Iterator[None]:
    """Refuses draws after torch's generator was set, other than back to where it is.

    `torch.utils.checkpoint` does so to draw a mask of dropout again, `torch.random.fork_rng` to draw the same each time.

    Args:
        device: whose generator may be set, beside the CPU's.

    Raises:
        PlanError: there is such a draw.
    """
    watch, patches = _Draws(), Patches()
    for module in {torch, torch.random, *([] if device.type == "cpu" else [torch.get_device_module(device)])}:
        for name in vars(module).keys() & {"get_rng_state"}:
            patches.put(module, name, watch.noting)
        for name in vars(module).keys() & {"set_rng_state", "set_rng_state_all", "manual_seed", "manual_seed_all"}:
            patches.put(module, name, watch.moving)
    try:
        with watch:
            yield
    finally:
        patches.undo()


class _Draws(TorchDispatchMode):
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

    def moving(self, move: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(move)
        def moved(*args: Any, **kwargs: Any) -> Any:
            known = [self._states[id(one)][1] for one in (*args, *kwargs.values()) if id(one) in self._states]
            self.elsewhere = known != [self.count]
            return move(*args, **kwargs)

        return moved

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws(function, args, kwargs or {}):
            if self.elsewhere:
                raise refused(
                    "it sets torch's generator and draws from it, as a checkpoint does that computes dropout again, "
                    "where a compiled step would draw other numbers",
                    "draws in the order of the step alone",
                    fix="take dropout out of what is checkpointed, or choose compile=none and graphs=none",
                )
            self.count += 1
        return function(*args, **(kwargs or {}))
