"""Whether compiling pays: what it takes, what it saves in a run, and what callbacks take from that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hotloop
from hotloop.core.feasibility import violations
from hotloop.core.plan_request import PlanRequest
from hotloop.core.records.race import Verdict
from hotloop.errors import PlanError
from hotloop.plan import Plan
from hotloop.report.learning_curves import draw_curves
from hotloop.task_file import LoadedTask
from hotloop.tuning import rules
from hotloop.tuning.auto import auto, recall
from hotloop.tuning.races.measure import RaceMeasurement
from hotloop.tuning.run_context import RunContext
from hotloop.tuning.search import auto_search, payoff
from hotloop.tuning.search.candidates import layout_changes
from tests.support.programs import a_task
from tests.support.runs import lower_requested, resume_run, start_run
from tests.support.tuning.fake_compilation import (
    AS_USUAL,
    AUTO,
    CPU,
    REWRITTEN,
    finding,
    images,
    make_any_run_long,
    pretend_to_compile,
)
from tests.support.tuning.fake_machines import A_GPU, a_machine
from tests.support.tuning.fake_machines import facts as made_up
from tests.support.tuning.fake_races import Races


@pytest.fixture
def long(monkeypatch) -> None:
    make_any_run_long(monkeypatch)


@pytest.fixture
def pretended(monkeypatch) -> list[Plan]:
    return pretend_to_compile(monkeypatch)


@pytest.fixture
def found(monkeypatch) -> Callable[..., None]:
    return finding(monkeypatch)


@pytest.mark.more
def test_a_step_of_images_is_compiled_with_rewrites_too(long, pretended, found) -> None:
    found(compile__package=2.0, rewrites__all=1.5)
    program = lower_requested(images(), AS_USUAL)
    assert pretended[-1] == REWRITTEN and Plan(compile="package") in pretended
    program.close()
    lower_requested(images(), PlanRequest(Plan(device="cpu", layout="contiguous", rewrites="none"), is_auto=True))
    assert pretended[-1] == Plan(compile="package")  # as it was set


EAGERLY, AS_SET = (32, "none", "fused"), (32, "none", "default")
"""Steps that are recorded and not compiled, and the form of their update."""


@pytest.mark.parametrize(
    ("fixed", "recorded"),
    [
        ({}, [(32, "all"), EAGERLY, (32, "none"), ("step", "none"), ("none", "all"), ("none", "none"), AS_SET]),
        (
            {"residency": "stream"},
            [
                ("step", "all"),
                ("step", "none", "fused"),
                ("step", "none"),
                ("none", "all"),
                ("none", "none"),
                ("step", "none", "default"),
            ],
        ),
        ({"graphs": "none"}, [("none", "all"), ("none", "none")]),
        ({"rewrites": "none"}, [EAGERLY, (32, "none"), ("step", "none"), ("none", "none"), AS_SET]),
        ({"compile": "none"}, [EAGERLY, AS_SET, ("step", "none", "default")]),
        ({"compile": "none", "optimizer": "foreach"}, [(32, "none", "foreach"), ("step", "none", "foreach")]),
    ],
    ids=["data on the device", "data elsewhere", "not recorded", "not rewritten", "not compiled", "lists"],
)
def test_on_cuda_a_compiled_step_is_recorded_too_and_so_is_the_eager_one(
    fixed: dict[str, Any], recorded: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The likeliest way to win first; the step as it is stays, for where none can be recorded."""
    told, machine = made_up(steps=rules.MIN_COMPILED_STEPS), a_machine(A_GPU)
    monkeypatch.setattr(auto, "probe_hardware", lambda device: machine)
    asked = PlanRequest(Plan(**fixed), is_auto=True)
    choices = rules.rank_plans(told, machine, Plan(**fixed))
    eager = next(one.plan for one in choices if one.plan.compile == "none")
    ways = auto._compiled_variants([one.plan for one in choices if one.plan.compile == "step"], eager, told, asked)
    found = [(way.graphs, way.rewrites, *([way.optimizer] if way.compile == "none" else [])) for way in ways]
    assert found == recorded
    assert all(way.optimizer == "default" for way in ways if way.compile == "step")
    assert [way for way in ways if violations(way, told, machine)] == []
    assert auto._compiled_variants([], eager, told, PlanRequest(Plan(**fixed), is_auto=True, is_explicit=False)) == []


def test_on_cuda_nothing_is_recorded_in_short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    told, machine = made_up(steps=rules.MIN_COMPILED_STEPS - 1), a_machine(A_GPU)
    monkeypatch.setattr(auto, "probe_hardware", lambda device: machine)
    eager = rules.rank_plans(told, machine, Plan())[0].plan
    assert auto._compiled_variants([], eager, told, PlanRequest(Plan(), is_auto=True)) == []


@pytest.mark.parametrize("nothing", [False, True])
def test_where_one_compilation_pays_it_is_the_rewritten_step_if_there_is_one(
    nothing: bool, long, pretended, found, monkeypatch
) -> None:
    found(compile__package=2.0)
    monkeypatch.setattr(payoff.Payoff, "compilations", 1)
    plain = auto_search.lower

    def finding(task: Any, plan: Plan, *told: Any) -> Any:
        if nothing and plan.rewrites != "none":
            raise PlanError("rewrites=all finds nothing")
        return plain(task, plan, *told)

    monkeypatch.setattr(auto_search, "lower", finding)
    lower_requested(images(), AS_USUAL)
    compiled = {plan for plan in pretended if plan.compile != "none"}
    assert compiled == {Plan(compile="package") if nothing else REWRITTEN}


def of_images(pools: bool) -> hotloop.Task:
    pooling = [nn.MaxPool2d(2)] if pools else []
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3), *pooling, nn.Flatten(), nn.Linear(8 if pools else 32, 3), nn.Dropout(0.2)
    )
    return a_task(model=network, data=(torch.randn(12, 1, 6, 6), torch.arange(12) % 3))


LAID = Plan(compile="package", layout="channels_last")


@pytest.mark.few("True-2-False-expected5")
@pytest.mark.parametrize(
    ("pools", "most", "nothing", "expected"),
    [
        (False, 1, False, [LAID.with_axes(rewrites="all")]),
        (False, 1, True, [LAID]),
        (False, 2, False, [LAID.with_axes(rewrites="all"), REWRITTEN]),
        (False, 2, True, [LAID, Plan(compile="package")]),
        (True, 1, False, [REWRITTEN]),
        (True, 2, False, [REWRITTEN, LAID.with_axes(rewrites="all")]),
    ],
)
def test_images_are_compiled_with_channels_last_first_unless_pooling_can_be_rewritten(
    pools: bool, most: int, nothing: bool, expected: list[Plan], long, pretended, found, monkeypatch
) -> None:
    """Two that are compiled differ in how images lie."""
    found(compile__package=2.0)
    monkeypatch.setattr(payoff.Payoff, "compilations", most)
    plain, compiled = auto_search.lower, list[Plan]()

    def noted(task: Any, plan: Plan, *told: Any) -> Any:
        if nothing and plan.rewrites != "none":
            raise PlanError("rewrites=all finds nothing")
        compiled.extend([plan] if plan.compile != "none" else [])
        return plain(task, plan, *told)

    monkeypatch.setattr(auto_search, "lower", noted)
    lower_requested(of_images(pools), AUTO).close()
    assert list(dict.fromkeys(compiled)) == expected


def test_where_one_layout_cannot_be_compiled_there_are_two_of_the_other(long, pretended, found, monkeypatch) -> None:
    found(compile__package=2.0)
    monkeypatch.setattr(payoff.Payoff, "compilations", 2)
    plain, compiled = auto_search.lower, list[Plan]()

    def noted(task: Any, plan: Plan, *told: Any) -> Any:
        if plan.layout != "contiguous":
            raise PlanError("view size is not compatible")
        compiled.extend([plan] if plan.compile != "none" else [])
        return plain(task, plan, *told)

    monkeypatch.setattr(auto_search, "lower", noted)
    lower_requested(of_images(pools=False), AUTO).close()
    assert list(dict.fromkeys(compiled)) == [REWRITTEN, Plan(compile="package")]


@pytest.mark.more
def test_a_layout_that_lost_is_not_compiled_again_in_the_next_run(long, pretended, found, monkeypatch) -> None:
    found(compile__package=0.8)
    monkeypatch.setattr(payoff.Payoff, "compilations", 1)
    plain, compiled, verdicts = auto_search.lower, list[Plan](), list[Verdict]()

    def noted(task: Any, plan: Plan, *told: Any) -> Any:
        compiled.extend([plan] if plan.compile != "none" else [])
        return plain(task, plan, *told)

    monkeypatch.setattr(auto_search, "lower", noted)
    for _ in range(4):
        timings = [timing for verdict in verdicts for timing in verdict.plans]
        lower_requested(of_images(pools=False), AUTO, memory=payoff.RaceHistory(timings, verdicts.append)).close()
    assert list(dict.fromkeys(compiled)) == [LAID.with_axes(rewrites="all"), REWRITTEN]


def test_volumes_lie_as_usual() -> None:
    """Nobody has measured anything else."""
    told = made_up(images=True, convolutions=True, inputs=[[1, 6, 6]])
    volumes = told.model_copy(update={"inputs": [[1, 6, 6, 6]]})
    assert layout_changes(volumes, a_machine(), Plan(device="cpu")) == []
    assert layout_changes(told, a_machine(), Plan(device="cpu")) == [{"layout": "channels_last"}]
    assert layout_changes(told, a_machine(), Plan(device="cpu", layout="channels_last")) == []


def test_a_compilation_must_save_twice_what_it_takes_with_its_proof() -> None:
    """A race may be lost, and a proof fail."""
    hopes = [payoff.Payoff(steps, 1e-3, 2.0, compile_s=20.0) for steps in (50_000, 100_000, 200_000, 300_000)]
    assert [hope.compilations for hope in hopes] == [0, 0, 1, 2]
    assert [str(hope).endswith("it may take 30 s, which a lost race would waste") for hope in hopes] == [
        *(False, True, False, False)
    ]
    assert payoff.Payoff(300, 100.0, 2.0).compilations == 0  # 250 of 300 steps, each of which may be halved
    assert payoff.Payoff(15_000, 3.0, 1.1).compilations == 2  # half a day


def normed() -> hotloop.Task:
    return a_task(model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))


def test_a_proof_of_steps_that_normalise_over_the_batch_takes_longer() -> None:
    """It begins beside more baselines."""
    plain, more = (payoff.Payoff(3_000, 0.1, 2.0, compile_s=10.0, normed=one) for one in (False, True))
    assert more.costs_s() - plain.costs_s() == pytest.approx(1.6 * 250 * 0.1)


@pytest.mark.parametrize(("task", "normalises"), [(a_task, False), (images, False), (normed, True)])
def test_it_is_reckoned_with_where_the_model_does(task: Any, normalises: bool, long, monkeypatch) -> None:
    asked, plain = list[bool](), auto.estimate_payoff

    def noted(*given: Any, **named: Any) -> Any:
        found = plain(*given, **named)
        asked.append(found.normed)
        return found

    monkeypatch.setattr(auto, "estimate_payoff", noted)
    lower_requested(task(), AUTO).close()
    assert asked == [normalises]


def test_a_compilation_takes_no_more_than_a_third_of_the_time_until_the_run_is_to_stop() -> None:
    hopes = [payoff.Payoff(400_000, 1e-3, 2.0, compile_s=20.0, limit_s=limit_s) for limit_s in (90.0, 100.0, 200.0)]
    assert [hope.compilations for hope in hopes] == [0, 1, 2]
    assert str(hopes[0]).endswith("it may take 30 s, more than a third of the 90 s until stop-after")
    assert "stop-after" not in str(hopes[1])


def test_a_run_that_is_to_stop_before_a_compiler_would_be_done_trains_eagerly(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(auto_search.AutoSearch, "run", lambda *given: pytest.fail("it compiles"))
    task, said = a_task(epochs=10_000_000), list[str]()
    given: dict[str, Any] = dict(plan="auto", axes={"device": "cpu"}, stop_after="0.5s", say=said.append)
    run, _ = start_run(LoadedTask(task, None, {}), run=tmp_path / "run", **given)
    resume_run(run.path, task=task, **given)
    assert run.plan == Plan(optimizer="fused")
    assert len([line for line in said if line.endswith(" s until stop-after")]) == 2


def test_a_look_at_each_epoch_for_what_callbacks_change_takes_from_what_compiling_saves() -> None:
    hopes = [
        payoff.Payoff(300_000, 1e-3, 2.0, compile_s=20.0, rechecks=epochs, recheck_s=1.0) for epochs in (0, 50, 99)
    ]
    assert [hope.compilations for hope in hopes] == [2, 1, 0]  # of 150 s
    assert "should save about 51 s of the 300,000 steps left with 99 checks for what callbacks change" in str(hopes[-1])


@pytest.mark.parametrize(
    ("given", "epochs"), [({}, 0), ({"callbacks": [draw_curves]}, 0), ({"callbacks": [print]}, 100)]
)  # fmt: skip
def test_it_is_reckoned_with_where_there_are_callbacks_of_the_users(given: Any, epochs: int, monkeypatch) -> None:
    monkeypatch.setattr(payoff.Payoff, "is_worthwhile", lambda hope, compilations=1: True)
    # 5 in an epoch
    hope = payoff.estimate_payoff(hotloop.lower(a_task(**given), CPU), 500, way="package", rewrites=False)
    assert isinstance(hope, payoff.Payoff) and hope.rechecks == epochs and hope.recheck_s > 0


def test_callbacks_of_the_run_count_as_those_of_the_task(long, pretended, found, monkeypatch) -> None:
    found()
    said, made, plain = list[str](), list[Any](), auto_search.lower

    def noted(*given: Any) -> Any:
        made.append(plain(*given))
        return made[-1]

    monkeypatch.setattr(auto_search, "lower", noted)
    monkeypatch.setattr(payoff.Payoff, "compilations", 1)
    lower_requested(a_task(epochs=100), AUTO, said.append, callbacks=[print])
    assert made and all(program.watched for program in made)
    assert "with 100 checks for what callbacks change" in said[0]


def test_a_run_hands_its_callbacks_on_to_what_chooses(tmp_path, monkeypatch) -> None:
    heard, plain = list[Any](), recall.lower_requested

    def noted(context: RunContext, *memory: Any) -> Any:
        heard.append(list(context.callbacks))
        return plain(context, *memory)

    monkeypatch.setattr(recall, "lower_requested", noted)
    task, seen = a_task(epochs=1), list[Any]()
    given: dict[str, Any] = dict(plan="auto", axes={"device": "cpu"}, callbacks=[seen.append])
    run, _ = start_run(LoadedTask(task, None, {}), run=tmp_path / "run", **given)
    resume_run(run.path, task=task, overrides={"epochs": 2}, **given)
    assert heard == [[seen.append], [seen.append]]


def test_a_compiled_step_that_loses_what_it_saves_by_looking_is_not_proven(long, pretended, monkeypatch) -> None:
    races = Races(compile__package=2.0)

    def looking(*given: Any, **named: Any) -> Any:
        plans = races(*given, **named).plans
        taken = [one.model_copy(update={"looking_ms": 100.0 if "compile" in one.name else 0.0}) for one in plans]
        return RaceMeasurement(taken, [])

    monkeypatch.setattr(auto_search, "measure", looking)
    monkeypatch.setattr(auto_search, "prove_programs", lambda task, programs: pytest.fail("it was proven"))
    said = list[str]()
    assert lower_requested(a_task(), AUTO, said.append).parts.plan == Plan(optimizer="fused")
    assert said[-2].startswith(
        "auto leaves out compile=package: it saves 0 s with a check at each epoch whether callbacks change the step"
    )


def test_race_and_proof_wait_for_their_batches_too() -> None:
    loading = [payoff.Payoff(400_000, 1e-3, 2.0, load_s, 20.0) for load_s in (0.0, 0.2, 0.3)]  # saves 200 s
    assert [hope.compilations for hope in loading] == [2, 1, 0]
    assert "a step takes 1 ms, its batch 300 ms, so compiling" in str(loading[-1])
