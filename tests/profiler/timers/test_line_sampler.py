"""Samples of the stack, taken by hand at known times."""

from __future__ import annotations

import _thread
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from types import CodeType, FrameType
from typing import Any
from zlib import crc32

import pytest

from hotloop.core.records.profile import LineTime
from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.timers.line_sampler import Preemption, StackSampler
from hotloop.profiler.trace.events import clamp_lines_to_phases
from tests.support.busy_machine import busy_process


def compiled(name: str, text: str) -> dict[str, Any]:
    """The names that a file of that name and module defines."""
    found: dict[str, Any] = {"__name__": name.removesuffix(".py").replace("/", ".")}
    exec(compile(textwrap.dedent(text), name, "exec"), found)
    return found


LIBRARY = """
    def draw(then):
        return inner(then)

    def inner(then):
        return then()
"""
SCRIPT = """
    def train(draw, then):
        return helper(draw, then)

    def helper(draw, then):
        return draw(then)
"""


def is_own(code: CodeType) -> bool:
    return code.co_filename == "script.py"


class Waits:
    """What the system says on the sampled thread's time without a core, at each sample."""

    def __init__(self, *seconds: float) -> None:
        self._seconds = iter(seconds)

    def begin(self) -> None:
        pass

    def passed_s(self) -> float:
        return next(self._seconds, 0.0)


def sampler(phase: Callable[[], Phase] = lambda: "logging") -> StackSampler:
    return StackSampler(is_own, lambda file, line: f"{file}:{line}", phase)


def sampled(seen: StackSampler, times: Iterator[float]) -> None:
    """Calls a script that calls a library, where the stack is looked at for each of the times."""
    draw, train = compiled("painter/figures.py", LIBRARY)["draw"], compiled("script.py", SCRIPT)["train"]

    def then() -> None:
        for now in times:
            seen.sample(sys._getframe(), now)

    train(draw, then)


def by_line(lines: list[LineTime]) -> dict[str, tuple[str, str, float, float]]:
    return {line.where: (line.function, line.library, line.ms, line.own_ms) for line in lines}


def test_each_line_on_the_stack_has_the_time_and_the_innermost_has_it_for_itself() -> None:
    seen = sampler()
    seen._steps, seen._since = 2, 10.0
    sampled(seen, iter([10.5, 12.0]))
    assert by_line(seen.lines()) == {
        "script.py:6": ("helper", "painter", 1000.0, 1000.0),
        "script.py:3": ("train", "", 1000.0, 0.0),
    }
    assert {line.phase for line in seen.lines()} == {"logging"}
    assert {line.where: line.looks for line in seen.lines()} == {"script.py:6": 2, "script.py:3": 0}


def test_a_line_knows_the_one_that_its_function_is_called_from() -> None:
    seen = sampler()
    seen._steps, seen._since = 1, 0.0
    sampled(seen, iter([1.0]))
    assert {line.where: line.within for line in seen.lines()} == {"script.py:6": "script.py:3", "script.py:3": ""}


def test_without_any_line_of_the_users_the_librarys_is_given() -> None:
    seen = StackSampler(lambda code: False, lambda file, line: f"{file}:{line}")
    seen._steps, seen._since = 1, 0.0
    draw = compiled("painter/figures.py", LIBRARY)["draw"]
    frames: list[FrameType] = []
    draw(lambda: frames.append(sys._getframe(1)))
    seen.sample(frames[0], 1.0)
    assert by_line(seen.lines()) == {"painter/figures.py:6": ("inner", "painter", 1000.0, 1000.0)}


def test_the_border_of_a_step_counts_for_nobody() -> None:
    seen = sampler(lambda: "unattributed")
    seen._steps = 1
    sampled(seen, iter([1.0]))
    assert seen.lines() == []


def test_lines_fit_into_their_phases() -> None:
    seen = sampler()
    seen._steps, seen._since = 1, 0.0
    sampled(seen, iter([0.004, 0.008]))
    fitted = clamp_lines_to_phases(seen.lines(), {"logging": 2.0})
    assert {(line.function, line.ms, line.own_ms) for line in fitted} == {("helper", 2.0, 2.0), ("train", 2.0, 0.0)}
    assert clamp_lines_to_phases(seen.lines(), {"logging": 80.0}) == seen.lines()


def test_a_backward_is_torchs_whoever_calls_it() -> None:
    seen = sampler(lambda: "backward")
    seen._steps, seen._since = 1, 0.0
    engine = compiled("torch/autograd/graph.py", "def _engine_run_backward(then): then()")["_engine_run_backward"]
    train, draw = compiled("script.py", SCRIPT)["train"], compiled("accelerate/accelerator.py", LIBRARY)["draw"]
    train(draw, lambda: engine(lambda: seen.sample(sys._getframe(), 1.0)))
    train(draw, lambda: seen.sample(sys._getframe(), 3.0))
    assert {(line.library, line.own_ms) for line in seen.lines() if line.function == "helper"} == {
        ("torch", 1000.0),
        ("accelerate", 2000.0),
    }


def test_a_step_that_is_dropped_is_forgotten() -> None:
    seen = StackSampler(is_own, lambda file, line: f"{file}:{line}", lambda: "logging")
    seen._running = -1  # so that no thread of its own looks
    seen._preemption = Waits()  # type: ignore[assignment]
    for dropped in (False, True, True):
        seen.begin()
        now = seen._since
        sampled(seen, iter([now + 1.0, now + (9.0 if dropped else 1.0)]))
        seen.drop() if dropped else seen.end()
    assert by_line(seen.lines())["script.py:6"] == ("helper", "painter", pytest.approx(1000.0), pytest.approx(1000.0))


def test_what_watches_counts_for_nobody() -> None:
    seen = sampler()
    seen._steps, seen._since = 1, 0.0
    watch = compiled("hotloop/profiler/session/session.py", "def _publish(then): then()\ndef call(then): then()")
    train = compiled("script.py", SCRIPT)["train"]
    train(watch["_publish"], lambda: seen.sample(sys._getframe(), 1.0))
    assert seen.lines() == []
    train(watch["call"], lambda: seen.sample(sys._getframe(), 2.0))
    assert {line.ms for line in seen.lines()} == {1000.0}


def test_it_looks_during_steps_alone_and_ends_its_thread() -> None:
    seen = sampler()
    before = _thread._count()
    seen.begin()
    until = time.monotonic() + 60
    while not seen._spent and time.monotonic() < until:
        time.sleep(0.001)
    seen.end()
    found = deepcopy(seen._spent)
    assert found
    time.sleep(0.02)
    assert seen._spent == found
    seen.close()
    while _thread._count() > before and time.monotonic() < until:  # it may be about to end
        time.sleep(0.001)
    assert _thread._count() == before


@pytest.mark.parametrize("most", [1, 2])
def test_memory_stays_bounded(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.profiler.timers.line_sampler._MAX_LINES", most)
    seen = sampler()
    seen._steps = 1
    sampled(seen, iter([1.0, 2.0]))
    assert len(seen.lines()) == most


def test_plain_python_between_two_operations_is_seen_and_the_interpreter_is_left_as_it_was() -> None:
    """It lasts for less than the 5 ms for which Python lets a thread alone, and the operation behind it lets go."""
    step = compiled(
        "script.py",
        """
        from time import perf_counter, sleep

        def working(until):
            while perf_counter() < until:
                pass

        def step():
            working(perf_counter() + 0.003)
            sleep(0.002)
        """,
    )["step"]
    before, seen = sys.getswitchinterval(), sampler()
    try:
        for _ in range(50):
            seen.begin()
            step()
            seen.end()
            assert sys.getswitchinterval() == before
    finally:
        seen.close()
    assert "working" in {line.function for line in seen.lines()}


def test_closed_in_the_middle_of_a_step_threads_take_turns_as_before() -> None:
    before, seen = sys.getswitchinterval(), sampler()
    try:
        seen.begin()
        assert sys.getswitchinterval() < before
        seen.close()
        assert sys.getswitchinterval() == before
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize(("took_s", "pause_s"), [(0.0001, 0.00005), (0.002, 0.0002), (0.5, 0.001)])
def test_short_steps_are_looked_at_more_often(took_s: float, pause_s: float) -> None:
    seen = sampler()
    assert seen._pause_s == 0.001, "of the first nobody knows how long it takes"
    seen._took_s = took_s
    assert seen._pause_s == pytest.approx(pause_s)


def test_steps_that_are_shorter_than_a_millisecond_have_lines() -> None:
    step = compiled(
        "script.py",
        """
        from time import perf_counter

        def step():
            until = perf_counter() + 0.0008
            while perf_counter() < until:
                pass
        """,
    )["step"]
    seen = sampler()
    try:
        assert any(looked_at(seen, step) > 120 for _ in range(5)), "other programs may have the cores for a while"
    finally:
        seen.close()
    assert "step" in {line.function for line in seen.lines()}


def looked_at(seen: StackSampler, step: Callable[[], None], steps: int = 400) -> int:
    """How many of some steps were looked at, between which another thread may run, though this one doesn't rest."""
    looked, elsewhere = 0, bytes(1_000_000)
    for _ in range(steps):
        seen.begin()
        began = seen._since
        step()
        looked += seen._since > began
        seen.end()
        for _ in range(4):
            crc32(elsewhere)
    return looked


def test_time_in_which_another_program_had_the_core_is_that_of_no_line() -> None:
    """The system names it once the thread runs again: 0.4 s, of which 0.1 s are in the last interval."""
    seen = sampler()
    seen.begin()
    seen._preemption = Waits(0.0, 0.0, 0.0, 0.4, 0.0)  # type: ignore[assignment]
    seen._since = 0.0
    sampled(seen, iter([0.1, 0.2, 0.5, 0.6, 0.7]))
    seen.close()
    helper = next(line for line in seen.lines() if line.function == "helper")
    assert helper.own_ms == pytest.approx(1e3 * (0.7 - 0.4)) and helper.ms == pytest.approx(helper.own_ms)
    assert seen.shifted_s["logging", "logging"] == pytest.approx(0.3)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux says how long a thread waits for a core")
def test_a_real_program_on_the_same_core_takes_no_time_of_the_lines() -> None:
    """A core is shared with a busy program: wall time is about twice what the line computes."""
    cores = os.sched_getaffinity(0)
    core = max(cores)
    with busy_process() as other:
        os.sched_setaffinity(other.pid, {core})
        os.sched_setaffinity(0, {core})
        try:
            waits = Preemption()
            waits.begin()
            began, until = time.perf_counter(), time.thread_time() + 0.4
            while time.thread_time() < until:
                pass
            wall_s, lost_s = time.perf_counter() - began, waits.passed_s()
        finally:
            os.sched_setaffinity(0, cores)
    assert wall_s - lost_s == pytest.approx(0.4, abs=0.1) and lost_s > 0.1
