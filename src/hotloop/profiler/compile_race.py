"""Records the networks that the training loop calls in a step, and races the largest one, compiled against eager.

Calls are put into phases. The race runs forward and backward in a child process, on the inputs of a recorded call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hotloop.core.hardware.machine_load import LoadMeter, wait_until_quiet
from hotloop.core.processes import CompileProcess
from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.base.phases import Timeline
from hotloop.profiler.base.steps import StepFact
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


_MAX_CALLS = 4
"""Mean calls per network in a step up to which the rows of an input count as samples."""

_MAX_KNOWN = 1000


class CallInputs(NamedTuple):
    """The inputs of a call of a training module.

    Attributes:
        shapes: of the tensor arguments.
        rows: number of samples; None if no input has a batch dimension.
        has_gradient: whether gradients may reach the call; false for evaluations of a trained network.
        is_after_batch: whether a loader gave a batch since the previous call.
    """

    shapes: list[str]
    rows: int | None
    has_gradient: bool = False
    is_after_batch: bool = False


def describe_inputs(inputs: list[Tensor], *, graded: bool = False, drawn: bool = False) -> CallInputs:
    rows = next((len(value) for value in inputs if value.ndim > value.is_floating_point()), None)
    return CallInputs(["x".join(map(str, value.shape)) for value in inputs], rows, graded, drawn)


class ForwardCalls:
    """Puts module calls into the phases of a timeline; networks are identified by their id.

    A module without parameters through which no gradient passes is auxiliary: such modules augment batches or compute
    metrics.

    Attributes:
        has_new_batch: whether a loader gave a batch since the last call.
        recorder: of calls that may be repeated afterwards.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._graded: dict[int, bool] = {}
        self._learning: set[int] = set()
        self.recorder = NetworkCallRecorder()
        self.begin()

    def begin(self) -> None:
        self._called: list[int] = []
        self._since: set[int] = set()
        self._trained: set[int] = set()
        self._accumulates = self.has_new_batch = False
        self._least: dict[int, int] = {}
        self._most_graded: dict[int, int] = {}

    def end(self, step: StepFact | None) -> None:
        if step is not None:
            step.calls = self.number

    def began(self, args: tuple, kwargs: dict, making: Phase, *, again: bool) -> None:
        """A module call begins; the module is the first argument.

        Args:
            making: the phase in which batches are made.
            again: whether a backward recomputes the call, as activation checkpointing does.
        """
        timeline = self._timeline
        if not again and self._is_auxiliary(args, kwargs):
            timeline.enter(making if timeline.current == making else "logging")
            return
        if not again and self.note_call(id(args[0])):
            timeline.replace_last("loss", "python")  # the same network is called again before any backward
        timeline.enter("loss" if _is_loss(args[0]) else "forward")

    def ended(self, args: tuple, kwargs: dict, result: Any) -> CallInputs | None:
        """A module call has ended and left its phase; returns its inputs if the module is part of the training."""
        module, graded = args[0], has_gradient(result)
        part = _can_learn(module) or bool(graded)
        if torch.is_grad_enabled() and len(self._graded) < _MAX_KNOWN:
            self._graded[id(module)] = part
        if not part:
            return None
        if torch.is_grad_enabled():
            self._timeline.turn("loss")
        may_train = torch.is_grad_enabled() and graded is not False  # an opaque result may hold tensors
        if may_train and module.training and len(self._learning) < _MAX_KNOWN:
            self._learning.add(id(module))
        evaluated = not module.training and id(module) in self._learning
        has_gradient_now = may_train and not evaluated
        inputs = describe_inputs(_tensors(args[1:], kwargs), graded=has_gradient_now, drawn=self.has_new_batch)
        self.has_new_batch = False
        if inputs.shapes and not _is_loss(module):
            self._count(id(module), inputs)
            self.recorder.note(args, kwargs, result)
        return inputs

    def _count(self, network: int, inputs: CallInputs) -> None:
        rows = inputs.rows or 1
        self._least[network] = min(rows, self._least.get(network, rows))
        if inputs.has_gradient:
            self._most_graded[network] = max(rows, self._most_graded.get(network, rows))

    def note_call(self, network: int) -> bool:
        """Records a network call; returns whether the previous call was of the same network."""
        again = bool(self._called) and self._called[-1] == network
        self._called.append(network)
        self._since.add(network)
        return again

    def backward(self) -> None:
        self._accumulates |= not self._trained.isdisjoint(self._since)
        self._trained |= self._since
        self._since = set()

    @property
    def number(self) -> int:
        return len(self._called)

    @property
    def has_sample_count(self) -> bool:
        """Whether a call takes all samples of a step at once; else the size of a sample is unknown."""
        if any(self._least[network] < most for network, most in self._most_graded.items()):
            return False  # some calls get fewer rows, as an agent's action does
        return not self._accumulates and len(self._called) <= _MAX_CALLS * max(1, len(set(self._called)))

    def _is_auxiliary(self, args: tuple, kwargs: dict) -> bool:
        """Repeats the last decision; the first decision is by whether an input has a gradient."""
        if _can_learn(args[0]):
            return False
        has_gradient_input = any(value.requires_grad for value in _tensors(args[1:], kwargs))
        return not self._graded.get(id(args[0]), has_gradient_input)


def _tensors(args: tuple, kwargs: dict) -> list[Tensor]:
    return [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]


def _can_learn(module: nn.Module) -> bool:
    return _is_loss(module) or next(module.parameters(), None) is not None


def _is_loss(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.loss._Loss):
        return True
    name = type(module).__name__.lower()
    return ("loss" in name or "criterion" in name) and next(module.parameters(), None) is None
