"""The plans of a run by step: which one takes a step, what a later switch replaces, and what is damaged."""

from __future__ import annotations

from typing import Any

import pytest

from hotloop.core.files.run_folder import SWITCH_EVENT, PlanHistory, PlanSwitch
from hotloop.errors import RunError
from hotloop.plan import Plan

PLANS = [Plan(), Plan(optimizer="fused"), Plan(threads=1)]


def event(number: int, step: int, plan: int = 0, **fields: Any) -> dict[str, Any]:
    return {"event": SWITCH_EVENT, **PlanSwitch(step, PLANS[plan], "for the test", number=number).fields(), **fields}


def test_each_step_has_the_plan_of_the_last_switch_before() -> None:
    history = PlanHistory.from_journal([{"event": "start"}, event(0, 0), event(1, 5, 1), event(2, 9, 2)])
    plans = [PLANS.index(history.at(step).plan) for step in range(11)]
    assert plans == [0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert [history.next_step(step) for step in (0, 4, 5, 9)] == [5, 5, 9, None]
    assert history.at(-1).plan == PLANS[0]


def test_a_run_that_went_back_replaces_later_switches() -> None:
    history = PlanHistory.from_journal([event(0, 0), event(1, 5, 1), event(2, 9, 0), event(3, 7, 2)])
    assert [(one.step, PLANS.index(one.plan)) for one in history.switches] == [(0, 0), (5, 1), (7, 2)]
    assert history.next_switch(8, PLANS[0], "").number == 4
    assert [one.number for one in history.without_search()] == [0, 1, 2]


def test_a_window_is_not_the_plan_in_use() -> None:
    history = PlanHistory.from_journal([event(0, 0), event(1, 5, 1), event(2, 9, 2, window=True)])
    assert history.plan_in_use == PLANS[1] and history.last.plan == PLANS[2]


def test_a_journal_without_switches_is_empty() -> None:
    assert not PlanHistory.from_journal([{"event": "start", "step": 0}])


@pytest.mark.parametrize(
    "events",
    [
        [event(1, 5)],
        [event(0, 0), event(2, 5)],
        [event(0, 3)],
        [event(0, 0, plan=0) | {"plan": {"compile": "steam"}}],
        [event(0, 0) | {"step": "x"}],
        [{"event": SWITCH_EVENT}],
    ],
    ids=str,
)
def test_a_missing_or_damaged_switch_is_an_error(events: list[dict[str, Any]]) -> None:
    with pytest.raises(RunError, match=r"journal\.jsonl is damaged"):
        PlanHistory.from_journal(events)
