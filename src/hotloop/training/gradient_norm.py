"""The norm of the last step's gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from hotloop.lowering.program import Program


def gradient_norm_of(program: Program) -> Callable[[], float | None]:
    """Returns a function that computes the 2-norm of the stored gradients, after clipping.

    With parallel=data each rank stores the gradient of the whole batch. The norm is None for plans that store no
    gradients, as compile=step, and for other ranks, whose norm would be a collective operation. The function doesn't
    prolong the model's life.
    """
    plan = program.parts.plan
    if plan.parallel not in ("none", "data") or plan.compile in ("step", "package"):
        return lambda: None
    model = weakref.ref(program.model)

    def norm() -> float | None:
        found = model()
        gradients = [] if found is None else [value.grad for value in found.parameters() if value.grad is not None]
        gradients = [value for value in gradients if value.layout == torch.strided and not value.is_complex()]
        return float(torch.nn.utils.get_total_norm(gradients)) if gradients else None

    return norm
