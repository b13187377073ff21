"""Whether a compiled step of a Task is refused, or trains as eagerly: what tests of side effects share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hotloop
from hotloop.errors import PlanError
from hotloop.plan import Plan
from tests.support.programs import a_task, advance, state_after

STEP = Plan(compile="step")


def refusal(plan: Plan = STEP, **fields: Any) -> str:
    with pytest.raises(PlanError, match="can't be captured as one graph") as caught:
        hotloop.lower(a_task(**fields), plan)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_trains_as_eagerly(steps: int = 4, **fields: Any) -> None:
    program = hotloop.lower(a_task(**fields), STEP)
    advance(program, steps)
    assert program.compiled_steps
    expected = state_after(a_task(**fields), steps)
    torch.testing.assert_close(program.state().parameters, expected.parameters)
    torch.testing.assert_close(program.state().buffers, expected.buffers)


class Layer(nn.Module):
    """A linear layer, with what each network here has beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
