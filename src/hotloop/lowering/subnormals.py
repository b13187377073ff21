"""Numbers too small for their format: what an optimizer keeps of them, as zero.

A parameter that gets no gradient any more, as behind a ReLU that has died, leaves an average that fades: Adam's by a tenth
at each step, so that after some 700 steps it is below 1.2e-38. Processors calculate with such subnormal numbers many times
slower, and go on doing so for as long as training lasts.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def without_subnormals(values: Iterable[Tensor]) -> None:
    """Makes them zero in place; single numbers, such as counts of steps, stay as they are."""
    for value in values:
        if value.is_floating_point() and value.ndim:
            value.copy_(torch.where(value.abs() < torch.finfo(value.dtype).tiny, 0.0, value))
