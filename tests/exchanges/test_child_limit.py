"""A fork that compiles beside a script is paused while the script's steps lose more than 2 % of their time."""

from __future__ import annotations

from typing import Any

import pytest

from hotloop.exchanges.modules import ChildLimit

STEP_S = 0.02


class Process:
    """A stand-in for a fork, which makes each step longer while the fork works."""

    def __init__(self, factor: float) -> None:
        self.factor, self.works, self.worked, self.steps = factor, True, 0, 0

    def pause(self) -> None:
        self.works = False

    def proceed(self) -> None:
        self.works = True

    @property
    def step_s(self) -> float:
        self.steps += 1
        self.worked += self.works
        return STEP_S * (self.factor if self.works else 1.0)


def train(limit: ChildLimit, process: Any, steps: int) -> float:
    """Returns the seconds of the steps."""
    passed_s = 0.0
    for _ in range(steps):
        seconds = process.step_s if process is not None else STEP_S
        passed_s += seconds
        limit.step_ended(process, seconds)
    return passed_s


@pytest.mark.parametrize("factor", [1.2, 1.5, 3.0])
def test_the_steps_lose_at_most_their_share(factor: float) -> None:
    limit, process, steps = ChildLimit(), Process(factor), 5000
    train(limit, None, 200)
    plain_s = steps * STEP_S
    assert train(limit, process, steps) <= plain_s * 1.025 + 0.6  # 0.3 s may be lost at any time, and a span at the end
    assert process.worked > 0


def test_a_fork_on_an_idle_core_works_nearly_always() -> None:
    limit, process = ChildLimit(), Process(1.0)
    train(limit, None, 200)
    train(limit, process, 2000)
    assert process.worked > 0.85 * process.steps


def test_an_evaluation_between_steps_is_no_loss() -> None:
    limit, process = ChildLimit(), Process(1.0)
    train(limit, None, 200)
    for _ in range(20):
        train(limit, process, 100)
        limit.step_ended(process, 30.0)  # type: ignore[arg-type]
    assert process.worked > 0.85 * process.steps


def test_a_fork_without_known_steps_is_not_limited() -> None:
    process = Process(3.0)
    train(ChildLimit(), process, 100)
    assert process.works
