"""What torch's compiler would make otherwise of a captured step, or fail with, is written so that it doesn't."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.lowering import mended
from hotloop.parity import prove
from hotloop.plan import Plan
from tests.cpu.eager_or_refused import STEP, refusal
from tests.cpu.programs import a_task


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


def test_that_takes_what_is_written_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mended, "_trust_permutations", lambda graph: None)
    if torch.__version__ >= "2.14":
        pytest.skip("a later torch may do without")
    with pytest.raises(hotloop.errors.PlanError, match="can't be compiled"):
        hotloop.lower(a_task(step=mixed, model=lambda: nn.Linear(6, 3)), STEP)


@pytest.mark.parametrize("plan", [STEP, Plan(compile="forward")], ids=Plan.brief)
def test_sparse_gradients_are_refused(plan: Plan) -> None:
    words = torch.randint(0, 9, (24, 6)), torch.randint(0, 3, (24,))
    said = refusal(
        plan,
        model=lambda: nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True), nn.Linear(4, 3)),
        data=words,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    assert "the gradient of '0.weight' is sparse" in said and "sparse=True" in said
