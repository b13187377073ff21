"""A child never takes more than its share of the training's time, however the machine's load changes."""

from __future__ import annotations

import time

import pytest

from hotloop.core.hardware.limits import allowed_cores
from hotloop.tuning.economics import LIVE_RACE_S, Payoff, estimate_compile_s, estimate_proof_s
from hotloop.tuning.spare_time import MAX_LOSS, IdleCores, SpareTime

ALONE_S = 1e-3

WORK: dict[str, float] = dict(
    gain=2.0, compile_s=estimate_compile_s(40), proof_s=estimate_proof_s(1e-3, 0.0), race_s=LIVE_RACE_S
)


class Machine:
    """A training whose steps take `beside` times as long while the child runs."""

    def __init__(self, beside: float) -> None:
        self.beside, self.alone_s = beside, ALONE_S
        self.is_running, self.seconds, self.steps, self.child_s = True, 0.0, 0, 0.0
        self.spare = SpareTime(ALONE_S, self.pause, self.proceed)

    def pause(self) -> None:
        self.is_running = False

    def proceed(self) -> None:
        self.is_running = True

    def train(self, spans: int, steps: int = 100) -> None:
        for _ in range(spans):
            seconds = steps * self.alone_s * (self.beside if self.is_running else 1.0)
            self.child_s += seconds * self.is_running
            self.seconds, self.steps = self.seconds + seconds, self.steps + steps
            self.spare.record(steps, seconds)


@pytest.mark.parametrize("beside", [1.0, 1.1, 1.5, 2.0, 10.0])
def test_the_steps_lose_no_more_than_their_share(beside: float) -> None:
    machine = Machine(beside)
    machine.train(2000)
    lost = machine.seconds / (machine.steps * ALONE_S) - 1
    assert lost <= 1.05 * MAX_LOSS / (1 - MAX_LOSS) + 0.3 / machine.seconds
    assert machine.child_s > 0


def test_a_child_that_costs_little_is_paused_for_measurements_alone() -> None:
    machine = Machine(1.1)
    machine.train(1000)
    assert machine.child_s > 0.9 * machine.seconds


def test_a_child_goes_on_after_the_load_of_the_machine_has_changed() -> None:
    machine = Machine(1.5)
    machine.train(200)
    before = machine.child_s / machine.seconds
    machine.alone_s *= 3  # another program on the same machine
    machine.train(1000)
    assert machine.child_s / machine.seconds > 0.8 * before


def test_cores_that_work_are_not_idle() -> None:
    cores = IdleCores()
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        pass
    assert cores.measure() <= len(allowed_cores()) - 0.5


def test_a_child_without_an_idle_core_takes_longer() -> None:
    payoffs = [Payoff(40_000, 1e-3, **WORK, loss=MAX_LOSS, idle_cores=idle) for idle in (2.0, 1.0, 0.5, 0.0)]
    times_s = [payoff.prepare_s for payoff in payoffs]
    assert times_s[0] == times_s[1] < times_s[2] < times_s[3]
    assert payoffs[0].is_worthwhile and not payoffs[3].is_worthwhile


def test_a_child_that_costs_more_than_its_budget_takes_longer() -> None:
    def payoff(loss: float, budget_s: float) -> Payoff:
        return Payoff(60_000, 1e-3, **WORK, loss=loss, budget_s=budget_s)

    in_time = payoff(0.3, 9.0)
    assert in_time.prepare_s == in_time.work_s and in_time.is_worthwhile
    late = payoff(0.5, 9.0)
    assert late.prepare_s == pytest.approx(late.work_s + (0.5 * late.work_s - 9.0) / MAX_LOSS)
    assert late.saves_s < in_time.saves_s and not payoff(0.9, 9.0).is_worthwhile
