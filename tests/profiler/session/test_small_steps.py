"""A step so small that watching it takes as long as itself: all times are those of a clean step, and fit together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hotloop.core.records.profile import LineTime, ModuleTime, OperatorTime, Profile
from hotloop.profiler.base.steps import Kind, ProfileFacts, StepFact
from hotloop.profiler.session import make_observers
from hotloop.profiler.summary import StepLengths, summarize
from tests.support.profiler.profiled_steps import training, watched

CLEAN_MS, WATCHED_MS = 1.0, 4.0


def line(ms: float) -> dict[str, Any]:
    return LineTime(where="a.py:1", function="", library="", phase="update", ms=ms, own_ms=ms).model_dump()


def operator(ms: float, device: str = "cpu") -> dict[str, Any]:
    known: dict[str, Any] = dict(name="aten::add_", phase="update", module="", where="", calls=1, device=device)
    return OperatorTime(**known, ms=ms).model_dump()


def module(forward_ms: float, backward_ms: float | None) -> dict[str, Any]:
    known: dict[str, Any] = dict(name="", kind="Linear", calls=1, share=0.9)
    return ModuleTime(**known, forward_ms=forward_ms, backward_ms=backward_ms).model_dump()


def profile(device: str = "cpu") -> Profile:
    steps = []
    for _ in range(8):
        steps.append(StepFact(kind="clean", ms=CLEAN_MS))
        steps.append(
            StepFact(kind="instrumented", ms=WATCHED_MS, phases={"forward": 1.0, "backward": 1.0, "update": 2.0})
        )
    facts = ProfileFacts(steps=steps, device=device, trained=16, torch=True)
    facts.operators = [operator(2.0), operator(0.5, "cuda:0")]
    facts.modules = [module(1.0, 0.8)]
    facts.lines, facts.functions = [line(2.0)], [line(1.6)]
    return summarize(facts, "loop")


def test_what_a_phase_holds_takes_no_longer_than_the_phase() -> None:
    found = profile()
    assert found.phases == pytest.approx({"forward": 0.25, "backward": 0.25, "update": 0.5})
    assert [one.ms for one in found.operators] == pytest.approx([0.5, 0.5])  # of kernels as they are
    assert (found.lines[0].own_ms, found.lines[0].ms, found.functions[0].ms) == pytest.approx((0.5, 0.5, 0.4))
    (one,) = found.modules
    assert (one.forward_ms, one.backward_ms, one.share) == pytest.approx((0.25, 0.2, 0.45))


def test_modules_of_a_device_take_what_their_kernels_take() -> None:
    (one,) = profile("cuda").modules
    assert (one.forward_ms, one.backward_ms, one.share) == (1.0, 0.8, 0.9)


def test_a_loop_of_tiny_steps(one_thread: None) -> None:
    def step(net: nn.Module, x: Tensor) -> Tensor:
        return net(x).square().mean()

    watch = training(step)

    def loop() -> None:
        for _ in range(5):
            watch()

    torch.manual_seed(0)
    found = watched(loop, steps=100, observers=lambda watch: make_observers(watch, None))
    held = dict.fromkeys(found.phases, 0.0)
    for one in found.operators:
        held[one.phase] += one.ms
    for one in found.modules:
        assert one.share * (found.step_ms or 0.0) == pytest.approx((one.forward_ms or 0.0) + (one.backward_ms or 0.0))
    assert found.operators and {name for name, ms in held.items() if ms > 1.1 * found.phases[name]} == set()


def steps(kind: Kind, *calls: int) -> list[StepFact]:
    """Steps of which each call takes a millisecond."""
    return [StepFact(kind, ms=float(many), calls=many) for many in calls]


def lengths(timed: list[StepFact], *others: StepFact) -> StepLengths:
    return StepLengths([*timed, *others], timed)


VARYING = steps("instrumented", 60, 100, 80, 80)
OPERATOR = {"name": "aten::addmm", "phase": "forward", "calls": 20.0, "ms": 4.0, "flops": 100.0, "bytes": None}


def test_an_operator_of_short_steps_is_given_per_usual_step() -> None:
    found = lengths(VARYING, *steps("traced", 20, 20)).operator(OPERATOR)
    assert found["calls"] == pytest.approx(80.0) and found["ms"] == pytest.approx(16.0)
    assert found["flops"] == pytest.approx(400.0) and found["bytes"] is None


def test_a_habit_of_short_steps_is_given_per_usual_step() -> None:
    habit = {"what": "argument validation", "where": "a.py:1", "per_step": 10.0, "ms": 2.0}
    found = lengths(VARYING, *steps("habits", 10, 10, 400)).habit(habit)
    assert found["per_step"] == pytest.approx(80.0) and found["ms"] == pytest.approx(16.0)


@pytest.mark.parametrize("changes", [{"phase": "update"}, {"calls": 1.0}], ids=["update", "once in a step"])
def test_what_goes_with_the_step_stays(changes: dict) -> None:
    operator = OPERATOR | changes
    assert lengths(VARYING, *steps("traced", 20)).operator(operator) == operator


def test_a_held_up_traced_step_does_not_count() -> None:
    found = lengths(VARYING, *steps("traced", 20, 20, 200)).operator(OPERATOR)
    assert found["calls"] == pytest.approx(80.0)


def test_steps_of_one_length_are_left_alone() -> None:
    same = steps("instrumented", 20, 20, 20)
    assert lengths(same, *steps("traced", 20)).operator(OPERATOR) == OPERATOR
    assert lengths([], *steps("traced", 20)).operator(OPERATOR) == OPERATOR


def test_the_runs_of_a_line_go_with_the_calls_even_if_an_operator_does_not() -> None:
    found = lengths(VARYING, *steps("traced", 20)).operator(OPERATOR | {"calls": 2.0, "line_runs": 20.0})
    assert found["calls"] == 2.0 and found["line_runs"] == pytest.approx(80.0)
