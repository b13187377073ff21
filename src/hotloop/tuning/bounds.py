"""What bounds a step, as far as it tells whether compiling is worth a try: libraries' arithmetic, or all that is around it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hotloop.lowering import Program
from hotloop.measuring.runner import Runner
from hotloop.onlooker import Onlooker

_DISPATCH_S = 5e-6
"""What PyTorch spends on one operation, with autograd, whatever its size: 3 to 8 us on processors of today."""

_FUSED = 0.3
"""What is left of the time of operations that a compiler writes itself: they share loops over one part of memory."""

_REMAINS = 0.15
"""Of a step on a CPU, what no compiler takes away: its batch, what it is called with, memory that others have taken."""

_LEAST_GAIN, _MOST_GAIN = 1.1, 8.0

_LOOKS, _ROUNDS, _ENOUGH_S = 3, 10, 0.3
"""Steps that are looked at in a round, after as many that are only timed: a machine's speed changes from second to second."""

_SMALL_FILTER = 32
"""Weights in a filter of a convolution that the rewrites make a plain product of."""

_LIBRARY = (
    *("mm", "addmm", "bmm", "baddbmm", "linear", "_grouped_mm", "_int_mm", "dot", "mv", "addmv"),
    *("convolution", "convolution_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"),
    *("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"),
    *("sort", "topk", "cumsum", "cumprod", "_embedding_bag", "_fft_r2c", "_fft_c2r", "_fft_c2c"),
)
"""Operations that stay calls of a library in a compiled step; so do those with `attention`, `lstm` or `linalg` in the name."""


@dataclass(frozen=True)
class Makeup:
    """What a step is made of.

    Attributes:
        operations: how many.
        step_s: seconds of the whole step at the same time; None on a device that runs on its own.
        library_s: seconds in those operations that stay as they are, compiled or not; None likewise.
        other_s: seconds in the others, without what PyTorch spends around each; None likewise.
    """

    operations: int
    step_s: float | None = None
    library_s: float | None = None
    other_s: float | None = None


def makeup(program: Program, *, rewrites: bool = True) -> Makeup | None:
    """Looks at some training steps, operation by operation; the State stays as it was.

    None where torch doesn't show them one by one, as with `torch.cond`.

    Args:
        rewrites: whether the plan that is to be compiled has them.
    """
    runner, began = Runner(program), time.perf_counter()
    rounds: list[Makeup] = []
    try:
        while len(rounds) < _ROUNDS and (not rounds or time.perf_counter() - began < _ENOUGH_S):
            rounds.append(_looked_at(runner, rewrites))
    except NotImplementedError:
        return None
    finally:
        runner.put_back()
    operations = rounds[0].operations
    if program.device.type != "cpu":
        return Makeup(operations)
    parts = [[one.step_s or 0.0, one.library_s or 0.0, one.other_s or 0.0] for one in rounds]
    return Makeup(operations, *map(statistics.median, zip(*parts, strict=True)))


def _looked_at(runner: Runner, rewrites: bool) -> Makeup:
    step_s = runner.window(_LOOKS) / _LOOKS
    with _Timing(rewrites) as seen:
        runner.window(_LOOKS)
    runner.put_back()
    return Makeup(seen.count // _LOOKS, step_s, seen.library_s / _LOOKS, seen.other_s / _LOOKS)


def compiling_gains(made: Makeup | None, step_s: float) -> float:
    """By what factor a compiled step is faster, if a compiler does with it what it does with most; little if it isn't known.

    Args:
        step_s: of the step, where `made` has no time of its own.
    """
    if made is None:
        return _LEAST_GAIN
    left_s = step_s - made.operations * _DISPATCH_S
    if made.step_s is not None and made.library_s is not None and made.other_s is not None:
        step_s, left_s = made.step_s, made.library_s + _FUSED * made.other_s + _REMAINS * made.step_s
    return min(_MOST_GAIN, max(_LEAST_GAIN, step_s / left_s if left_s > 0 else _MOST_GAIN))


class _Timing(Onlooker):
    """Counts operations, and times them; on a CPU each has been computed when it returns."""

    def __init__(self, rewrites: bool) -> None:
        super().__init__()
        self.rewrites, self.count = rewrites, 0
        self.library_s = self.other_s = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        began = time.perf_counter()
        result = function(*args, **(kwargs or {}))
        took_s = time.perf_counter() - began
        if _stays(function, args, self.rewrites):
            self.library_s += took_s
        else:
            self.other_s += took_s
        return result


def _stays(function: Any, args: Sequence[Any], rewrites: bool) -> bool:
    """Whether a compiled step calls the same library for it; a convolution of small filters can be rewritten."""
    if function.namespace not in ("aten", "prim", "prims"):
        return True  # nobody knows what those of others do inside
    name = function.overloadpacket.__name__
    if name.startswith("convolution"):
        return not (rewrites and _can_be_rewritten(name, args))
    return name in _LIBRARY or any(part in name for part in ("attention", "lstm", "linalg"))


def _can_be_rewritten(name: str, args: Sequence[Any]) -> bool:
    """A convolution as `conv_as_gemm` takes it: of images that learn nothing themselves, in one group."""
    backward = name == "convolution_backward"
    image, filters, groups = (args[1], args[2], args[9]) if backward else (args[0], args[1], args[8])
    learns = args[10][0] if backward else image.requires_grad
    return image.ndim == 4 and groups == 1 and not learns and filters[0].numel() <= _SMALL_FILTER
