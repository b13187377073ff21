"""The share of library calls and of other operations in a step, which determines the gain of compiling."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from hotloop.core.torch_private import ReadOnlyDispatchMode
from hotloop.lowering.program import Program
from hotloop.lowering.rewrites.conv_in_pool import MAX_FAST_TERMS
from hotloop.lowering.rewrites.dropout_from_words import share_of_ones
from hotloop.lowering.rewrites.mm_by_onednn import is_faster_by_onednn
from hotloop.lowering.rewrites.pool_as_max import window_of_call
from hotloop.tuning.races.runner import Runner

_PROFILED_STEPS, _MAX_ROUNDS, _ENOUGH_S = 3, 10, 0.3
"""Profiled steps of a round, after as many that are timed alone; rounds; and seconds after which no round starts."""

_LIBRARY_OPS = (
    *("mm", "addmm", "bmm", "baddbmm", "linear", "_grouped_mm", "_int_mm", "dot", "mv", "addmv"),
    *("convolution", "convolution_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"),
    *("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"),
    *("native_batch_norm", "native_batch_norm_backward"),
    *("max_pool2d_with_indices", "max_pool2d_with_indices_backward"),
    *("sort", "topk", "cumsum", "cumprod", "_embedding_bag", "_fft_r2c", "_fft_c2r", "_fft_c2c"),
)
"""Operations that stay library calls in a compiled step, or that compilers don't improve; also those with `attention`,
`lstm` or `linalg` in the name."""

_GROUPED_RATIO, _POINTWISE_RATIO = 0.64, 0.43
"""Share of time that counts as compiled. With channels last, grouped convolutions took 0.55 and 1 x 1 ones 0.7 of the
time (GhostNet, RegNet, MobileNet on two cores of an AMD EPYC); compiled operations take 0.3."""

_SMALL_FILTER = 25
"""Largest filter with this gain, in places; 7 x 7 as in ConvNeXt took 0.8 of the time."""

_SMALLEST_WINDOW = 4
"""Places of the usual pooling window, 2 x 2."""


@dataclass(frozen=True)
class StepProfile:
    """The operations of a step. Seconds are None on devices where they can't be measured.

    Attributes:
        operations: their number.
        step_s: seconds of the step, on a CPU.
        library_s, other_s: seconds in operations that stay library calls, and in others, on a CPU.
        busy_s: seconds for which a CUDA device computes.
        has_pooling: whether images are max pooled in windows that rewrites support.
    """

    operations: int
    step_s: float | None = None
    library_s: float | None = None
    other_s: float | None = None
    busy_s: float | None = None
    has_pooling: bool = False


def profile_step(program: Program, *, rewrites: bool = True) -> StepProfile | None:
    """Profiles training steps by operation and restores the State; None if torch hides operations (`torch.cond`).

    Args:
        rewrites: whether the plan to compile has rewrites.
    """
    runner, began = Runner(program), time.perf_counter()
    rounds: list[StepProfile] = []
    try:
        while len(rounds) < _MAX_ROUNDS and (not rounds or time.perf_counter() - began < _ENOUGH_S):
            rounds.append(_profile_once(runner, rewrites))
    except NotImplementedError:
        return None
    finally:
        runner.restore_state()
    operations = rounds[0].operations
    if program.device.type != "cpu":
        return StepProfile(operations, busy_s=_device_busy_s(runner) if program.device.type == "cuda" else None)
    parts = [[one.step_s or 0.0, one.library_s or 0.0, one.other_s or 0.0] for one in rounds]
    step_s, library_s, other_s = map(statistics.median, zip(*parts, strict=True))
    return StepProfile(operations, step_s, library_s, other_s, has_pooling=rounds[0].has_pooling)


def _profile_once(runner: Runner, rewrites: bool) -> StepProfile:
    step_s = runner.window(_PROFILED_STEPS) / _PROFILED_STEPS
    with _OperatorTimer(rewrites) as seen:
        runner.window(_PROFILED_STEPS)
    runner.restore_state()
    return StepProfile(
        seen.count // _PROFILED_STEPS,
        step_s,
        seen.library_s / _PROFILED_STEPS,
        seen.other_s / _PROFILED_STEPS,
        has_pooling=seen.has_pooling,
    )


def _device_busy_s(runner: Runner) -> float | None:
    """Returns the seconds of a step for which the device computes; None beside another profiler."""
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            runner.window(_PROFILED_STEPS)
    except RuntimeError:
        return None
    finally:
        runner.restore_state()
    kernels = [event for event in seen.events() or () if event.device_type != DeviceType.CPU]
    return sum(event.self_device_time_total for event in kernels) / 1e6 / _PROFILED_STEPS or None


class _OperatorTimer(ReadOnlyDispatchMode):
    """Counts and times operations; on a CPU an operation is complete when its call returns."""

    def __init__(self, rewrites: bool) -> None:
        super().__init__()
        self.rewrites, self.count = rewrites, 0
        self._stays_s = self._other_s = 0.0
        self._convolved_s, self._pooled = defaultdict[int, float](float), set[int | None]()  # by address of the weights
        self._weights_of: dict[int, int] = {}  # by address of the result

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        began = time.perf_counter()
        result = function(*args, **(kwargs or {}))
        took_s = time.perf_counter() - began
        name, stays = function.overloadpacket.__name__, _is_library_call(function, args, self.rewrites, kwargs)
        backward = name == "convolution_backward"
        weights = args[2 if backward else 1].data_ptr() if name.startswith("convolution") and not stays else None
        if weights is not None:
            self._convolved_s[weights] += took_s
        elif stays:
            share = _compiled_share(name, args)
            self._stays_s += (1 - share) * took_s
            self._other_s += share * took_s
        else:
            self._other_s += took_s
            if name == "max_pool2d_with_indices":
                self._pooled.add(self._weights_of.get(args[0].data_ptr()))
        self._follow(name, args, result, None if backward else weights)
        return result

    def _follow(self, name: str, args: Sequence[Any], result: Any, weights: int | None) -> None:
        """Records the address of a convolution's result, also after a ReLU; addresses are reused."""
        if not _has_memory(result) or not (self._weights_of or weights):
            return
        given = args[0].data_ptr() if args and _has_memory(args[0]) else None
        if weights is None and given == result.data_ptr():
            return  # in place, or a view
        known = self._weights_of.get(given) if given is not None and name == "relu" else weights
        self._weights_of.pop(result.data_ptr(), None)
        if known is not None:
            self._weights_of[result.data_ptr()] = known

    @property
    def has_pooling(self) -> bool:
        return bool(self._pooled)

    @property
    def library_s(self) -> float:
        return self._stays_s + sum(took_s for at, took_s in self._convolved_s.items() if at not in self._pooled)

    @property
    def other_s(self) -> float:
        return self._other_s + sum(took_s for at, took_s in self._convolved_s.items() if at in self._pooled)


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


def _is_library_call(function: Any, args: Sequence[Any], rewrites: bool, kwargs: dict[str, Any] | None = None) -> bool:
    """Whether a compiled step calls the same library; rewrites cover small convolutions, pooling, dropout, products."""
    if function.namespace not in ("aten", "prim", "prims"):
        return True  # custom operations are opaque
    name = function.overloadpacket.__name__
    if name in ("mm", "addmm") and rewrites and is_faster_by_onednn(*args[-2:]):
        return False
    if name == "bernoulli_":
        return not rewrites or share_of_ones(function, args, kwargs or {}) is None
    if name.startswith("max_pool2d_with_indices"):
        return not (rewrites and window_of_call(*args[name.endswith("backward") :][:5]))
    if name.startswith("convolution"):
        return not (rewrites and _can_be_rewritten(name, args))
    return name in _LIBRARY_OPS or any(part in name for part in ("attention", "lstm", "linalg"))


def _compiled_share(name: str, args: Sequence[Any]) -> float:
    """Returns the share of a convolution's time that counts as compiled.

    The compiler uses channels last, with which oneDNN is faster for 1 x 1 filters and groups.
    """
    if not name.startswith("convolution"):
        return 0.0
    image, filters, groups = _convolution_operands(name, args)
    if image.ndim != 4 or not image.is_cpu or not image.is_contiguous():
        return 0.0
    places = filters.shape[2:].numel()
    return _GROUPED_RATIO if groups > 1 and places <= _SMALL_FILTER else _POINTWISE_RATIO if places == 1 else 0.0


def _convolution_operands(name: str, args: Sequence[Any]) -> tuple[Tensor, Tensor, int]:
    """Returns image, filters and groups."""
    return (args[1], args[2], args[9]) if name == "convolution_backward" else (args[0], args[1], args[8])


def _can_be_rewritten(name: str, args: Sequence[Any]) -> bool:
    """Whether `conv_in_pool` supports the convolution: one group, small filters, images without a gradient."""
    backward = name == "convolution_backward"
    image, filters, groups = _convolution_operands(name, args)
    learns, transposed = (args[10][0], args[7]) if backward else (image.requires_grad, args[6])
    small = filters[0].numel() * _SMALLEST_WINDOW <= MAX_FAST_TERMS
    return image.ndim == 4 and groups == 1 and small and not learns and not transposed
