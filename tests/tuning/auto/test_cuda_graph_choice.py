"""What `auto` makes of a step that is recorded without a compiler, beside compiled ones; the recording is only pretended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import hotloop
from hotloop.core.feasibility import PlanForecast, RankedPlan
from hotloop.errors import PlanError
from hotloop.plan import Plan
from hotloop.report.plan import plan_document, plan_page
from hotloop.tuning import cuda_rules
from hotloop.tuning.auto import auto
from hotloop.tuning.search import auto_search, payoff
from tests.support.runs import lower_requested
from tests.support.tuning.fake_compilation import AUTO, finding, images, make_any_run_long, pretend_to_compile
from tests.support.tuning.fake_machines import A_GPU

COMPILED = [Plan(compile="step", graphs="step", rewrites="all"), Plan(compile="step", graphs="step")]
RECORDED = [Plan(graphs="step", optimizer="fused"), Plan(graphs="step")]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Plans that were compiled or recorded, in that order; those for CUDA run on the CPU as they are without."""
    make_any_run_long(monkeypatch)
    pretend_to_compile(monkeypatch)
    monkeypatch.setattr(auto, "_compiled_variants", lambda *given: [COMPILED[0], RECORDED[0], COMPILED[1], RECORDED[1]])
    found = list[Plan]()

    def pretend(task: Any, plan: Plan, *told: Any) -> Any:
        if plan.graphs != "none":
            found.append(plan)
        return hotloop.lower(task, plan.with_axes(compile="none", rewrites="none", graphs="none"))

    monkeypatch.setattr(auto, "lower", pretend)
    monkeypatch.setattr(auto_search, "lower", pretend)
    return found


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return finding(monkeypatch)


def without_repeats(plans: list[Plan]) -> list[Plan]:
    return list(dict.fromkeys(plans))


@pytest.mark.more
@pytest.mark.parametrize(("most", "expected"), [(1, [COMPILED[0], RECORDED[0]]), (2, [*COMPILED, RECORDED[0]])])
def test_one_is_recorded_beside_as_many_as_may_be_compiled(
    most: int, expected: list[Plan], tried: list[Plan], found: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found(graphs__step=2.0)
    monkeypatch.setattr(payoff.Payoff, "compilations", most)
    said = list[str]()
    lower_requested(images(), AUTO, said.append).close()
    assert without_repeats(tried) == expected
    assert any(line.startswith("auto compiles: a step takes") and "so compiling" in line for line in said)


def test_one_is_recorded_where_no_compilation_pays(
    tried: list[Plan], found: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found(graphs__step=2.0)
    monkeypatch.setattr(payoff.Payoff, "compilations", property(lambda hope: int(hope.activity == "recording")))
    said = list[str]()
    lower_requested(images(), AUTO, said.append).close()
    assert without_repeats(tried) == RECORDED[:1]
    assert any(line.startswith("auto records: a step takes") and "so recording" in line for line in said)


def test_the_next_form_of_the_update_is_recorded_where_the_first_cannot_be(
    tried: list[Plan], found: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a schedule of momentum, which a fused update can't take from the device."""
    found(graphs__step=2.0)
    plain = auto_search.lower

    def refusing(task: Any, plan: Plan, *told: Any) -> Any:
        if plan.graphs != "none" and (plan.optimizer == "fused" or plan.compile != "none"):
            raise PlanError("the schedule changes momentum")
        return plain(task, plan, *told)

    monkeypatch.setattr(auto_search, "lower", refusing)
    program = lower_requested(images(), AUTO)
    assert without_repeats(tried) == RECORDED[1:]
    program.close()


def test_the_page_gives_each_reason_once() -> None:
    eager = Plan(device="cuda:0")
    ways = [eager.with_axes(graphs="step", compile="step"), eager.with_axes(graphs="step")]
    facts = auto.feasibility_facts(images(), Plan(device="cpu"))[0]
    choices = [RankedPlan(way, cuda_rules.cuda_reasons(way, eager, facts)) for way in ways]
    told = PlanForecast(None, RankedPlan(eager, ()), choices, [], [], [], A_GPU)
    text = "\n".join(str(part) for part in plan_page(told).renderables)  # type: ignore[attr-defined]
    assert text.count("graphs=step: one replay runs a whole step") == 1
    assert "one or two of these, and one with compile=none" in text
    made = plan_document(told)
    assert [len(lines) for lines in made["compiled_why"]] == [2, 2] and len(made["compiled"]) == 2
