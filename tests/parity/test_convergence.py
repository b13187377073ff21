"""Trainings that end alike are told from those that don't, seed by seed."""

from __future__ import annotations

import random

import pytest
import torch

from hotloop.errors import PlanError
from hotloop.lowering.eager_step import EagerStep
from hotloop.parity.convergence import check_convergence, compare_losses
from hotloop.plan import Plan
from tests.support.programs import a_task, labelled

SEEDS = 5


def drawn(mean: float, spread: float, seed: int) -> list[float]:
    generator = random.Random(seed)
    return [generator.gauss(mean, spread) for _ in range(SEEDS)]


def outcome(baseline: list[float], plan: list[float]) -> bool:
    return compare_losses(baseline, plan, what="train_loss", epochs=1, seeds=range(SEEDS)).equivalent


def test_the_same_figures_are_equivalent() -> None:
    figures = drawn(0.5, 0.02, 1)
    assert outcome(figures, figures)
    assert outcome([0.5] * SEEDS, [0.5] * SEEDS)
    assert outcome([0.0] * SEEDS, [0.0] * SEEDS)


def test_small_differences_seed_by_seed_are_equivalent() -> None:
    figures = drawn(0.5, 0.02, 1)
    assert outcome(figures, [one + off for one, off in zip(figures, drawn(0.0, 0.002, 2), strict=True)])


@pytest.mark.parametrize("by", [0.04, -0.04])
def test_a_shift_beyond_the_spread_is_not(by: float) -> None:
    """A better end is another end, too."""
    figures = drawn(0.5, 0.02, 1)
    assert not outcome(figures, [one + by for one in figures])


def test_what_is_too_uncertain_is_not() -> None:
    """A test that can't tell must not say yes."""
    assert not outcome(drawn(0.5, 0.02, 1), drawn(0.5, 0.2, 2))


def test_an_end_that_is_not_finite_is_not() -> None:
    assert not outcome(drawn(0.5, 0.02, 1), [0.5] * (SEEDS - 1) + [float("nan")])


def test_under_chance_alone_it_is_wrong_in_at_most_five_of_a_hundred() -> None:
    """Plans whose true difference is the margin itself count as equivalent only now and then."""
    wrong = 0
    for seed in range(400):
        figures = drawn(0.5, 1e-6, seed)  # so the margin is 1 %, 0.005
        wrong += outcome(
            figures, [one + 0.005 + off for one, off in zip(figures, drawn(0, 0.002, -1 - seed), strict=True)]
        )
    assert wrong <= 0.08 * 400


def test_a_plan_that_changes_nothing_ends_alike() -> None:
    found = check_convergence(a_task(epochs=2), Plan(optimizer="foreach"), 3)
    assert found.equivalent
    assert found.plan == found.baseline
    assert len(set(found.baseline)) == 3  # each seed is a training of its own


def test_a_fault_ends_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    run = EagerStep._run

    def halved(self: EagerStep, batch: object, samples: int, step: int) -> object:
        if self.parts.plan.threads == 1:
            for group in self.optimizer.param_groups:
                group["lr"] = 0.02
        return run(self, batch, samples, step)

    monkeypatch.setattr(EagerStep, "_run", halved)
    found = check_convergence(a_task(epochs=6), Plan(threads=1), 3)
    assert not found.equivalent


def test_validation_data_decides_where_there_is_some() -> None:
    task = a_task(epochs=1, validation=labelled(12))
    assert check_convergence(task, Plan(), 3).what == "validation_loss"


def test_too_few_seeds_are_refused() -> None:
    with pytest.raises(PlanError, match="3 or more"):
        check_convergence(a_task(), Plan(), 2)


def test_random_generators_are_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    check_convergence(a_task(epochs=1), Plan(), 3)
    assert torch.equal(torch.rand(1), expected)
