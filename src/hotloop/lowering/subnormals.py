"""Numbers too small for their format: what an optimizer keeps of them, as zero.

A parameter that gets no gradient any more, as behind a ReLU that has died, leaves an average that fades: Adam's by a tenth
at each step, so that after some 700 steps it is below 1.2e-38. There a tenth less is rounded back to the same number. So it
stays, and processors calculate with such subnormal numbers many times slower for as long as training lasts.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

EACH = 128
"""Steps from one sweep to the next, each of which takes about as long as reading and writing the optimizer's state once."""


_LIKE_FP32 = (torch.float32, torch.float64, torch.bfloat16)
"""Formats that go down to 1.2e-38 or below; what fp16 has no room for may well count."""


def without_subnormals(values: Iterable[Tensor]) -> None:
    """Makes them zero in place; single numbers, such as counts of steps, stay as they are."""
    for value in values:
        if value.dtype in _LIKE_FP32 and value.ndim and _has_memory_of_its_own(value):
            info = torch.finfo(value.dtype)
            value.copy_(torch.nn.functional.hardshrink(value, info.tiny * (1 - info.eps)))


def _has_memory_of_its_own(value: Tensor) -> bool:
    """Whether each of its numbers can be written by itself."""
    expanded = any(size > 1 and not step for size, step in zip(value.shape, value.stride(), strict=True))
    return not (expanded or value.is_inference())


@torch.no_grad()
def swept(optimizer: Optimizer, step: int) -> None:
    """Makes them zero in what an optimizer keeps, after every so many steps; `step` is the number of the one that ends."""
    if (step + 1) % EACH == 0:
        kept = (value for state in optimizer.state.values() if isinstance(state, dict) for value in state.values())
        without_subnormals(value for value in kept if isinstance(value, Tensor) and value.layout == torch.strided)
