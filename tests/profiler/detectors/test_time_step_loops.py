"""What a Python loop goes over: samples are told from time steps where there are as many."""

from __future__ import annotations

import pytest

from hotloop.core.records.profile import LineTime, Remedy
from hotloop.profiler.detectors.small_ops import compile_candidates
from hotloop.profiler.detectors.step import ProfiledStep
from tests.support.profiler.handmade_steps import STEP_MS, adam, first, line, loader, loop, operator, remedies, seen

SAMPLE = ["256"]
WIDE = ["64", "1x64", "64x64"]
"""Of a sample through a layer that is as wide as there are samples."""

WHOLE = ["256", "64x8", "8x256"]


@pytest.mark.parametrize(("shapes", "said"), [(SAMPLE, "64 samples"), (WIDE, "64 samples"), (WHOLE, "64 rounds (time")])
def test_a_loop_whose_operations_take_all_samples_goes_over_something_else(shapes: list[str], said: str) -> None:
    found = first(seen({"forward": 8.0}, operators=loop(64, 0.01, shapes=shapes), loaders=[loader()]))
    assert said in found.cause


def test_what_is_done_with_all_samples_once_or_without_work_tells_nothing() -> None:
    beside = [
        operator("stack", 0.01, where="net.py:7", shapes=["64x256"], bytes=100.0),
        operator("select", 0.01, 64, where="net.py:7", shapes=["64x256"], bytes=0.0, flops=0.0),
        operator("mm", 0.01, 64, where="net.py:7", phase="backward", shapes=["64x1", "1x256"], bytes=100.0),
    ]
    ones = [*loop(64, 0.01, shapes=SAMPLE), *beside]
    assert "64 samples" in first(seen({"forward": 8.0}, operators=ones, loaders=[loader()])).cause


@pytest.mark.parametrize(("evaluations", "named"), [(0, True), (1, True), (6, False)])
def test_a_closure_that_a_line_search_calls_is_no_loop(evaluations: float, named: bool) -> None:
    """Each operation runs 40 times in a step: in a loop, or less than seven times in each of six evaluations."""
    found = remedies(
        seen(
            {"forward": 8.0},
            operators=loop(40, 0.01, shapes=SAMPLE),
            optimizers=[adam(0.01, "fused", evaluations=evaluations)],
        )
    )
    assert any("a Python loop" in one.cause for one in found) is named


def test_what_a_compiled_models_call_takes_is_none_of_what_compiling_wins() -> None:
    ones = [operator("mul", 0.9, 300, where="net.py:3")]
    gains = []
    for plan in ("", "baseline"):
        profile = seen({"forward": 5.0}, operators=ones, plan=plan)
        own = profile.model_copy(update={"operators": ones})
        (found,) = compile_candidates(ProfiledStep(own, STEP_MS))
        gains.append(found.gain)
    assert gains[1] == pytest.approx(300 * 3e-3 / STEP_MS)
    assert gains[0] == pytest.approx(gains[1] - 0.1 / STEP_MS)


def test_of_a_script_a_kernel_stays_between_two_products() -> None:
    """Each is started from Python still; one of torch's names for the same product calculates nothing."""
    ones = [operator("mul", 0.9, 300, where="net.py:3")]
    products = [
        operator("mm", 0.9, 100, where="net.py:4", flops=1e6),
        operator("linear", 0.01, 100, where="net.py:4", flops=None),
    ]
    gains = []
    for operators in (ones, [*ones, *products]):
        own = seen({"forward": 5.0}).model_copy(update={"operators": operators})
        (found,) = compile_candidates(ProfiledStep(own, STEP_MS))
        gains.append(found.gain)
    assert gains[0] - gains[1] == pytest.approx(100 * 3e-3 / STEP_MS)


@pytest.mark.parametrize(("backwards", "named"), [(64.0, True), (1.0, False), (32.0, False)])
def test_a_loop_of_small_batches_whose_gradients_add_up_is_told_at_its_backward(backwards: float, named: bool) -> None:
    root = operator("ones_like", 0.0, backwards, phase="loss", where="train.py:42", line_runs=backwards)
    back = LineTime(where="train.py:42", function="train", phase="backward", ms=4.0, own_ms=4.0, library="torch")
    profile = seen({"forward": 8.0}, operators=[*loop(64, 0.01, shapes=["8x256"]), root])
    found = remedies(profile.model_copy(update={"lines": [*profile.lines, back]}))
    told = [one for one in found if "accumulated over 64 backwards" in one.cause]
    assert [one.where for one in told] == ["train.py:42"] * named
    assert any("time steps" in one.cause for one in found) is not named


def spread(lines: int, function: str = "Net.forward", calls: int = 50, first: int = 1) -> list[Remedy]:
    """Of a loop that takes 4 % of the step on each line, and Python there that takes more."""
    ones = [one for n in range(lines) for one in loop(calls, 0.0025, f"net.py:{first + n}", function=function)]
    sampled = [line("forward", 1.0, f"net.py:{first + n}", function=function) for n in range(lines)]
    return remedies(seen({"forward": 9.0}, operators=ones, lines=sampled))


def loops(found: list[Remedy]) -> list[Remedy]:
    return [one for one in found if one.cause.startswith("many tiny kernels")]


def test_lines_of_one_loop_are_one_remedy() -> None:
    found = spread(8)
    (whole,) = loops(found)
    assert whole.gain > 0.25 and "a Python loop of 50 rounds" in whole.cause
    assert whole.evidence.startswith("8 lines of Net.forward run 50 times in a step and start 1200 operations")
    assert [one.where for one in found if one.where.startswith("net.py:")] == [whole.where], "others are named with it"


def test_the_heaviest_line_stands_for_a_loop() -> None:
    ones = [
        one
        for number, each_ms in ((1, 0.002), (2, 0.01), (3, 0.002))
        for one in loop(
            50, each_ms, f"net.py:{number}", function="Net.forward.<locals>.<listcomp>"[: 11 + 20 * (number > 1)]
        )
    ]
    assert [one.where for one in loops(remedies(seen({"forward": 9.0}, operators=ones)))] == ["net.py:2"]


def test_lines_of_other_functions_and_other_rounds_are_other_loops() -> None:
    ones = [
        one
        for number, (function, calls) in enumerate([("a", 50), ("b", 50), ("b", 100), ("", 50), ("", 50)])
        for one in loop(calls, 0.5 / calls, f"net.py:{number}", function=function)
    ]
    found = loops(remedies(seen({"forward": 9.0}, operators=ones)))
    assert sorted(one.where for one in found) == [f"net.py:{number}" for number in range(5)]
