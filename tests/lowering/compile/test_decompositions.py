"""What torch's compiler would make otherwise of a captured step, or fail with, is written so that it doesn't."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.lowering.compile import inductor_patches
from hotloop.lowering.compile.capture import capture_step
from hotloop.parity.proof import prove
from hotloop.plan import Plan
from tests.support.eager_comparison import STEP
from tests.support.programs import a_task, advance, labelled


def mixed(model: nn.Module, batch: Any) -> Tensor:
    """Mixup (Zhang et al., 2018): each sample with another one of the batch, in a drawn order."""
    x, y = batch
    share, other = torch.rand(()), torch.randperm(len(x))
    outputs = model(share * x + (1 - share) * x[other])
    loss = nn.functional.cross_entropy
    return share * loss(outputs, y) + (1 - share) * loss(outputs, y[other])


def test_samples_mixed_in_a_drawn_order_are_compiled() -> None:
    found = prove(a_task(step=mixed, model=lambda: nn.Linear(6, 3)), STEP)
    assert found.parity in ("fp32-equivalent", "bitwise"), found.reason


@pytest.mark.more
@pytest.mark.skipif(torch.__version__ >= "2.14", reason="a later torch may do without")
def test_that_takes_what_is_written_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor_patches, "_skip_permutation_checks", lambda graph: None)
    with pytest.raises(hotloop.errors.PlanError, match="can't be compiled"):
        hotloop.lower(a_task(step=mixed, model=lambda: nn.Linear(6, 3)), STEP)


def changed(model: nn.Module, batch: Any) -> Tensor:
    """An order of which somebody has written one."""
    x, y = batch
    other = torch.randperm(len(x))
    other[0] = 1
    return nn.functional.cross_entropy(model(x + x[other]), y)


@pytest.mark.parametrize(("step", "trusted"), [(mixed, 2), (changed, 0)])
def test_only_what_surely_is_a_permutation_is_trusted(step: Any, trusted: int) -> None:
    program = hotloop.lower(a_task(step=step, model=lambda: nn.Linear(6, 3)), Plan())
    advance(program, 1)
    batch = tuple(value[:5] for value in labelled())
    graph = capture_step(program._step, batch, 5, {}, whole=True).graph
    found = graph.graph.find_nodes(op="call_function", target=torch.ops.aten._unsafe_index.Tensor)
    assert len(found) == trusted
