"""Races a compiled network against the eager network, forward and backward, in a child process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hotloop.core.hardware.machine_load import LoadMeter, wait_until_quiet
from hotloop.core.processes import CompileProcess
from hotloop.profiler.base.tensor_facts import has_gradient

_RACING_S = 15.0
"""Longest race in seconds."""

_MIN_RACING_S = 1.0
_SPARE_S = 0.5
"""Seconds of the time limit that are reserved for the child's start and end."""

_CALLS = 3
"""Number of warm-up calls, and of timed calls that set the window length."""


@dataclass(frozen=True)
class NetworkCall:
    """A network and the arguments of a call in a training step.

    Attributes:
        network: not a copy.
        arguments, keywords: with copies of all tensors.
        training: the network's mode at the call.
        cast: the autocast dtype on the CPU; None without autocast.
    """

    network: nn.Module
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    training: bool
    cast: torch.dtype | None

    @classmethod
    def of(cls, network: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> NetworkCall:
        cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        copies = pytree.tree_map(_detached_copy, (arguments, keywords))
        return cls(network, copies[0], copies[1], network.training, cast)

    @property
    def refused(self) -> str:
        """Why a child can't compile and measure the network; empty if it can."""
        tensors = [*self.network.parameters(), *pytree.tree_leaves((self.arguments, self.keywords))]
        if any(tensor.device.type != "cpu" for tensor in tensors if isinstance(tensor, Tensor)):
            return "a fork of this process can't use its accelerator"
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return "other ranks share the step, and a fork would send to them"
        compiled = type(self.network).__name__ == "OptimizedModule" or self.network._compiled_call_impl is not None
        return "the network is compiled already" if compiled else ""

    @property
    def numbers(self) -> int:
        return sum(parameter.numel() for parameter in self.network.parameters())


class NetworkCallRecorder:
    """Records, while `on`, the first call of each network that a step trains, by the network's `id`."""

    def __init__(self) -> None:
        self.on, self.calls = False, dict[int, NetworkCall]()

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Records a call; `args[0]` is the network."""
        if self.on and id(args[0]) not in self.calls and has_gradient(result):
            self.calls[id(args[0])] = NetworkCall.of(args[0], args[1:], kwargs)

    @property
    def largest(self) -> NetworkCall | None:
        return max(self.calls.values(), key=lambda call: call.numbers, default=None)


def race_compiled(call: NetworkCall | None, seconds: float, begin: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Returns `ratio`, `low` and `high` of the eager time over the compiled time, or a `failure`.

    Args:
        seconds: the time after which the child is ended.
        begin: the child's first call.
    """
    if call is None:
        return {"failure": "no call of a network was recorded"}
    if why := call.refused:
        return {"failure": why}
    until = time.monotonic() + seconds - _SPARE_S

    def work() -> dict[str, Any]:
        begin()
        return _race(call, until)

    with CompileProcess(work) as child:
        found = child.result(seconds)
    if "failure" in found and time.monotonic() > until:
        found["failure"] += "; --time-limit gives more time"
    return found


def _race(call: NetworkCall, until: float) -> dict[str, Any]:
    import torch._inductor.config

    from hotloop.tuning.races.rounds import ContenderTimes, RaceLimits, ratio_to_baseline, run_rounds

    torch._inductor.config.compile_threads = 1  # a fork of an exiting program can't start pools of processes
    if call.network.training != call.training:
        call.network.train(call.training)
    eager = _TimedPasses(call, call.network)
    eager_s = eager.measure_s()
    began = time.perf_counter()
    compiled = _TimedPasses(call, torch.compile(call.network))
    compile_s = time.perf_counter() - began
    compiled_s = compiled.measure_s()
    left_s = until - time.monotonic()
    if left_s < _MIN_RACING_S:
        return {"failure": f"compiling took {compile_s:.0f} s, which leaves no time to measure", "compile_s": compile_s}
    base, rival = ContenderTimes("eager", eager), ContenderTimes("compiled", compiled)
    base.set_layout("cpu", eager_s, eager_s, brief=True)
    rival.set_layout("cpu", compiled_s, eager_s, brief=True)
    wait_until_quiet(left_s / 2)
    load = LoadMeter()
    run_rounds([base, rival], base, RaceLimits(min(_RACING_S, until - time.monotonic())))
    if busy := load.busy():
        return {"failure": busy, "compile_s": compile_s}
    found = ratio_to_baseline(rival, base)
    measured = {"ratio": found.median, "low": found.low, "high": found.high, "pairs": found.pairs}
    return measured | {"compile_s": compile_s, "network": type(call.network).__name__}


class _TimedPasses:
    def __init__(self, call: NetworkCall, network: Callable[..., Any]) -> None:
        self._call, self._network = call, network
        self._parameters = list(call.network.parameters())
        for _ in range(_CALLS):
            self._run_pass()

    def measure_s(self) -> float:
        return self.window(_CALLS) / _CALLS

    def run_untimed(self, steps: int) -> None:
        for _ in range(steps):
            self._run_pass()

    def window(self, steps: int) -> float:
        began = time.perf_counter()
        self.run_untimed(steps)
        return time.perf_counter() - began

    def _run_pass(self) -> None:
        call = self._call
        for parameter in self._parameters:
            parameter.grad = None
        with torch.enable_grad(), torch.autocast("cpu", call.cast, enabled=call.cast is not None):
            result = self._network(*call.arguments, **call.keywords)
        outputs = [tensor for tensor in _tensors_of_result(result) if tensor.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


def _tensors_of_result(value: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(value)
    objects = (leaf for leaf in leaves if not isinstance(leaf, Tensor))
    fields = (value for leaf in objects for value in getattr(leaf, "__dict__", {}).values())
    return [value for value in (*leaves, *fields) if isinstance(value, Tensor)]


def _detached_copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    with torch.no_grad():
        return value.detach().clone().requires_grad_(value.requires_grad)
