"""Steps that go by before a clean one: they are spared all but their ends, and nothing is lost by that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer
from torch.utils.data import DataLoader

from hotloop.profiler import autograd_patterns, session
from hotloop.profiler.base.call_sites import CallSites
from hotloop.profiler.base.phases import Instant
from hotloop.profiler.base.steps import StepFact
from hotloop.profiler.session import LightMode, ProfilerSession, make_observers
from hotloop.profiler.step_sequence import StepSequence

STEPS = 24
LONG = 1000
"""Steps of a loop that goes on until enough were seen."""


class Hand:
    def __init__(self) -> None:
        self.now_ms = 0.0

    def mark(self, *, idle: bool = True) -> Instant:
        return Instant(self.now_ms / 1e3, 0.0, 0)

    def ms(self, first: Instant, last: Instant) -> float:
        return (last.wall_s - first.wall_s) * 1e3

    def idle_ms(self, first: Instant, last: Instant) -> float:
        return 0.0

    def has_passed(self, mark: Instant) -> bool:
        return True


class Loop:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Hand()
        monkeypatch.setattr(autograd_patterns, "time", SimpleNamespace(perf_counter=lambda: self.clock.now_ms / 1e3))
        self.watch = ProfilerSession(STEPS, CallSites(), lambda facts: None, lambda watch: make_observers(watch, None))
        self.watch.timeline.clock = self.clock
        self.net = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.course, self.updates = self.watch._sequence, 0

    def step(self) -> None:
        self.net(torch.ones(2, 4)).sum().backward()
        self.clock.now_ms += 1.0
        self.updates += 1
        self.optimizer.step()

    def run(self, each: Callable[[int], Any] = lambda number: None) -> list[StepFact]:
        self.watch.install()
        for number in range(LONG):
            if self.watch.closed:
                break
            self.step()
            each(number)
        self.watch.close()
        self.watch.remove()
        assert self.watch.closed and not self.watch.facts.notes, self.watch.facts.notes
        return [step for step in self.watch.facts.steps if step.kind == "clean"]

    def until(self, left: int) -> None:
        self.watch.install()
        for _ in range(LONG):
            if self.course.light_span.on and self.course.light_span.left == left:
                return
            self.step()
        raise AssertionError("no step is spared")


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    one = Loop(monkeypatch)
    yield one
    one.watch.close()
    one.watch.remove()


def whole_boundaries(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Of the steps that went by: how many ended with all that ending a step takes, and how many there were."""
    whole = []
    boundary = StepSequence.boundary

    def noted(course: StepSequence, at: Any = None) -> None:
        whole.append(course.light_span.left > 0)
        boundary(course, at)

    monkeypatch.setattr(StepSequence, "boundary", noted)
    kinds: list[bool] = []
    assert len(loop.run(lambda number: kinds.append(loop.course.light_span.left > 0))) == STEPS // 2
    return sum(whole), sum(kinds)


def test_steps_that_go_by_end_with_hardly_anything(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, passed = whole_boundaries(loop, monkeypatch)
    assert whole == 0 < passed
    assert loop.watch.facts.updates == loop.updates


def test_steps_that_go_by_with_all_that_others_take_are_seen(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LightMode, "begin", lambda sparing, *arguments: None)
    whole, passed = whole_boundaries(loop, monkeypatch)
    assert whole == passed > 0


def test_a_clean_step_takes_its_own_time_alone(loop: Loop) -> None:
    assert [step.ms for step in loop.run()] == pytest.approx([1.0] * (STEPS // 2))


PAUSE_MS = 100.0


@pytest.mark.few("evaluation-5", "checkpoint-3")
@pytest.mark.parametrize("every", [3, 5, 7])
@pytest.mark.parametrize("what", ["evaluation", "checkpoint"])
def test_a_pause_is_no_time_of_a_step_and_all_of_it_is_counted(
    loop: Loop, what: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = SimpleNamespace(perf_counter=lambda: loop.clock.now_ms / 1e3, monotonic=time.monotonic)
    monkeypatch.setattr(session, "time", now)
    paused: list[bool] = []

    def save(*args: object) -> None:
        loop.clock.now_ms += PAUSE_MS

    monkeypatch.setattr(torch, "save", save)

    def pause(number: int) -> None:
        if loop.watch.closed or loop.course.facts.anchor == "" or number % every:
            return
        paused.append(loop.course.light_span.left > 0)
        if what == "checkpoint":
            torch.save(0)
            return
        loop.net.eval()
        loop.clock.now_ms += PAUSE_MS
        loop.net.train()

    clean = loop.run(pause)
    assert any(paused) and not all(paused)
    for step in clean:
        assert step.ms == pytest.approx(1.0 + PAUSE_MS * (what in step.flags))
        assert step.apart_ms == pytest.approx({what: PAUSE_MS} if what in step.flags else {})
    facts = loop.watch.facts
    counted = facts.between_ms.get(what, 0.0) + sum(step.apart_ms.get(what, 0.0) for step in facts.steps)
    assert counted == pytest.approx(PAUSE_MS * len(paused))


def test_what_is_drawn_in_a_clean_step_is_known(loop: Loop) -> None:
    first, second = (iter(DataLoader(torch.ones(LONG, 4))) for _ in range(2))
    drew: list[bool] = []
    expected: list[list[str]] = []
    seen = 0

    def draw(number: int) -> None:
        nonlocal seen
        if len(loop.course.facts.steps) != seen:
            seen = len(loop.course.facts.steps)
            if seen and loop.course.facts.steps[-1].kind == "clean":
                expected.append(["loader 0", "loader 1"] if drew[-1] else ["loader 0"])
        next(first)
        drew.append(number % 3 == 0)
        if drew[-1]:
            next(second)

    clean = loop.run(draw)
    assert [step.flags for step in clean] == expected
    assert len({len(flags) for flags in expected}) == 2


def elsewhere(loop: Loop) -> None:
    loop.optimizer.step()


def beside(loop: Loop) -> None:
    other = threading.Thread(target=loop.step)
    other.start()
    other.join()


@pytest.mark.parametrize(("how", "strayed"), [(elsewhere, 1), (beside, 0)])
@pytest.mark.parametrize("left", [0, 2])
def test_an_update_of_another_place_or_thread_ends_no_step(
    loop: Loop, how: Callable[[Loop], None], strayed: int, left: int
) -> None:
    loop.until(left)
    steps = len(loop.course.facts.steps)
    how(loop)
    assert (loop.course.light_span.left, len(loop.course.facts.steps), loop.course._strays.most) == (
        left,
        steps,
        strayed,
    )
    loop.step()
    assert (loop.course.light_span.left, len(loop.course.facts.steps)) == (max(0, left - 1), steps + (left == 0))


def test_an_update_on_another_line_of_the_same_function_ends_no_step(loop: Loop) -> None:
    loop.watch.install()
    left: list[int] = []
    for number in range(60):
        loop.net(torch.ones(2, 4)).sum().backward()
        loop.clock.now_ms += 1.0
        loop.optimizer.step()
        if loop.course.light_span.on and loop.course.light_span.left == 2 and number > 20:
            loop.optimizer.step()
            left.append(loop.course.light_span.left)
    assert left and set(left) == {2}


@pytest.mark.parametrize("left", [0, 2])
def test_a_script_that_ends_meanwhile_leaves_nothing_behind(loop: Loop, left: int) -> None:
    places = [(torch.autograd, "_engine_run_backward"), (torch.utils.data.dataloader._BaseDataLoaderIter, "__next__")]
    before = [vars(owner)[name] for owner, name in places]
    loop.until(left)
    loop.watch.close()
    loop.watch.remove()
    assert [vars(owner)[name] for owner, name in places] == before
    assert loop.watch.facts.updates == loop.updates
    assert not optimizer._global_optimizer_pre_hooks
    assert not optimizer._global_optimizer_post_hooks


def spared(loop: Loop, each: Callable[[int], Any]) -> bool:
    """Whether any step is."""
    found: list[bool] = []

    def look(number: int) -> None:
        found.append(loop.course.light_span.on)
        each(number)

    loop.run(look)
    return any(found)


def test_a_loop_with_a_second_optimizer_is_heard_in_each_step(loop: Loop) -> None:
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.01)
    assert not spared(loop, lambda number: other.step())


def test_a_loop_that_opens_another_loader_in_each_step_is_heard_in_each(loop: Loop) -> None:
    assert not spared(loop, lambda number: next(iter(DataLoader(torch.ones(2, 4)))))


def test_data_at_the_address_of_data_that_is_gone_is_another_loaders(loop: Loop) -> None:
    class Data(list):
        """Of its own address, whatever another had before."""

    addresses: set[int] = set()

    def draw(number: int) -> None:
        data = Data([torch.ones(4)] * 2)
        addresses.add(id(data))
        next(iter(DataLoader(data)))

    assert not spared(loop, draw)
    assert len(addresses) < loop.updates


@pytest.mark.parametrize("batches", [1, 5])
def test_another_epoch_of_the_same_loader_is_nothing_unusual(loop: Loop, batches: int) -> None:
    loader = DataLoader(torch.ones(batches, 4))
    epochs = (batch for _ in range(LONG) for batch in loader)
    whole: list[bool] = []
    boundary = loop.course.boundary
    loop.course.boundary = lambda at=None: (whole.append(loop.course.light_span.left > 0), boundary(at))  # type: ignore

    def draw(number: int) -> None:
        next(epochs)

    assert {tuple(step.flags) for step in loop.run(draw)} == {("loader 0",)}
    assert not any(whole)


def test_a_pass_over_another_loader_is_known_in_a_clean_step(loop: Loop) -> None:
    loader, other = DataLoader(torch.ones(5, 4)), DataLoader(torch.ones(3, 4))
    epochs = (batch for _ in range(LONG) for batch in loader)
    passes: list[bool] = []
    expected: list[bool] = []
    seen = 0

    def draw(number: int) -> None:
        nonlocal seen
        steps = loop.course.facts.steps
        if len(steps) != seen:
            seen = len(steps)
            expected.extend([passes[-1]] if seen and steps[-1].kind == "clean" else [])
        next(epochs)
        passes.append(number % 5 == 0)
        if passes[-1]:
            list(other)

    clean = loop.run(draw)
    assert ["loader 1" in step.flags for step in clean] == expected
    assert len(set(expected)) == 2


def test_a_loop_that_evaluates_in_each_step_is_heard_in_each(loop: Loop) -> None:
    assert not spared(loop, lambda number: loop.net.eval())


def test_a_loop_that_says_in_each_step_that_it_trains_is_spared(loop: Loop) -> None:
    assert spared(loop, lambda number: loop.net.train())


def test_what_somebody_else_puts_around_a_backward_stays_and_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    heard: list[int] = []
    began = ProfilerSession.backward_began

    def hear(watch: ProfilerSession, args: tuple, kwargs: dict) -> Any:
        heard.append(loop.updates)
        return began(watch, args, kwargs)

    monkeypatch.setattr(ProfilerSession, "backward_began", hear)
    loop = Loop(monkeypatch)

    def put(number: int) -> None:
        if number != 10:
            return
        inner = torch.autograd._engine_run_backward

        def around(*args: Any, **kwargs: Any) -> Any:
            calls.append(number)
            return inner(*args, **kwargs)

        monkeypatch.setattr(torch.autograd, "_engine_run_backward", around)

    loop.run(put)
    assert len(calls) == loop.updates - 11
    assert len(heard) == len(set(heard)) > 0
    assert torch.autograd._engine_run_backward.__name__ == "around"
