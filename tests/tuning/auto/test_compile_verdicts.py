"""Whether a compiled step is taken: what races and proofs find of it, and what is done where it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.core.plan_request import PlanRequest
from hotloop.core.records.race import Timing, Verdict
from hotloop.core.state import differing_paths
from hotloop.errors import DiskError, InsufficientMemoryError, PlanError
from hotloop.parity import proof
from hotloop.plan import BASELINE, Plan
from hotloop.tuning.auto.auto import list_options
from hotloop.tuning.search import auto_search, payoff, race_cache
from tests.support.programs import a_task
from tests.support.runs import lower_requested
from tests.support.tuning.fake_compilation import (
    AS_USUAL,
    AUTO,
    CPU,
    REWRITTEN,
    Samples,
    finding,
    images,
    make_any_run_long,
    pretend_to_compile,
)
from tests.support.tuning.fake_races import Races, Rounds, proving


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.fixture
def long(monkeypatch) -> None:
    make_any_run_long(monkeypatch)


@pytest.fixture
def pretended(monkeypatch) -> list[Plan]:
    return pretend_to_compile(monkeypatch)


@pytest.fixture
def found(monkeypatch) -> Callable[..., None]:
    return finding(monkeypatch)


def test_a_run_that_is_over_before_a_compiler_would_be_is_not_compiled(long) -> None:
    said: list[str] = []
    program = lower_requested(a_task(), AUTO, said.append)
    assert program.parts.plan == Plan(optimizer="fused")
    assert [line.partition(": a step takes")[0] for line in said] == ["auto goes on eagerly", "auto: optimizer=fused"]
    assert "steps left" in said[0]
    left_open = list_options(a_task(), CPU).left_open[0]
    assert "whether the step can be captured as one graph, compiling it pays, and what comes out" in left_open


def test_what_was_timed_is_not_what_trains(long) -> None:
    """Modules may count their calls, and data sets what they were asked for."""
    data = Samples()
    program = lower_requested(a_task(data=data, epochs=1), AUTO)
    fresh = hotloop.lower(a_task(data=Samples(), epochs=1), program.parts.plan)
    assert differing_paths(program.state(), fresh.state()) == []
    assert len(data.asked) <= 2 + 2 + 5 + 2  # looks at the first two, and one batch to time


FOUND: dict[str, tuple[dict[str, float], str, bool, str]] = {
    "faster and proven": (
        {"compile__package": 2.0},
        "bitwise",
        True,
        "is 2.00 times as fast as the baseline, and bitwise",
    ),
    "faster and unproven": ({"compile__package": 2.0}, "unproven", False, "it's unproven: said so"),
    "faster and broken": ({"compile__package": 2.0}, "broken", False, "it's broken: said so"),
    "no faster": ({"compile__package": 1.01}, "bitwise", False, "it's 1.01 times as fast as the baseline"),
    "slower than the eager plan": (
        {"compile__package": 1.3, "optimizer__fused": 1.5},
        "bitwise",
        False,
        "it's 1.30 times as fast as the baseline, and optimizer=fused 1.50",
    ),
}


@pytest.mark.few("faster and proven", "faster and broken", "slower than the eager plan")
@pytest.mark.parametrize("name", FOUND)
def test_a_compiled_step_stays_if_it_is_faster_and_proven(name: str, long, pretended, found) -> None:
    speeds, parity, stays, why = FOUND[name]
    found(parity, **speeds)
    said: list[str] = []
    searches: list[Verdict] = []
    lower_requested(a_task(), AUTO, said.append, plan_searches=searches)
    assert [timing.name for timing in searches[0].plans][1:] == ["optimizer=fused", "compile=package"]
    # A compiler writes the update its own way, so the eager plan's form of it isn't asked for.
    chosen = Plan(compile="package") if stays else Plan(optimizer="fused")
    assert Plan(compile="package") in pretended and pretended[-1] == chosen
    assert said[0].startswith("auto compiles: a step takes ")
    assert searches[0].winner == chosen.brief()
    assert why in said[-2] and said[-1] == f"auto: {chosen.brief()}"


def test_what_pairs_do_not_show_is_told_with_its_interval() -> None:
    given = Timing(name="a", plan={}, windows=9, ratio=1.17, ratio_low=0.95, ratio_high=1.19, verdict="no difference")
    assert auto_search._describe_speed(given, 1.02).endswith("which 9 pairs don't show (0.95 to 1.19)")
    assert auto_search._describe_speed(given, 1.2) == "it's 1.17 times as fast as the baseline"
    few = given.model_copy(update={"ratio_low": None, "ratio_high": None, "windows": 1})
    assert (
        auto_search._describe_speed(few, 1.02)
        == "it's 1.17 times as fast as the baseline, with too few pairs to be sure (1)"
    )


@pytest.mark.few("slower")
@pytest.mark.parametrize(("parity", "speed"), [("bitwise", 0.8), ("broken", 2.0)], ids=["slower", "broken"])
def test_an_eager_plan_that_its_own_race_finds_slower_than_the_baseline_is_not_trained_with(
    parity: str, speed: float, long, pretended, found
) -> None:
    found(parity, compile__package=speed, optimizer__fused=0.9)
    said, verdicts = list[str](), list[Verdict]()
    assert (
        lower_requested(a_task(), AUTO, said.append, memory=payoff.RaceHistory(save_verdict=verdicts.append)).parts.plan
        == BASELINE
    )
    assert said[-2:] == [
        "auto leaves out optimizer=fused: it's 0.90 times as fast as the baseline",
        "auto: baseline",
    ]
    assert verdicts[0].winner == "baseline" and verdicts[0].plan("optimizer=fused").behind


@pytest.mark.more
def test_an_eager_plan_with_what_the_user_set_stays_beside_a_baseline_without_it(long, pretended, found) -> None:
    found(threads__1=0.9)
    wanted = PlanRequest(Plan(device="cpu", threads=1), is_auto=True)
    assert lower_requested(a_task(), wanted).parts.plan == Plan(threads=1, optimizer="fused")


def test_a_compiled_step_that_fails_when_it_is_run_is_passed_over(long, pretended, monkeypatch) -> None:
    """The race is real, so there is one eager plan alone: of two it might find either the faster."""
    plain = auto_search.lower

    def failing(task: Any, plan: Plan, *told: Any) -> Any:
        program = plain(task, plan, *told)
        if plan.compile != "none":
            monkeypatch.setattr(program, "advance", lambda steps: 1 / 0)
        return program

    monkeypatch.setattr(auto_search, "lower", failing)
    said: list[str] = []
    wanted = PlanRequest(Plan(device="cpu", optimizer="default"), is_auto=True)
    assert lower_requested(a_task(epochs=1000), wanted, said.append).parts.plan == BASELINE
    assert said[-2].startswith("auto leaves out compile=package: ") and "ZeroDivisionError" in said[-2]


@pytest.mark.more
def test_a_compiler_that_fails_is_passed_over(long, pretended, found, monkeypatch) -> None:
    found()
    plain = auto_search.lower

    def failing(task: Any, plan: Plan, *told: Any) -> Any:
        if plan.compile != "none":
            raise AssertionError("of the compiler's own")
        return plain(task, plan, *told)

    monkeypatch.setattr(auto_search, "lower", failing)
    said: list[str] = []
    assert lower_requested(a_task(), AUTO, said.append).parts.plan == Plan(optimizer="fused")
    assert "auto leaves out compile=package: AssertionError: of the compiler's own" in said[-2]


LASTING: dict[str, tuple[Exception, bool]] = {
    "of the plan": (PlanError("no such kernel"), True),
    "of the room there is": (InsufficientMemoryError("the data can't be read into memory"), False),
    "of memory, as the compiler's": (chained(PlanError("can't be compiled"), MemoryError()), False),
    "of the disk": (DiskError("the disk is full"), False),
    "of the disk, as the compiler's": (
        chained(PlanError("can't be compiled"), OSError(28, "No space left on device")),
        False,
    ),
    "of a compiler that was killed": (
        chained(PlanError("can't be compiled"), RuntimeError("fatal error: Killed signal terminated program cc1plus")),
        False,
    ),
    "of anything else": (RuntimeError("some kernel"), False),
}


@pytest.mark.few("of the plan")
@pytest.mark.parametrize("name", LASTING)
def test_a_failure_to_compile_that_may_pass_is_not_remembered(
    name: str, long, pretended, tmp_path, monkeypatch
) -> None:
    (error, lasting), plain, verdicts = LASTING[name], auto_search.lower, list[Verdict]()

    def failing(task: Any, plan: Plan, *told: Any) -> Any:
        if plan.rewrites != "none":
            raise error
        return plain(task, plan, *told)

    monkeypatch.setattr(auto_search, "lower", failing)
    monkeypatch.setattr(auto_search, "measure", Races(compile__package=2.0))
    monkeypatch.setattr(auto_search, "prove_programs", lambda task, programs: proving()(programs))
    monkeypatch.setattr(race_cache, "races_folder", lambda: tmp_path)
    lower_requested(images(), AS_USUAL, memory=payoff.RaceHistory(save_verdict=verdicts.append))
    [verdict] = verdicts
    race_cache.save_races(verdict)
    found = race_cache.load_races(verdict.fingerprint, verdict.machine, verdict.versions)[0]
    failed = [one.timing.plan for one in found if one.timing.failure]
    assert failed == ([REWRITTEN.model_dump()] if lasting else []) and len(found) - len(failed) == 3


@pytest.mark.more
def test_what_was_raced_is_remembered_where_ctrl_c_ends_the_proof(long, pretended, found, monkeypatch) -> None:
    def stopped(task: Any, programs: Any) -> Any:
        raise KeyboardInterrupt

    found(compile__package=2.0)
    monkeypatch.setattr(auto_search, "prove_programs", stopped)
    verdicts: list[Verdict] = []
    with pytest.raises(KeyboardInterrupt):
        lower_requested(images(), AUTO, memory=payoff.RaceHistory(save_verdict=verdicts.append))
    [verdict] = verdicts
    assert verdict.plan(REWRITTEN.brief()).verdict == "faster" and verdict.plan(REWRITTEN.brief()).parity is None


@pytest.mark.more
def test_where_nothing_can_be_compiled_that_is_remembered(long, tmp_path, monkeypatch) -> None:
    class Branching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else super().forward(-x)

    task, said, verdicts = a_task(model=lambda: Branching(6, 3)), list[str](), list[Verdict]()
    monkeypatch.setattr(payoff.Payoff, "compilations", 2)
    monkeypatch.setattr(race_cache, "races_folder", lambda: tmp_path)
    assert (
        lower_requested(
            task, AUTO, said.append, memory=payoff.RaceHistory(save_verdict=verdicts.append)
        ).parts.plan.compile
        == "none"
    )
    (passed_over,) = (line for line in said if line.startswith("auto leaves out compile=package: the step can't"))
    [verdict] = verdicts
    race_cache.save_races(verdict)
    before = [one.timing for one in race_cache.load_races(verdict.fingerprint, verdict.machine, verdict.versions)[0]]
    assert {one.name for one in before} == {"compile=package", "compile=forward optimizer=fused"}
    said.clear()
    lower_requested(task, AUTO, said.append, memory=payoff.RaceHistory(before))
    failure = passed_over.partition(": ")[2]
    assert said == [
        f"auto leaves out compile=package: it failed before ({failure})",
        f"auto leaves out compile=forward optimizer=fused: it failed before ({failure})",
        "auto: optimizer=fused",
    ]


@pytest.mark.more
@pytest.mark.few("pays not")
@pytest.mark.parametrize("gain", [0.0, 2.0], ids=["pays not", "pays"])
def test_a_step_whose_update_can_t_be_captured_is_compiled_without_it_where_that_pays(
    gain: float, long, pretended, found, monkeypatch
) -> None:
    """RAdam branches on its count; the capture that refuses it is real."""
    found(compile__forward=2.0)
    pretend, by, verdicts, said = auto_search.lower, payoff.Payoff.for_way, list[Verdict](), list[str]()
    real = lambda task, plan, *told: (hotloop.lower if plan.compile == "package" else pretend)(task, plan, *told)  # noqa: E731
    monkeypatch.setattr(auto_search, "lower", real)
    gains = {"package": 2.0, "forward": gain or None}
    monkeypatch.setattr(
        payoff.Payoff, "for_way", lambda hope, way, **how: replace(by(hope, way, **how), gain=gains[way])
    )
    task = a_task(optimizer=lambda parameters: torch.optim.RAdam(parameters))
    lower_requested(task, AUTO, said.append, memory=payoff.RaceHistory(save_verdict=verdicts.append))
    assert any(line.startswith("auto leaves out compile=package: the step can't be captured") for line in said)
    assert pretended[-1] == (Plan(compile="forward") if gain else BASELINE)

    # It is known the next time that the whole step can't be, also where nothing is known of the rest.
    failed = [one for one in verdicts[0].plans if one.failure]
    lower_requested(task, AUTO, said.append, memory=payoff.RaceHistory(failed))
    assert pretended[-1] == (Plan(compile="forward") if gain else BASELINE)
    assert any(line.startswith("auto leaves out compile=package: it failed before") for line in said)


def test_without_memory_for_plans_side_by_side_nothing_is_compiled(long, pretended, monkeypatch) -> None:
    monkeypatch.setattr(auto_search, "max_programs_in_memory", lambda facts, device: 2)
    said: list[str] = []
    assert lower_requested(a_task(), AUTO, said.append).parts.plan == Plan(optimizer="fused")
    assert {plan.compile for plan in pretended} == {"none"}
    assert said[-2] == "auto goes on eagerly: there is no memory for a compiled plan beside the eager one"


def test_without_memory_for_a_proof_nothing_is_compiled(long, pretended, monkeypatch) -> None:
    monkeypatch.setattr(proof, "free_memory_bytes", lambda device: 1 << 10)
    said: list[str] = []
    assert lower_requested(a_task(), AUTO, said.append).parts.plan == Plan(optimizer="fused")
    assert {plan.compile for plan in pretended} == {"none"}
    assert said[-2].startswith("auto goes on eagerly: nothing compiled could be proven, since a proof takes about")


@pytest.mark.more
def test_no_plan_is_left_out_for_one_that_is_not_proven(long, pretended, monkeypatch) -> None:
    """Nor is the eager plan found slower than the baseline for being slower than a compiled one."""
    monkeypatch.setattr(auto_search, "measure", Rounds(compile__package=1.3, rewrites__all=1.4, optimizer__fused=0.99))
    classes, verdicts = iter(["broken", "bitwise"]), list[Verdict]()
    monkeypatch.setattr(auto_search, "prove_programs", lambda task, programs: proving(next(classes))(programs))
    lower_requested(images(), AS_USUAL, memory=payoff.RaceHistory(save_verdict=verdicts.append))
    assert pretended[-1] == Plan(compile="package")
    assert not verdicts[0].plan("optimizer=fused").left_out


def test_a_plan_that_loses_at_once_is_said_to_be_left_out(long, pretended, monkeypatch) -> None:
    monkeypatch.setattr(auto_search, "measure", Rounds(compile__package=0.8))
    said: list[str] = []
    lower_requested(a_task(), AUTO, said.append)
    why = "it was left out after 4 pairs, since it's 0.80 times as fast as the baseline"
    assert f"auto leaves out compile=package: {why}" in said
