"""Optimizers and changes by callbacks that a plan with several processes doesn't support."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hotloop.core.task_parts.optimizers import has_own_state_dict, inner_optimizers
from hotloop.errors import PlanError, TaskError
from hotloop.lowering.context import LoweringContext

_SPLIT_MODES = ("sharded", "towers", "tensor", "stages", "local")
"""Values of `parallel` with which ranks split, move or average the state of single parameters."""


def check_optimizer(parts: LoweringContext, optimizer: torch.optim.Optimizer, *, switches: bool) -> None:
    """Rejects an optimizer whose state or modes the plan or the Task doesn't support.

    Args:
        switches: whether the optimizer has a training and an evaluation mode.

    Raises:
        TaskError: the optimizer and the Task both average the weights.
        PlanError: ranks can't split the optimizer's state.
    """
    name, parallel, average = type(optimizer).__name__, parts.plan.parallel, parts.task.average
    if switches and average is not None:
        raise TaskError(
            f"average={average} with {name}, whose eval() averages weights itself",
            expected="one average of the weights",
            fix="leave average out, or use another optimizer",
        )
    own = switches or has_own_state_dict(optimizer) or inner_optimizers(optimizer)
    if own and parallel in _SPLIT_MODES:
        raise PlanError(
            f"parallel={parallel} with {name}, which has a state_dict or modes of its own, or wraps an optimizer",
            expected="an optimizer whose state belongs to single parameters",
            fix="use parallel=data or none, or another optimizer",
        )


def check_trainable(parts: LoweringContext, as_built: Sequence[bool]) -> None:
    """Raises PlanError if a parameter was frozen or unfrozen after the step was built, as other processes miss the change."""
    named = list(parts.model.named_parameters())
    changed = [name for (name, value), before in zip(named, as_built, strict=True) if value.requires_grad != before]
    if changed:
        raise PlanError(
            f"parallel={parts.plan.parallel}, and {changed[0]!r} was frozen or thawed after the model was built",
            expected="the same parameters to train throughout",
            fix="use parallel=none",
        )
