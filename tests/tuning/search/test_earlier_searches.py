"""What a search found is remembered, and searched for again only where that may find more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hotloop.core.plan_request import PlanRequest
from hotloop.core.records.race import Timing
from hotloop.plan import Plan
from hotloop.task_file import load_task
from hotloop.tuning import search as module
from hotloop.tuning import tune
from hotloop.tuning.search import BASELINE
from tests.support.tuning.fake_races import STEP_MS, Races

TASK = """
import torch
import hotloop

x = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
task = hotloop.Task(
    model=lambda: torch.nn.Linear(4, 3),
    loss=torch.nn.CrossEntropyLoss(),
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    data=(x, torch.arange(20) % 3),
    batch_size=5,
    epochs=10_000,
)
"""


@pytest.mark.few("0.5-False")
@pytest.mark.parametrize(("speed", "rules"), [(0.5, False), (1.031, True)])
def test_a_search_in_vain_is_not_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, speed: float, rules: bool
) -> None:
    """Its plan: the baseline, or what the rules say where that isn't slower."""
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: tmp_path / "cache")
    races = Races(optimizer__fused=speed, optimizer__foreach=0.5)
    monkeypatch.setattr(module, "measure", races)
    monkeypatch.setattr(module.Runner, "quick_estimate", lambda self, seconds: (STEP_MS / 1e3, 0.0))
    monkeypatch.setattr(module, "compiled_changes", lambda *given: [])
    monkeypatch.setattr("hotloop.tuning.economics.PROOF_STEPS", 10_000)
    (tmp_path / "task.py").write_text(TASK)
    loaded, wanted = load_task(str(tmp_path / "task.py")), PlanRequest.from_value("auto", {"device": "cpu"})
    search = partial(tune.cached_or_tuned_plan, loaded, wanted)
    said: list[str] = []

    plan, told = search(say=said.append)
    assert (plan is None) is rules and "nothing proven equal is faster" in told
    assert any("not proven" in note for note in said) is rules  # notes are said
    raced = len(races.raced)
    again, told = search()
    assert again == plan and "an earlier search" in told and len(races.raced) == raced

    search(overrides={"epochs": 12_000})
    assert len(races.raced) == raced
    search(overrides={"epochs": 40_000})  # which pays for a longer look
    assert len(races.raced) > raced
    raced = len(races.raced)
    tune.tune_loaded(loaded, wanted.plan)  # an explicit search runs in spite of the stored failure
    assert len(races.raced) > raced


def test_a_search_with_a_placement_is_remembered_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: tmp_path / "cache")
    monkeypatch.setattr(module, "measure", races := Races())
    monkeypatch.setattr(module.Runner, "quick_estimate", lambda self, seconds: (STEP_MS / 1e3, 0.0))
    monkeypatch.setattr(module, "compiled_changes", lambda *given: [])
    parts = "torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))"
    (tmp_path / "task.py").write_text(TASK.replace("torch.nn.Linear(4, 3)", parts))
    loaded = load_task(str(tmp_path / "task.py"))
    wanted = {where: PlanRequest.from_value("auto", {"device": "cpu", "placement": f"{where}=cpu"}) for where in "01"}
    for where, again in (("0", False), ("0", True), ("1", False)):
        raced = len(races.raced)
        plan, told = tune.cached_or_tuned_plan(loaded, wanted[where])
        assert plan is not None and plan.placement == {where: "cpu"}
        assert ("an earlier search" in told) is again is (len(races.raced) == raced)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Races], int]:
    """How many plans a training that searches races, by races that are made up."""
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: tmp_path / "cache")
    monkeypatch.setattr(module.Runner, "quick_estimate", lambda self, seconds: (STEP_MS / 1e3, 0.0))
    monkeypatch.setattr(module, "compiled_changes", lambda *given: [])
    (tmp_path / "task.py").write_text(TASK)
    loaded, wanted = load_task(str(tmp_path / "task.py")), PlanRequest.from_value("auto", {"device": "cpu"})

    def search(races: Races) -> int:
        monkeypatch.setattr(module, "measure", races)
        tune.cached_or_tuned_plan(loaded, wanted)
        return len(races.raced)

    return search


def test_a_compiler_that_was_installed_is_worth_another_search(
    tried: Callable[[Races], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for compiler, first in ((None, True), (None, False), ("/usr/bin/g++", True), ("/usr/bin/g++", False)):
        monkeypatch.setattr("hotloop.core.hardware.machine.find_compiler", lambda found=compiler: found)
        assert (tried(Races()) > 0) is first


class Full(Races):
    """Nothing but the baseline has memory enough."""

    def timing(self, entrant: Any, steps: int) -> Timing:
        found = super().timing(entrant, steps)
        if entrant.name == BASELINE:
            return found
        return Timing(name=found.name, plan=found.plan, failure="no memory", short_of_memory=True)


def test_a_search_that_lacked_memory_is_made_again(tried: Callable[[Races], int]) -> None:
    assert tried(Full()) > 1 and tried(Races()) > 1 and tried(Races()) == 0


def test_a_result_that_cannot_be_read_is_said_by_a_search(tried: Callable[[Races], int], tmp_path: Path) -> None:
    tried(Races())
    files = list((tmp_path / "cache" / "races").rglob("*.json"))
    for path in files:
        path.write_text("{}")
    said: list[str] = []
    tune.tune_loaded(load_task(str(tmp_path / "task.py")), Plan(device="cpu"), say=said.append)
    assert files and len([line for line in said if "is ignored" in line]) == len(files)
