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


def without_subnormals(values: Iterable[Tensor]) -> None:
    """Makes them zero in place; single numbers, such as counts of steps, stay as they are."""
    for value in values:
        if value.is_floating_point() and value.ndim:
            info = torch.finfo(value.dtype)
            value.copy_(torch.nn.functional.hardshrink(value, info.tiny * (1 - info.eps)))


@torch.no_grad()
def swept(optimizer: Optimizer, step: int) -> None:
    """Makes them zero in what an optimizer keeps, after every so many steps; `step` is the number of the one that ends."""
    if (step + 1) % EACH == 0:
        kept = (value for state in optimizer.state.values() for value in state.values())
        without_subnormals(value for value in kept if isinstance(value, Tensor) and value.layout == torch.strided)
