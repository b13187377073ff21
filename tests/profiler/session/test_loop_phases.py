"""What a loop does between the things that are seen, and loops that end before their step is known."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hotloop.profiler.base.call_sites import CallSites
from hotloop.profiler.base.phases import HostClock, Instant, Timeline, durations
from hotloop.profiler.base.steps import ProfileFacts, StepFact, TrainingEvent
from hotloop.profiler.hooks.torch_hooks import measure_mark_ms
from hotloop.profiler.session import make_observers
from hotloop.profiler.step_sequence import early_steps
from hotloop.profiler.timers.line_sampler import LinePhases, phase_shares, shift_phases
from tests.support.profiler.profiled_steps import watched


@pytest.mark.parametrize(
    "by_hand, phase, after, expected",
    [
        (True, "update", -1, "batch"),
        (True, "update", 1, "update"),
        (False, "batch", 1, "python"),
        (False, "batch", -1, "batch"),
        (False, "update", -1, "update"),
        (True, "forward", -1, "forward"),
    ],
)
def test_lines_before_and_after_the_one_that_ends_a_step(by_hand: bool, phase, after: int, expected: str) -> None:
    facts = ProfileFacts(anchor="here", by_hand=by_hand)
    turning, ends = LinePhases(CallSites(), facts), sys._getframe().f_lineno
    assert turning.phase(phase, [(__file__, ends + after)]) == expected
    elsewhere = inspect.getsourcelines(policy)[1] + 1
    assert turning.phase(phase, [None, (__file__, elsewhere), ("other.py", ends + after)]) == phase


def helper() -> tuple[LinePhases, int]:
    """That a step ends in."""
    batch = sys._getframe().f_lineno
    return LinePhases(CallSites(), ProfileFacts(anchor="here")), batch


def test_lines_around_the_call_of_a_helper_that_a_step_ends_in() -> None:
    before = sys._getframe().f_lineno
    turning, batch = helper()
    after = sys._getframe().f_lineno

    def phase(*lines: int) -> str:
        return turning.phase("batch", [(__file__, line) for line in lines])

    assert [phase(before), phase(after), phase(before + 1)] == ["batch", "python", "batch"]
    # called from another place than at first, a line of the helper is what it is
    assert phase(after, batch) == phase(batch, after) == "batch"


def test_nothing_is_turned_as_long_as_no_step_is_known() -> None:
    turning, ends = LinePhases(CallSites(), ProfileFacts()), sys._getframe().f_lineno
    assert turning.phase("batch", [(__file__, ends + 1)]) == "batch"


def test_what_is_turned_adds_up() -> None:
    phases = shift_phases({"update": 4.0, "forward": 1.0}, [("update", "batch", 0.75), ("logging", "python", 0.5)])
    assert phases == {"update": 1.0, "forward": 1.0, "batch": 3.0}


def test_looks_at_the_stack_say_more_than_traced_steps_where_there_are_enough() -> None:
    """In a traced step, each line of plain Python takes many times as long."""
    traced = [
        {("batch", "python"): 9.0, ("batch", "batch"): 1.0},
        {("update", "batch"): 1.0, ("update", "update"): 3.0},
    ]
    sampled = {("batch", "python"): 1.0, ("batch", "batch"): 3.0, ("update", "batch"): 9.0}
    assert phase_shares(traced[:1], sampled, {"batch": 100, "update": 3}) == [("batch", "python", 0.25)]
    assert phase_shares(traced[1:], sampled, {"batch": 3, "update": 3}) == [("update", "batch", 0.25)]
    assert phase_shares([], {("batch", "python"): 1.0}, {"batch": 1}) == [
        ("batch", "python", 1.0)
    ]  # none was traced to its end


def plain(many: int) -> float:
    total = 0.0
    for number in range(many):
        total += number
    return total


def busy() -> None:
    """Runs more lines of plain Python than can be marked, then makes a batch, and calls a helper that trains on it."""
    net = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def train(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()

    for _ in range(100):
        plain(10_000)
        train(torch.randn(256, 64).erfinv())  # LINE batch
        plain(60_000)


def check_busy() -> None:
    profile = watched(busy, observers=lambda watch: make_observers(watch, None))
    python, batch_ms = profile.phases["python"], profile.phases["batch"]
    assert python > batch_ms > python / 30, (
        "a fifth of it by the clock; by few looks and traced lines from 8 to 50 %, never nothing"
    )
    batch = next(
        n for n, text in enumerate(inspect.getsource(sys.modules[__name__]).splitlines(), 1) if "LINE b" in text
    )
    made = {one.where.rpartition(":")[2] for one in profile.operators if one.name in ("aten::randn", "aten::erfinv")}
    assert made == {str(batch)}


@pytest.mark.more
@pytest.mark.usefixtures("one_thread")
def test_plain_python_after_a_helper_that_ends_the_step_is_no_making_of_a_batch() -> None:
    check_busy()


@pytest.mark.more  # it is what the test before would miss
def test_lines_that_are_marked_until_there_is_no_more_room_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.profiler.timers.line_tracer._MAX_MARKS_PER_LINE", 10**9)
    monkeypatch.setattr("hotloop.profiler.timers.line_tracer._MAX_MARKS", 40_000)
    monkeypatch.setattr("hotloop.profiler.timers.line_sampler._ENOUGH_SAMPLES", 10**9)
    with pytest.raises(AssertionError):
        check_busy()


def test_a_thread_that_waits_is_in_no_phase_but_one_that_is_kept_from_its_core_is() -> None:
    marks = [(Instant(0.0, 0.0, 0), "python"), (Instant(1.0, 0.25, 1), "batch"), (Instant(2.0, 0.5, 1), "batch")]
    assert durations(marks, HostClock()) == {"python": 250.0, "unattributed": 750.0, "batch": 1000.0}


def test_of_a_wait_the_time_in_a_queue_for_a_core_is_none() -> None:
    marks = [(Instant(0.0, 0.0, 0, 5.0), "python"), (Instant(1.0, 0.25, 1, 5.5), "")]
    assert durations(marks, HostClock()) == {"python": 750.0, "unattributed": 250.0}


def test_a_real_wait_is_seen() -> None:
    clock = HostClock()
    first = clock.mark()
    time.sleep(0.02)
    last = clock.mark()
    assert 0 < clock.idle_ms(first, last) <= clock.ms(first, last) or sys.platform != "linux"


def test_what_marking_takes_is_left_out() -> None:
    marks = [
        (Instant(0.0, 0.0, 0), "forward"),
        (Instant(0.003, 0.003, 0), "backward"),
        (Instant(0.0031, 0.0031, 0), ""),
    ]
    assert durations(marks, HostClock(), mark_ms=1.0) == pytest.approx({"forward": 2.0, "backward": 0.0})
    assert measure_mark_ms(HostClock()) > 0


def test_what_lies_between_two_calls_of_a_network_is_no_loss() -> None:
    timeline = Timeline(HostClock())
    timeline.begin("batch")
    for _ in range(2):
        timeline.replace_last("loss", "python")
        timeline.enter("forward")
        timeline.leave()
        timeline.turn("loss")
    assert [phase for _, phase in timeline.end()][1:-1] == ["forward", "batch", "python", "forward", "loss"]


def policy(calls: int) -> Callable[[], None]:
    """Asks a network for one action after the other, and trains it on all of them."""

    def loop() -> None:
        net = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(60):
            losses = [net(torch.randn(4)).logsumexp(0) for _ in range(calls)]
            optimizer.zero_grad()
            sum(losses).backward()
            optimizer.step()

    return loop


def test_a_network_that_is_asked_again_and_again_has_no_samples() -> None:
    profile = watched(policy(8))
    assert profile.samples_per_step is None
    assert profile.phases["python"] > profile.phases.get("loss", 0.0)


def replaying(evaluates: bool) -> Callable[[], None]:
    """Asks a network for an action in each step, and trains it on samples of many steps before."""

    def loop() -> None:
        net = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(60):
            net.train(not evaluates)
            with torch.no_grad():
                net(torch.randn(1, 4)).argmax()
            net.train()
            optimizer.zero_grad()
            net(torch.randn(128, 4)).logsumexp(1).mean().backward()
            optimizer.step()

    return loop


@pytest.mark.parametrize("evaluates", [False, True])
def test_one_who_acts_is_no_batch_and_no_evaluation(evaluates: bool) -> None:
    profile = watched(replaying(evaluates))
    assert (profile.batch, profile.samples_per_step, profile.habits) == (["128x4"], None, [])


def test_samples_are_those_that_are_trained_on_whatever_is_looked_at_beside_them() -> None:
    """Not in every step, and of more than them."""
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def loop() -> None:
        for step in range(60):
            with torch.no_grad():
                net(torch.randn(64, 4))
            net(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()
            if step % 9 == 8:
                net.eval()
                net(torch.randn(1, 4))
                net.train()

    profile = watched(loop)
    assert (profile.batch, profile.samples_per_step) == (["8x4"], 8)


def few(steps: int) -> Callable[[], None]:
    def loop() -> None:
        net = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            net(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()

    return loop


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_few_steps_have_times(steps: int) -> None:
    profile = watched(few(steps))
    assert 0 < profile.steps < steps and profile.step_ms
    assert sum(profile.phases.values()) == pytest.approx(profile.step_ms)
    assert {"forward", "backward", "update"} <= profile.phases.keys()
    assert profile.step_where.endswith(f":{few.__code__.co_firstlineno + 7}")
    assert any("so the times are rough" in note for note in profile.notes)


def test_one_step_has_none() -> None:
    profile = watched(few(1))
    assert profile.steps == 0 and "no steps were found" in profile.notes[-1]


def test_pieces_make_steps() -> None:
    update, backward = TrainingEvent("update", "a.py:3"), TrainingEvent("backward", "a.py:2")
    piece = StepFact("early", ms=2.0, phases={"forward": 2.0})
    anchor, steps = early_steps(backward, [(update, piece), (backward, piece), (update, piece)])
    assert anchor == update and [step.phases for step in steps] == [{"forward": 4.0}]
    assert early_steps(backward, [(update, piece)]) is None


def test_nothing_is_copied_where_a_tensor_is_already() -> None:
    def loop() -> None:
        net = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(60):
            x = torch.randn(8, 4).to("cpu").to(torch.float32).cpu()
            net(x).pow(2).mean().backward()
            optimizer.step()

    assert "copy" not in watched(loop).phases


def test_copies_between_devices_are() -> None:
    def loop() -> None:
        net = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(60):
            torch.randn(8, 4).to("meta")
            net(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()

    assert watched(loop).phases["copy"] > 0


def now_and_then(every: int, work: Callable[[nn.Module], None]) -> Callable[[], None]:
    def loop() -> None:
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for number in range(200):
            net(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()
            if number % every == 0:
                work(net)

    return loop


def validates(net: nn.Module) -> None:
    net.eval()
    samples(net)
    net.train()


def samples(net: nn.Module) -> None:
    """As a rollout does, in training mode."""
    with torch.no_grad():
        for _ in range(100):
            net(torch.ones(3, 4))


def plots(net: nn.Module) -> None:
    time.sleep(0.05)


@pytest.mark.few("5-samples")
@pytest.mark.parametrize("work", [validates, samples, plots])
@pytest.mark.parametrize("every", [5, pytest.param(6, marks=pytest.mark.more)])
def test_what_is_done_every_some_steps_is_no_part_of_operators_and_lines(
    every: int, work: Callable[[nn.Module], None]
) -> None:
    profile = watched(now_and_then(every, work), observers=lambda watch: make_observers(watch, None))
    assert any(one.name == "aten::addmm" for one in profile.operators)
    assert not [one for one in profile.operators if "3x4" in one.shapes or (one.line_runs or 0) > 2]
    assert not {line.function for line in profile.lines} & {"validates", "samples", "plots"}
