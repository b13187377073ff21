"""Which plans the search of a live run tries, and when it races the plan in use again.

The spans are those of a training that has no network, in stand-in seconds.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hotloop.core.records.race import TRUSTED_CLASSES, Parity
from hotloop.errors import PlanError
from hotloop.plan import Plan
from hotloop.training import live_search
from hotloop.training.live_search import LiveSearch, SearchSettings
from hotloop.tuning.candidate_process import PreparedPlan
from hotloop.tuning.economics import Payoff
from hotloop.tuning.spare_time import MAX_LOSS, SpareTime
from tests.support.live_runs import ProvenAtOnce

FIRST, RIVAL, EAGER = Plan(), Plan(compile="package"), Plan(layout="channels_last")
FEWER = Plan(threads=1)
SPAN = 10


class Training:
    """A training in which each plan has its seconds of a step; stands for the switcher and the loop of a search, too."""

    def __init__(self, steps: int, *candidates: Plan, idle_cores: float = 1.0) -> None:
        self.step_s = {FIRST: 2e-3, RIVAL: 1e-3, EAGER: 1.4e-3, FEWER: 2.6e-3}
        self.plan, self.now, self.load, self.steps = FIRST, 0.0, 1.0, steps
        self.lines: list[tuple[float, str]] = []
        program = SimpleNamespace(position=SimpleNamespace(step=0))
        self.loop = SimpleNamespace(program=program, run=SimpleNamespace(log=lambda event, **fields: None))
        settings = SearchSettings(candidates, FIRST, TRUSTED_CLASSES, normed=False, why_no_memory=lambda program: "")
        settings = replace(settings, fewer=FEWER, idle_cores=lambda: idle_cores)
        self.taken: list[tuple[float, Plan]] = []
        self.cached = "proven"
        training: Any = self
        self.search = LiveSearch(training, training, settings, (), lambda step_s: self.steps, self._say)

    def _say(self, line: str) -> None:
        self.lines.append((self.now, line))

    def switch(self, plan: Plan, reason: str, *, is_window: bool = False) -> None:
        self.plan = plan

    def prepare(self, plan: Plan, package: str = "") -> Any:
        if package not in ("", self.cached):
            raise PlanError("the package in the cache isn't the one that was proven", expected="", fix="")
        return SimpleNamespace(compile_s=0.0)

    def drop(self, plan: Plan) -> None:
        pass

    def span(self, times: float = 1.0) -> None:
        steps = self.search.before_span(SPAN)
        self.taken.append((self.now, self.plan))
        seconds = steps * self.step_s[self.plan] * self.load * times
        self.now, self.steps = self.now + seconds, self.steps - steps
        self.search.after_span(steps, seconds)

    def train(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until and self.steps > 0:
            self.span()

    @property
    def reopened(self) -> list[float]:
        """The seconds at which a race began again."""
        return [now for now, line in self.lines if "races again" in line]


def begun(
    monkeypatch: pytest.MonkeyPatch, steps: int, *candidates: Plan, child: type = ProvenAtOnce, idle_cores: float = 1.0
) -> Training:
    made = Training(steps, *candidates, idle_cores=idle_cores)
    monkeypatch.setattr(live_search, "CandidateProcess", child)
    monkeypatch.setattr(live_search, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Training:
    """A training whose rival has won its race: 1 ms for a step in place of 2."""
    made = begun(monkeypatch, 10**9, RIVAL)
    made.train(20)
    assert made.plan == RIVAL and made.reopened == []
    return made


class Profiled(ProvenAtOnce):
    """A child whose profile of the step shows that compiling doesn't pay."""

    def poll(self) -> PreparedPlan | None:
        found = super().poll()
        if found is None or self.plan.compile == "none":
            return found
        return replace(found, parity=None, why_not="it saves nothing", pays=False)


class Packaged(ProvenAtOnce):
    """A child that names the package that it has proven."""

    def poll(self) -> PreparedPlan | None:
        found = super().poll()
        return None if found is None else replace(found, package="proven")


@pytest.mark.parametrize("cached", ["proven", "another"])
def test_only_the_package_that_was_proven_races(monkeypatch: pytest.MonkeyPatch, cached: str) -> None:
    made = begun(monkeypatch, 10**6, RIVAL, child=Packaged)
    made.cached = cached
    made.train(20)
    assert made.plan == (RIVAL if cached == "proven" else FIRST)
    assert any("leaves out" in line for _, line in made.lines) == (cached != "proven")


@pytest.mark.parametrize(
    ("steps", "child"), [(12_000, ProvenAtOnce), (10**6, Profiled)], ids=["too short", "no gain by the profile"]
)
def test_an_eager_plan_is_tried_where_compiling_does_not_pay(
    monkeypatch: pytest.MonkeyPatch, steps: int, child: type
) -> None:
    made = begun(monkeypatch, steps, RIVAL, EAGER, child=child)
    made.train(20)
    assert made.plan == EAGER
    assert any("compiles no further plan" in line for _, line in made.lines)


def test_no_eager_plan_is_tried_after_a_compiled_one_has_won(monkeypatch: pytest.MonkeyPatch) -> None:
    made = begun(monkeypatch, 10**6, RIVAL, EAGER)
    made.train(60)
    assert made.plan == RIVAL
    assert not any(EAGER.brief() in line for _, line in made.lines)


def test_an_eager_plan_is_tried_after_a_compiled_one_has_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    made = begun(monkeypatch, 10**6, RIVAL, EAGER)
    made.step_s[RIVAL] = 3e-3
    made.train(60)
    assert made.plan == EAGER


def test_a_short_run_tries_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    made = begun(monkeypatch, 5_000, RIVAL, EAGER)
    made.train(20)
    assert made.plan == FIRST and sum("tries no further plan" in line for _, line in made.lines) == 1


def test_other_batches_for_which_the_other_plan_is_faster_bring_it_back(training: Training) -> None:
    training.step_s |= {FIRST: 4e-3, RIVAL: 6e-3}  # such as longer sequences
    training.train(60)
    assert training.plan == FIRST and len(training.reopened) == 1
    training.step_s |= {FIRST: 9e-3, RIVAL: 6e-3}
    training.train(120)
    assert training.plan == RIVAL and len(training.reopened) == 2


def test_a_load_that_grows_opens_the_race_again_after_longer_and_longer_pauses(training: Training) -> None:
    training.train(60)
    pauses = []
    for _ in range(4):
        training.load *= 1.5
        began, before = training.now, len(training.reopened)
        while len(training.reopened) == before and training.now < began + 1000:
            training.span()
        pauses.append(training.reopened[-1] - began)
        training.train(6)  # the race
        assert training.plan == RIVAL
    assert pauses[0] < 2  # more than a pause has passed since the first race
    assert pauses[1:] == pytest.approx([60, 120, 240], abs=10)


def test_the_same_load_opens_the_race_once(training: Training) -> None:
    training.load = 2.0
    training.train(5000)
    assert training.plan == RIVAL and len(training.reopened) == 1


@pytest.mark.parametrize("load", [0.5, 1.0, 1.25])
def test_steps_that_take_about_as_long_as_before_open_no_race(training: Training, load: float) -> None:
    training.load = load
    training.train(2000)
    assert training.plan == RIVAL and training.reopened == []


def test_a_few_long_spans_open_no_race(training: Training) -> None:
    training.train(60)
    for number in range(300):
        training.span(10.0 if number % 3 == 0 else 1.0)  # such as batches of a few long sequences
    assert training.reopened == []


def test_no_race_opens_again_soon_before_the_end(training: Training) -> None:
    training.train(60)
    training.load, training.steps = 2.0, 9_000  # 18 s
    training.train(100)
    assert training.steps <= 0 and training.reopened == []


class Long(ProvenAtOnce):
    """A child that works for `needs_s` seconds of its own, and stays within its share of the training's time."""

    needs_s = 4.0

    def __init__(self, task: Any, training: Any, eager: Plan, plans: list[Plan], accepted: Any, payoff: Payoff) -> None:
        self.plan, self.worked_s, self.is_stopped = plans[0], 0.0, False
        self.spare_time = SpareTime(payoff.step_s, self._pause, self._proceed, budget_s=payoff.budget_s)
        task.child = self

    def _pause(self) -> None:
        self.is_stopped = True

    def _proceed(self) -> None:
        self.is_stopped = False

    def poll(self) -> PreparedPlan | None:
        proof = Parity(plan=self.plan.brief(), parity="bitwise", reason="", states=1)
        return PreparedPlan(self.plan, proof, "", 0.1) if self.worked_s > self.needs_s else None


class Endless(Long):
    needs_s = 1e9


def beside_child(made: Training) -> tuple[float, float]:
    """Trains until the child or the run ends; returns the seconds of steps with one thread fewer, and with all threads."""
    child: Long | None = None
    beside_s, alone_s = 0.0, 0.0
    while made.steps > 0 and (child is None or child.worked_s <= child.needs_s):
        before, is_stopped = made.now, None if child is None else child.is_stopped
        made.span()
        child = getattr(made, "child", None)
        if child is not None and is_stopped is not None and made.plan in (FIRST, FEWER):
            assert is_stopped == (made.plan == FIRST) or made.search._child is None
            beside_s += (made.now - before) * (made.plan == FEWER)
            alone_s += (made.now - before) * (made.plan == FIRST)
            child.worked_s += (made.now - before) * (not is_stopped)
    return beside_s, alone_s


def test_steps_use_a_thread_less_beside_a_child_where_no_core_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    made = begun(monkeypatch, 10**5, RIVAL, child=Long, idle_cores=0.0)
    beside_s, alone_s = beside_child(made)
    assert beside_s > 3.9 and 0 < alone_s < 0.15 * beside_s, "all threads are for measurements alone"
    ended = len(made.taken)
    made.train(5)
    assert made.plan == RIVAL and FEWER not in {plan for _, plan in made.taken[ended:]}


def test_a_child_that_takes_too_long_costs_a_share_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 10**5
    made = begun(monkeypatch, steps, RIVAL, child=Endless, idle_cores=0.0)
    beside_s, alone_s = beside_child(made)
    lost_s = beside_s * (1 - made.step_s[FIRST] / made.step_s[FEWER])
    run_s = steps * made.step_s[FIRST]
    assert 0.12 * run_s < lost_s < MAX_LOSS * made.now + 1.0
    assert alone_s > 0.2 * run_s


def test_the_plan_with_a_thread_less_stays_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    made = begun(monkeypatch, 10**5, RIVAL, idle_cores=0.0)
    made.step_s |= {FEWER: 1.2e-3, RIVAL: 3e-3}
    made.train(30)
    assert made.plan == FEWER


@pytest.mark.parametrize(("steps", "idle_cores"), [(10**5, 1.0), (5_000, 0.0)], ids=["an idle core", "too short"])
def test_no_thread_is_spared_without_need(monkeypatch: pytest.MonkeyPatch, steps: int, idle_cores: float) -> None:
    made = begun(monkeypatch, steps, RIVAL, idle_cores=idle_cores)
    made.train(20)
    assert FEWER not in {plan for _, plan in made.taken}
