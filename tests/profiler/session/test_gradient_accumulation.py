"""Backwards of which many make an update, each so slow that a watch would end before the updates come."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hotloop.core.records.profile import Profile
from hotloop.profiler import step_sequence
from hotloop.profiler.base import phases
from tests.support.profiler.profiled_steps import watched

EACH_S = 2.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds, which go on only as the test has them go on."""
    now = [0.0]
    for module in (step_sequence, phases):
        theirs = SimpleNamespace(perf_counter=lambda: now[0], thread_time=time.thread_time)
        monkeypatch.setattr(module, "time", theirs)
    return now


def accumulated(clock: list[float], backwards: int, to_an_update: int) -> Profile:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loop() -> None:
        for number in range(1, backwards + 1):
            clock[0] += EACH_S
            model(torch.randn(8, 4)).pow(2).mean().backward()
            if number % to_an_update == 0:
                optimizer.step()  # an update
                optimizer.zero_grad()

    return watched(loop, steps=None)


def backwards_in(profile: Profile) -> bool:
    """Whether each was taken for a step, while an optimizer is known to be there."""
    assert not [note for note in profile.notes if "no optimizer" in note]
    assert not [one for one in profile.optimizers if one.kind == "by hand"]
    return any("each backward counts as one" in note for note in profile.notes)


@pytest.mark.few("16")
@pytest.mark.parametrize("many", [16, 32])
def test_slow_backwards_are_pieces_of_a_step_once_their_updates_have_come(clock: list[float], many: int) -> None:
    profile = accumulated(clock, 30 * many, many)
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    number = next(number for number, line in enumerate(source, 1) if line.endswith("# an update"))
    assert (
        profile.step_where.endswith(f"{Path(__file__).name}:{number}") and profile.steps >= step_sequence.ENOUGH_STEPS
    )
    assert profile.step_ms == pytest.approx(1e3 * EACH_S * many)
    assert not backwards_in(profile)


def test_updates_are_awaited_for_so_long_and_no_longer(clock: list[float]) -> None:
    profile = accumulated(clock, 300, 1000)
    assert backwards_in(profile)
    assert EACH_S * profile.steps < step_sequence.AWAITED_FACTOR * step_sequence.LONGEST_S < EACH_S * 300
    assert "didn't step" in profile.notes[-1] and "record with --steps 120" in profile.notes[-1]


def test_a_script_that_ends_before_its_first_update_is_asked_to_train_for_longer(clock: list[float]) -> None:
    profile = accumulated(clock, 14, 1000)
    assert backwards_in(profile) and "train for longer" in profile.notes[-1]


@pytest.mark.parametrize("unused", [False, True])
def test_an_update_by_hand_keeps_nobody_waiting(unused: bool, clock: list[float], own_optimizers: None) -> None:
    """Nor does an optimizer that was made for the same weights, and never steps."""
    weight, seen = torch.randn(4, 1, requires_grad=True), []
    optimizer = torch.optim.SGD([weight], lr=0.1) if unused else None

    def loop() -> None:
        for _ in range(100):
            clock[0] += EACH_S
            (torch.randn(8, 4) @ weight).pow(2).mean().backward()
            with torch.no_grad():
                weight.sub_(0.01 * weight.grad)
            seen.append(weight.grad)
            weight.grad = None

    profile = watched(loop, steps=None)
    assert EACH_S * profile.steps <= step_sequence.LONGEST_S
    assert [note for note in profile.notes if "no optimizer" in note]
    assert "update" not in profile.phases or [one.kind for one in profile.optimizers] == ["by hand"]
    del optimizer
