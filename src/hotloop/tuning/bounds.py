"""What bounds a step, as far as it tells which plans are worth a try: Python and launches, or arithmetic."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from hotloop.lowering import Program

_DISPATCH_S = 5e-6
"""What PyTorch spends on one operation, with autograd, whatever its size: 3 to 8 us on processors of today."""

_LEAST_GAIN, _MOST_GAIN = 1.1, 8.0


def operations(program: Program) -> int:
    """How many operations one training step is made of; the State stays as it was."""
    before = program.state()
    counting = _Counting()
    with counting:
        program.advance(1)
    program.restore(before)
    return counting.count


def compiling_gains(count: int, step_s: float) -> float:
    """By what factor a compiled step may be faster, at most: it spends nothing on single operations."""
    overhead = min(count * _DISPATCH_S / step_s, 1.0)
    return min(_MOST_GAIN, max(_LEAST_GAIN, 1 / (1 - overhead) if overhead < 1 else _MOST_GAIN))


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))
