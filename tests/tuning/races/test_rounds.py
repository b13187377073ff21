"""Rounds of windows on a machine made of a clock alone: what it does to plans is known, so what is found can be judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from hotloop.tuning.races import rounds
from hotloop.tuning.races.rounds import ContenderTimes, RaceLimits, ratio_to_baseline, run_rounds
from hotloop.tuning.races.statistics import verdict_of


@dataclass
class Machine:
    """A clock that moves as plans run; `slowness(now)` is what the machine makes of a second's work."""

    slowness: Callable[[float], float] = lambda now: 1.0
    noise: float = 0.0
    now: float = 0.0
    last: str = ""
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._generator = np.random.default_rng(0)

    def works(self, seconds: float) -> float:
        took = seconds * self.slowness(self.now) * float(np.exp(self._generator.normal(0.0, self.noise)))
        self.now += took
        return took


@dataclass
class Plan:
    """Steps that take so long; the first ones after another plan take `cold` times as long."""

    machine: Machine
    name: str
    step_s: float
    cold: float = 1.0
    cold_steps: int = 0
    breaks_at: float | None = None
    windows: int = 0

    def run_untimed(self, steps: int) -> None:
        self._run(steps)

    def window(self, steps: int) -> float:
        if self.breaks_at is not None and self.machine.now >= self.breaks_at:
            raise RuntimeError(f"{self.name} broke")
        self.machine.log.append(self.name)
        self.windows += 1
        return self._run(steps)

    def _run(self, steps: int) -> float:
        if self.machine.last != self.name:
            self.machine.last, self._left = self.name, self.cold_steps
        total = 0.0
        for _ in range(steps):
            total += self.machine.works(self.step_s * (self.cold if self._left > 0 else 1.0))
            self._left -= 1
        return total


def lanes(machine: Machine, untimed: int = 0, steps: int = 5, **plans: float) -> list[ContenderTimes]:
    return [ContenderTimes(name, Plan(machine, name, step_s), steps, untimed) for name, step_s in plans.items()]


def run(raced: Sequence[ContenderTimes], machine: Machine, seconds: float = 100.0, brief: bool = False) -> list[float]:
    """Races them; the shares of the time that were told."""
    told: list[float] = []
    run_rounds(raced, raced[0], RaceLimits(seconds, lambda: machine.now, brief), told.append)
    return told


DRIFTS: dict[str, Callable[[float], float]] = {
    "grows slower": lambda now: 1.0 + now / 5,
    "grows faster": lambda now: 1 / (1.0 + now / 5),
    "slow for a while": lambda now: 3.0 if 2 < now < 4 else 1.0,
    "to and fro": lambda now: 2.0 + np.sin(now),
}


@pytest.mark.parametrize("drift", DRIFTS)
def test_a_machine_that_drifts_makes_no_difference_between_equals(drift: str) -> None:
    machine = Machine(DRIFTS[drift], noise=0.02)
    a, b, c = raced = lanes(machine, a=0.01, b=0.01, c=0.011)
    run(raced, machine, seconds=20)
    assert verdict_of(ratio_to_baseline(b, a)) == "no difference"
    assert verdict_of(ratio_to_baseline(c, a)) == "slower"


@pytest.mark.parametrize("drift", ["grows slower", "grows faster"])
def test_one_after_the_other_would_be_fooled(drift: str, monkeypatch) -> None:
    """The fault that rounds are there against: all windows of one plan, then all of the next."""

    def not_in_turn(running: Sequence[ContenderTimes], baseline: ContenderTimes) -> None:
        for lane in running:
            lane.times = [lane.windows.window(lane.steps) / lane.steps for _ in range(40)]

    monkeypatch.setattr(rounds, "_run_round", not_in_turn)
    machine = Machine(DRIFTS[drift], noise=0.02)
    a, b = raced = lanes(machine, a=0.01, b=0.01)
    run(raced, machine, seconds=0.001)
    assert verdict_of(ratio_to_baseline(b, a)) in ("slower", "faster")


def test_each_round_goes_forth_and_back_and_the_next_the_other_way() -> None:
    machine = Machine(noise=0.3)
    run(lanes(machine, a=0.01, b=0.01, c=0.01), machine, seconds=2)
    assert "".join(machine.log).startswith("abccba" + "cbaabc" + "abccba")


def test_what_the_plan_before_left_behind_is_over_before_the_window() -> None:
    """Caches and threads of another plan slow the first steps of a window down; here by more for one of the plans."""

    def found(untimed: int) -> str | None:
        machine = Machine(noise=0.01)
        a = ContenderTimes("a", Plan(machine, "a", 0.01, cold=1.5, cold_steps=2), 5, untimed)
        b = ContenderTimes("b", Plan(machine, "b", 0.01, cold=3.0, cold_steps=2), 5, untimed)
        run([a, b], machine)
        return verdict_of(ratio_to_baseline(b, a))

    assert found(untimed=2) == "no difference"
    assert found(untimed=0) == "slower"


def test_a_loser_stops_early_and_the_others_go_on() -> None:
    machine = Machine(noise=0.2)
    raced = lanes(machine, a=0.01, b=0.02, c=0.0101)
    run(raced, machine, seconds=20)
    a, b, c = raced
    assert [lane.is_running for lane in raced] == [True, False, True]
    assert len(a.times) == len(c.times) > 2 * len(b.times)
    assert verdict_of(ratio_to_baseline(b, a)) == "slower" and ratio_to_baseline(b, a).median == pytest.approx(
        0.5, rel=0.15
    )


def test_who_is_behind_goes_on_until_it_is_known_whether_it_beats_the_baseline() -> None:
    """It wins if the fastest fails its proof."""
    machine = Machine(noise=0.1)
    raced = lanes(machine, a=0.01, fast=0.005, b=0.0094)
    run(raced, machine, seconds=100)
    a, fast, b = raced
    assert verdict_of(ratio_to_baseline(b, a)) == "faster" and len(b.times) < len(fast.times)


def test_the_baseline_runs_to_the_end_however_slow() -> None:
    machine = Machine(noise=0.2)
    raced = lanes(machine, a=0.05, b=0.01, c=0.0101)
    run(raced, machine, seconds=20)
    assert raced[0].is_running and len(raced[0].times) == max(len(lane.times) for lane in raced)


def test_it_stops_when_enough_was_measured() -> None:
    machine = Machine(noise=0.001)
    raced = lanes(machine, a=0.01, b=0.0095)
    run(raced, machine, seconds=1000)
    assert machine.now < 10 and verdict_of(ratio_to_baseline(raced[1], raced[0])) == "faster"


@pytest.mark.parametrize("seconds", [0.7, 3.0])
def test_it_stops_when_the_time_is_over(seconds: float) -> None:
    machine = Machine(noise=0.5)
    told = run(lanes(machine, a=0.01, b=0.01), machine, seconds)
    assert 0.5 * seconds < machine.now < 1.3 * seconds
    assert told == sorted(told) and told[0] > 0 and told[-1] <= 1


def test_one_round_is_run_however_short_the_time() -> None:
    machine = Machine()
    raced = lanes(machine, a=1.0, b=1.0)
    run(raced, machine, seconds=0.001)
    assert [len(lane.times) for lane in raced] == [1, 1]


def test_a_plan_that_breaks_leaves_the_race_to_the_others() -> None:
    machine = Machine(noise=0.1)
    a, b, c = raced = lanes(machine, a=0.01, b=0.01, c=0.01)
    assert isinstance(b.windows, Plan)
    b.windows.breaks_at = 1.0
    run(raced, machine, seconds=10)
    assert str(b.error) == "b broke" and not b.is_running
    assert len(a.times) == len(c.times) > len(b.times)


def test_a_baseline_that_breaks_ends_the_race() -> None:
    machine = Machine(noise=0.1)
    raced = lanes(machine, a=0.01, b=0.01)
    assert isinstance(raced[0].windows, Plan)
    raced[0].windows.breaks_at = 0.5
    with pytest.raises(RuntimeError, match="a broke"):
        run(raced, machine)


LAYOUTS: dict[str, tuple[str, float, float, int, int]] = {  # device, step, the baseline's step, steps, untimed
    "as the baseline": ("cpu", 0.001, 0.001, 10, 2),
    "about as fast: the same batches": ("cpu", 0.0004, 0.001, 10, 2),
    "much faster": ("cpu", 0.0001, 0.001, 100, 20),
    "much slower": ("cpu", 0.01, 0.001, 1, 1),
    "longer than a window": ("cpu", 2.0, 2.0, 1, 0),
    "where waiting costs": ("cuda", 0.001, 0.001, 100, 20),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_how_long_windows_are(name: str) -> None:
    device, step_s, baseline_s, steps, untimed = LAYOUTS[name]
    lane = ContenderTimes("a", Plan(Machine(), "a", step_s))
    lane.set_layout(device, step_s, baseline_s)
    assert (lane.steps, lane.untimed) == (steps, untimed)


def test_a_search_takes_half_of_a_race_s_time_and_finds_the_same_plan() -> None:
    """On a noisy machine, with plans that can't win among them."""
    spent: dict[bool, float] = {}
    for brief in (False, True):
        machine = Machine(noise=0.05)
        raced = lanes(machine, base=1e-2, fast=8e-3, near=9.8e-3, slow=1.4e-2)
        run(raced, machine, brief=brief)
        best = max(raced, key=lambda lane: ratio_to_baseline(lane, raced[0]).median)
        assert best.name == "fast"
        assert verdict_of(ratio_to_baseline(best, raced[0])) == "faster"
        spent[brief] = machine.now
    assert spent[True] < spent[False] / 2


def test_a_search_among_equals_doesn_t_go_on_for_ever() -> None:
    machine = Machine(noise=0.01)
    raced = lanes(machine, base=1e-2, same=1e-2, other=1e-2)
    run(raced, machine, brief=True)
    assert machine.now < 20
    assert not any(verdict_of(ratio_to_baseline(lane, raced[0])) == "faster" for lane in raced)


def test_long_steps_of_a_search_run_forth_alone() -> None:
    """So that eight pairs, of which an interval can be told, cost eight steps of each plan."""
    machine = Machine(noise=0.01)
    raced = lanes(machine, steps=1, base=1.5, fast=1.0, slow=1.6)
    for lane in raced:
        lane.set_layout("cpu", lane.windows.step_s, 1.5, brief=True)  # type: ignore[attr-defined]
    run(raced, machine, seconds=1000, brief=True)
    assert "".join(name[0] for name in machine.log).startswith("bfs" + "sfb" + "bfs")
    assert len(raced[0].times) == 8 and verdict_of(ratio_to_baseline(raced[1], raced[0])) == "faster"
    assert machine.now < 8 * (1.5 + 1.0 + 1.6)


def test_axes_don_t_beat_each_other_in_a_search() -> None:
    """What is slower than the best of another axis is still worth having together with it."""
    machine = Machine(noise=0.02)
    raced = lanes(machine, base=9e-3, one=5e-3, two=6e-3, fused=7e-3, layout=1.2e-2)
    for lane, group in zip(raced, ["", "threads", "threads", "optimizer", "layout"], strict=True):
        lane.group = group
    run(raced, machine, brief=True)
    base, one, two, fused, layout = raced
    assert verdict_of(ratio_to_baseline(one, base)) == verdict_of(ratio_to_baseline(fused, base)) == "faster"
    assert not two.is_running and fused.is_running  # of one axis the best alone is wanted
    assert not layout.is_running  # behind the baseline


def test_a_group_of_which_enough_is_known_waits_for_the_others() -> None:
    machine = Machine(noise=0.2)
    raced = lanes(machine, base=1e-2, fast=5e-3, near=9.2e-3)
    for lane in raced:
        lane.group = lane.name
    run(raced, machine, brief=True)
    assert len(raced[1].times) < len(raced[2].times)


def test_a_search_drops_what_takes_twice_as_long_at_once() -> None:
    machine = Machine(noise=0.02)
    raced = lanes(machine, base=1e-2, fast=8e-3, snail=1e-1)
    run(raced, machine, brief=True)
    assert len(raced[2].times) == 2
