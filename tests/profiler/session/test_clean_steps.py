"""What a clean step is spared: backwards that tell nothing, and caches that are cold from the step before."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hotloop.core.records.profile_terms import Phase
from hotloop.profiler import step_sequence
from hotloop.profiler.base import phases
from hotloop.profiler.base.steps import CLOSE, Kind, ProfileFacts, StepFact, TrainingEvent, order
from hotloop.profiler.session import ProfilerSession
from hotloop.profiler.step_sequence import StepSequence
from hotloop.profiler.summary import summarize
from tests.support.profiler.profiled_steps import watched

STEPS = 24
DISTURBING = {*CLOSE, "clocked"}


class Quiet:
    """A stage on which nothing happens.

    Attributes:
        kinds: how each step was watched; one after which a clean step begins anew is one that settles.
    """

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def begin(self, kind: Kind) -> Phase:
        self.kinds.append(kind)
        return "python"

    def restart_step(self) -> None:
        assert self.kinds[-1] == "clean"
        self.kinds.insert(-1, "settling")

    def observers_ready(self) -> None: ...
    def flags(self) -> list[str]:
        return []

    def end(self, *, usual: bool = True) -> None: ...
    def restart(self) -> None: ...
    def between_steps(self) -> None: ...


class Even:
    """A clock by which all steps take the same time: it goes on whenever it is looked at."""

    def __init__(self, ms: float) -> None:
        self._each_ms, self._now_ms = ms, 0.0

    def mark(self, *, idle: bool = True) -> float:
        self._now_ms += self._each_ms
        return self._now_ms

    def ms(self, first: float, last: float) -> float:
        return last - first

    def idle_ms(self, first: float, last: float) -> float:
        return 0.0

    def has_passed(self, mark: float) -> bool:
        return True


def taken(ms: float, *, steps: int = STEPS, in_step: bool = False) -> list[str]:
    stage = Quiet()
    one = StepSequence(steps, stage, list, found=False, in_step=in_step)
    one.timeline.clock = Even(ms)
    while not one.is_over:
        one.boundary()
    assert [step.kind for step in one.facts.steps if step.kind == "clean"] == ["clean"] * stage.kinds.count("clean")
    return stage.kinds


def kinds(ms: float, steps: int = STEPS) -> list[str]:
    return [kind for kind in taken(ms, steps=steps) if kind != "warm-up"]


def cold(found: list[str]) -> list[tuple[str, str]]:
    return [pair for pair in pairwise(found) if pair[0] in DISTURBING and pair[1] == "clean"]


def test_no_short_clean_step_follows_a_disturbed_one() -> None:
    found = kinds(1.0)
    assert cold(found) == []
    planned = order(STEPS)
    assert [kind for kind in found if kind != "settling"] == [kind for kind in planned if kind != "settling"]


def settled(found: list[str]) -> int:
    """The least number of steps between one that was disturbed and the next clean one."""
    since, least = [], []
    for kind in found:
        if kind == "clean" and since:
            least.append(since.index(next(one for one in since if one in DISTURBING)))
        since = [kind, *since]
    return min(least)


@pytest.mark.parametrize(("ms", "steps"), [(0.1, 4), (1.0, 4), (4.0, 4), (16.0, 1), (50.0, 0)])
def test_short_steps_settle_for_longer(ms: float, steps: int) -> None:
    assert settled(kinds(ms)) == steps


@pytest.mark.parametrize(("ms", "steps"), [(0.1, 64), (1.0, 20), (4.0, 5)])
def test_short_steps_settle_for_longest_once_enough_are_measured(ms: float, steps: int) -> None:
    found = kinds(ms, 2 * STEPS)
    enough = [at for at, kind in enumerate(found) if kind in ("clean", "instrumented")][phases._ENOUGH_MEASURED]
    assert settled(found[enough:]) == steps


def test_long_steps_need_not_settle() -> None:
    assert kinds(50.0) == order(STEPS)


def test_steps_that_do_not_settle_are_seen(monkeypatch) -> None:
    monkeypatch.setattr(phases, "_WARM_UP_MS", 0.0)
    assert cold(kinds(1.0))


@pytest.mark.parametrize(("ms", "steps", "expected"), [(0.2, 48, 0.2), (0.2, 40, 0.3), (20.0, 48, 25.0)])
def test_a_step_is_as_long_as_with_warm_caches_where_enough_found_them_so(
    ms: float, steps: int, expected: float
) -> None:
    """Those that came soon after a disturbance are half as long again."""
    facts = ProfileFacts(trained=100)
    for number in range(steps):
        kind: Kind = "clean" if number % 2 else "instrumented"
        facts.steps.append(StepFact(kind, ms=ms * (1.5 if number < 24 else 1.0)))
    facts.steps.extend(StepFact("settling", ms=ms) for _ in range(3))
    assert summarize(facts, "a script").step_ms == pytest.approx(expected)


def test_of_ranks_no_clock_decides_how_a_step_is_watched(monkeypatch) -> None:
    """Each has its own, and all must watch each step in the same way; what disturbed one must not make others wait."""
    found = taken(1.0, in_step=True)
    assert found == taken(50.0, in_step=True) != taken(50.0)
    assert not [pair for pair in pairwise(found) if pair[0] in DISTURBING and pair[1] in ("clean", "instrumented")]
    for name in ("LONGEST_S", "_WARM_UP_S"):
        monkeypatch.setattr(step_sequence, name, -1.0)
    assert found == taken(1.0, in_step=True) != taken(1.0)


@pytest.mark.parametrize(("steps", "measured"), [(STEPS, STEPS), (None, step_sequence.ENOUGH_STEPS)])
def test_so_many_steps_as_were_asked_for_take_as_long_as_they_take(
    steps: int | None, measured: int, monkeypatch
) -> None:
    monkeypatch.setattr(step_sequence, "LONGEST_S", -1.0)
    one = StepSequence(steps, Quiet(), list, found=False)
    while not one.is_over:
        one.boundary()
    assert one.n_measured() == measured


def test_warm_up_is_that_of_the_loop_that_is_measured(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(step_sequence, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    one = StepSequence(STEPS, Quiet(), list, found=True)
    one.timeline.clock = Even(1.0)

    def train(where: str, steps: int) -> None:
        for _ in range(steps):
            now[0] += 1.0
            one.note_training()
            one.add_event(TrainingEvent("update", where))

    train("first.py:1", 6)
    first_s = now[0]
    train("second.py:1", 20)
    assert one.facts.anchor == "second.py:1"
    assert 0.0 < one.facts.warm_up_s < first_s


def plain(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()


def by_hand(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.randn(8, 4)).pow(2).mean().backward()
    with torch.no_grad():
        for value in net.parameters():
            value -= 0.01 * value.grad


def inside(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    other = torch.optim.SGD([net.bias], lr=0.01)  # updates while the backward is on, which ends no step
    handle = net.bias.register_post_accumulate_grad_hook(lambda value: other.step())
    plain(net, optimizer)
    handle.remove()


def evaluating(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net.eval()  # until the next backward, since nobody says that it is over
    plain(net, optimizer)


Steps = Callable[[nn.Module, torch.optim.Optimizer], None]


def heard(step: Steps, monkeypatch) -> set[str]:
    """Kinds of steps of which a backward is heard."""
    found: set[str] = set()
    began = ProfilerSession.backward_began

    def noted(watch: ProfilerSession, args: tuple, kwargs: dict) -> object:
        found.add(watch._sequence.step.kind if watch._sequence.step is not None else "")
        return began(watch, args, kwargs)

    def loop() -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(150):
            step(net, optimizer)

    monkeypatch.setattr(ProfilerSession, "backward_began", noted)
    assert watched(loop).steps == STEPS
    return found


def test_backwards_of_clean_steps_tell_nothing(monkeypatch) -> None:
    found = heard(plain, monkeypatch)
    assert "instrumented" in found and not found & {"clean", "settling", "clocked"}


@pytest.mark.parametrize("step", [by_hand, inside, evaluating], ids=lambda step: step.__name__)
def test_backwards_that_tell_something_are_heard_in_clean_steps(step: Steps, monkeypatch) -> None:
    assert {"clean", "instrumented"} <= heard(step, monkeypatch)


def test_hearing_all_backwards_is_seen(monkeypatch) -> None:
    monkeypatch.setattr(ProfilerSession, "should_record_backward", ProfilerSession.is_training_thread)
    assert "clean" in heard(plain, monkeypatch)


@pytest.mark.more
def test_hearing_none_but_those_that_are_watched_closely_is_seen(monkeypatch) -> None:
    monkeypatch.setattr(nn.Module, "__call__", nn.Module.__call__)  # put back: the fault leaves an evaluation open
    monkeypatch.setattr(
        ProfilerSession, "should_record_backward", lambda watch: watch._is_detailed and watch.is_training_thread()
    )
    assert not [step for step in (inside, evaluating) if "clean" in heard(step, monkeypatch)]
