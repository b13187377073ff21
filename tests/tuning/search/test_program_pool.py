"""Programs that a search holds: compiling one may take so long, and no longer."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from hotloop.errors import PlanError
from hotloop.lowering.build import lower
from hotloop.plan import BASELINE, Plan
from hotloop.task import Task
from hotloop.tuning import search
from tests.support.programs import a_task


def lower_slowly(task: Task, plan: Plan) -> Any:
    until = time.monotonic() + (60 if plan.compile != "none" else 0.2)
    while time.monotonic() < until:
        time.sleep(0.01)
    return lower(task, BASELINE)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no alarms on Windows")
def test_a_compiler_that_does_not_come_to_its_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "lower", lower_slowly)
    monkeypatch.setattr(search, "_MAX_COMPILE_S", 0.1)
    held = search.ProgramPool(a_task())
    with pytest.raises(PlanError, match="compiling it was stopped after 0 s") as caught:
        held.get_program("compiled", Plan(compile="step"))
    assert "\n" not in str(caught.value) and not held.programs
    # that takes as long as it takes
    assert held.get_program("eager", Plan(optimizer="fused")) is held.programs["eager"]
    held.close()
