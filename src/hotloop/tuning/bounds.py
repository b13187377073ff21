"""What bounds a step, as far as it tells whether compiling is worth a try: libraries' arithmetic, or all that is around it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hotloop.lowering import Program

_DISPATCH_S = 5e-6
"""What PyTorch spends on one operation, with autograd, whatever its size: 3 to 8 us on processors of today."""

_FUSED = 0.3
"""What is left of the time of operations that a compiler writes itself: they share loops over one part of memory."""

_LEAST_GAIN, _MOST_GAIN = 1.1, 8.0

_LOOKS = 3
"""Steps that are looked at."""

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
        library_s: seconds in those that stay as they are, compiled or not; None on a device that runs on its own.
        other_s: seconds in the others, without what PyTorch spends around each; None likewise.
    """

    operations: int
    library_s: float | None = None
    other_s: float | None = None


def makeup(program: Program) -> Makeup | None:
    """Looks at some training steps, operation by operation; the State stays as it was.

    None where torch doesn't show them one by one, as with `torch.cond`.
    """
    before = program.state()
    try:
        with _Timing() as seen:
            steps = program.advance(_LOOKS).steps
    except NotImplementedError:
        return None
    finally:
        program.restore(before)
    if program.device.type != "cpu":
        return Makeup(seen.count // steps)
    return Makeup(seen.count // steps, seen.library_s / steps, seen.other_s / steps)


def compiling_gains(made: Makeup | None, step_s: float) -> float:
    """By what factor a compiled step is faster, if a compiler does with it what it does with most; little if it isn't known."""
    if made is None:
        return _LEAST_GAIN
    left_s = step_s - made.operations * _DISPATCH_S
    if made.library_s is not None and made.other_s is not None:
        left_s = made.library_s + _FUSED * made.other_s
    return min(_MOST_GAIN, max(_LEAST_GAIN, step_s / left_s if left_s > 0 else _MOST_GAIN))


class _Timing(TorchDispatchMode):
    """Counts operations, and times them; on a CPU each has been computed when it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.library_s = self.other_s = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        began = time.perf_counter()
        result = function(*args, **(kwargs or {}))
        took_s = time.perf_counter() - began
        if _stays(function, args):
            self.library_s += took_s
        else:
            self.other_s += took_s
        return result


def _stays(function: Any, args: Sequence[Any]) -> bool:
    """Whether a compiled step calls the same library for it; a convolution of small filters can be rewritten."""
    if function.namespace not in ("aten", "prim", "prims"):
        return True  # nobody knows what those of others do inside
    name = function.overloadpacket.__name__
    if name.startswith("convolution"):
        filters = args[2 if name == "convolution_backward" else 1]
        return not (isinstance(filters, Tensor) and filters[0].numel() <= _SMALL_FILTER)
    return name in _LIBRARY or any(part in name for part in ("attention", "lstm", "linalg"))
