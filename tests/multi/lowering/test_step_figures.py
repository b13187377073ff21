"""Further figures of a step: means over the parts of each batch, and a line that says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotloop
from hotloop.plan import Plan
from tests.support.processes import rank_processes  # noqa: F401 - imports what each fork would

LINE = "perplexity: means over {}, weighted as the loss; a figure that is no mean over samples, such as a perplexity,"
RANKS, PIECES, MICROBATCHES = (f"the {parts} of each batch" for parts in ("ranks' rows", "pieces", "microbatches"))


def perplexity(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    return {"loss": loss, "perplexity": loss.exp()}


def loss_alone(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def task(step: Any) -> hotloop.Task:
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return hotloop.Task(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double(),
        step=step,
        optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
        data=(x, x[:, :4].argmax(1)),
        validation=(x[:11], x[:11, :4].argmax(1)),
        batch_size=8,
        epochs=2,
    )


@pytest.mark.few("accumulation=2-*")
@pytest.mark.parametrize(
    ("plan", "parts"),
    [
        (Plan(parallel="data", ranks=2), RANKS),
        pytest.param(Plan(parallel="sharded", ranks=2), RANKS, marks=pytest.mark.more),
        pytest.param(Plan(parallel="local", ranks=2), RANKS, marks=pytest.mark.more),
        pytest.param(Plan(parallel="stages", ranks=2, microbatches=2), MICROBATCHES, marks=pytest.mark.more),
        (Plan(accumulation=2), PIECES),
        (Plan(), ""),
        pytest.param(Plan(parallel="tensor", ranks=2), "", marks=pytest.mark.more),
        pytest.param(Plan(parallel="async", ranks=2), "", marks=pytest.mark.more),
    ],
    ids=lambda given: given.brief() if isinstance(given, Plan) else "",
)
def test_a_line_names_figures_that_are_means_over_parts_of_a_batch(
    plan: Plan, parts: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = hotloop.fit(task(perplexity), run=tmp_path / "run", plan=plan)
    said = " ".join(capfd.readouterr().err.split())
    assert said.count("means over") == bool(parts)
    assert not parts or LINE.format(parts) in said
    assert all(row["train_perplexity"] > 1 for row in run.epochs)


@pytest.mark.more
def test_a_step_without_further_figures_gets_no_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hotloop.fit(task(loss_alone), run=tmp_path / "run", plan=Plan(parallel="data", ranks=2))
    assert "means over" not in capfd.readouterr().err


@pytest.mark.more
def test_in_training_the_mean_over_ranks_differs_and_in_validation_it_is_that_of_one_process(tmp_path: Path) -> None:
    one = hotloop.fit(task(perplexity), run=tmp_path / "one", plan=Plan(), progress=False)
    two = hotloop.fit(task(perplexity), run=tmp_path / "two", plan=Plan(parallel="data", ranks=2), progress=False)
    for ours, theirs in zip(two.epochs, one.epochs, strict=True):
        for figure in ("train_loss", "validation_loss", "validation_perplexity"):
            assert ours[figure] == pytest.approx(theirs[figure], rel=1e-10)
        assert ours["train_perplexity"] > theirs["train_perplexity"] * (1 + 1e-6)  # exp is convex
