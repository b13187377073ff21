"""Whether compiling a network makes its forward and backward faster: raced in a child process, on the inputs of a real step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hotloop.compile_child import CompileChild
from hotloop.profiling.tensors import has_gradient

_RACING_S = 15.0
"""At most, after which enough is known of most steps."""

_LEAST_RACING_S = 1.0
_SPARE_S = 0.5
"""Of the time limit, for what the child does before and after."""

_FEW = 3
"""Calls before the race, and calls of which each is timed for the layout of the windows."""


@dataclass(frozen=True)
class RecordedCall:
    """A network, and what a training step called it with.

    Attributes:
        network: as it is; `training` is its mode then.
        arguments, keywords: with copies of all tensors.
        cast: the dtype of autocast on the CPU; None without autocast.
    """

    network: nn.Module
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    training: bool
    cast: torch.dtype | None

    @classmethod
    def of(cls, network: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> RecordedCall:
        cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        given, named = pytree.tree_map(_copied, (arguments, keywords))
        return cls(network, given, named, network.training, cast)

    @property
    def refused(self) -> str:
        """Why a child can't compile and measure the network; empty where the child can."""
        tensors = [*self.network.parameters(), *pytree.tree_leaves((self.arguments, self.keywords))]
        if any(one.device.type != "cpu" for one in tensors if isinstance(one, Tensor)):
            return "a fork of this process can't use its accelerator"
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return "other ranks share the step, and a fork would send to them"
        compiled = type(self.network).__name__ == "OptimizedModule" or self.network._compiled_call_impl is not None
        return "the network is compiled already" if compiled else ""

    @property
    def numbers(self) -> int:
        return sum(one.numel() for one in self.network.parameters())


class CallRecorder:
    """Records the first call of each of the networks that a step trains.

    Attributes:
        on: whether calls are recorded.
        calls: by the network's id.
    """

    def __init__(self) -> None:
        self.on, self.calls = False, dict[int, RecordedCall]()

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A network, the first argument, was called by the loop with the others."""
        if self.on and id(args[0]) not in self.calls and has_gradient(result):
            self.calls[id(args[0])] = RecordedCall.of(args[0], args[1:], kwargs)

    @property
    def largest(self) -> RecordedCall | None:
        """That of the network with the most parameters."""
        return max(self.calls.values(), key=lambda call: call.numbers, default=None)


def race_compiled(
    call: RecordedCall | None, seconds: float, begin: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """What compiling the network of a call wins: `ratio`, `low`, `high` of eager over compiled, or a `failure`.

    Args:
        seconds: after which the child is ended, whatever it does.
        begin: what the child does first.
    """
    if call is None:
        return {"failure": "no call of a network was recorded"}
    if why := call.refused:
        return {"failure": why}
    until = time.monotonic() + seconds - _SPARE_S

    def work() -> dict[str, Any]:
        begin()
        return _raced(call, until)

    with CompileChild(work) as child:
        found = child.result(seconds)
    if "failure" in found and time.monotonic() > until:
        found["failure"] += "; --time-limit gives more time"
    return found


def _raced(call: RecordedCall, until: float) -> dict[str, Any]:
    import torch._inductor.config

    from hotloop.measuring.rounds import Lane, Limits, ratio, run_rounds

    torch._inductor.config.compile_threads = 1  # a fork at the end of a program can't start pools of processes
    if call.network.training != call.training:
        call.network.train(call.training)
    eager = _Passes(call, call.network)
    eager_s = eager.timed()
    began = time.perf_counter()
    compiled = _Passes(call, torch.compile(call.network))
    compile_s = time.perf_counter() - began
    compiled_s = compiled.timed()
    left_s = until - time.monotonic()
    if left_s < _LEAST_RACING_S:
        return {"failure": f"compiling took {compile_s:.0f} s, which leaves no time to measure", "compile_s": compile_s}
    base, rival = Lane("eager", eager), Lane("compiled", compiled)
    base.lay_out("cpu", eager_s, eager_s, brief=True)
    rival.lay_out("cpu", compiled_s, eager_s, brief=True)
    run_rounds([base, rival], base, Limits(min(_RACING_S, left_s)))
    found = ratio(rival, base)
    measured = {"ratio": found.median, "low": found.low, "high": found.high, "pairs": found.pairs}
    return measured | {"compile_s": compile_s, "network": type(call.network).__name__}


class _Passes:
    """Forward and backward of a network, again and again."""

    def __init__(self, call: RecordedCall, network: Callable[..., Any]) -> None:
        self._call, self._network = call, network
        self._parameters = list(call.network.parameters())
        for _ in range(_FEW):
            self._once()

    def timed(self) -> float:
        """Seconds of a forward and backward."""
        return self.window(_FEW) / _FEW

    def settle(self, steps: int) -> None:
        for _ in range(steps):
            self._once()

    def window(self, steps: int) -> float:
        began = time.perf_counter()
        self.settle(steps)
        return time.perf_counter() - began

    def _once(self) -> None:
        call = self._call
        for one in self._parameters:
            one.grad = None
        with torch.enable_grad(), torch.autocast("cpu", call.cast, enabled=call.cast is not None):
            result = self._network(*call.arguments, **call.keywords)
        outputs = [one for one in _tensors(result) if one.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])


def _tensors(value: Any) -> list[Tensor]:
    """Those in a network's result: in lists, tuples and dictionaries, and among the fields of other objects."""
    leaves = pytree.tree_leaves(value)
    inside = [
        other for leaf in leaves if not isinstance(leaf, Tensor) for other in getattr(leaf, "__dict__", {}).values()
    ]
    return [one for one in [*leaves, *inside] if isinstance(one, Tensor)]


def _copied(value: Any) -> Any:
    """A tensor's copy without its graph; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    with torch.no_grad():
        return value.detach().clone().requires_grad_(value.requires_grad)
