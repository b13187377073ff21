"""A child never takes more than its share of the training's time, however the machine's load changes."""

from __future__ import annotations

import pytest

from hotloop.tuning.live.spare_time import MAX_LOSS, SpareTime

ALONE_S = 1e-3


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
