"""Runs in which compiling pays, and compilations that are only pretended: what tests of choosing share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hotloop
from hotloop.core.plan_request import PlanRequest
from hotloop.plan import Plan
from hotloop.tuning import rules
from hotloop.tuning.auto import auto
from hotloop.tuning.search import auto_search, budget, payoff
from tests.support.programs import a_task, labelled
from tests.support.tuning.fake_races import Races, proving

CPU = Plan(device="cpu")
AUTO = PlanRequest(CPU, is_auto=True)
AS_USUAL = PlanRequest(Plan(device="cpu", layout="contiguous"), is_auto=True)
"""No other layout of images is compiled."""

REWRITTEN = Plan(compile="package", rewrites="all")


class Samples(torch.utils.data.Dataset):
    """The samples of `labelled`, one by one; `asked` is told of each."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        x, y = labelled()
        return x[index], y[index]


def make_any_run_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any run has steps enough for the rules."""
    monkeypatch.setattr(rules, "MIN_COMPILED_STEPS", 1)


def pretend_to_compile(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Every compilation pays, and is only pretended; the plans that were lowered."""
    plans: list[Plan] = []

    def pretend(task: Any, plan: Plan, *told: Any) -> Any:
        plans.append(plan)
        return hotloop.lower(task, plan.with_axes(compile="none", rewrites="none"))

    monkeypatch.setattr(auto, "lower", pretend)
    monkeypatch.setattr(auto_search, "lower", pretend)
    monkeypatch.setattr(payoff, "_COMPILE_TIME_FACTOR", 0.0)  # what a compilation takes doesn't count
    monkeypatch.setattr(budget, "PROOF_STEPS", 0)
    monkeypatch.setattr(budget, "PROOF_COPIES", 0)
    monkeypatch.setattr(payoff, "PROOF_STEPS", 0)
    monkeypatch.setattr(payoff, "_RACING_STEPS", 0)
    return plans


def finding(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes up what races and proofs find."""

    def find(parity: str = "bitwise", **speeds: float) -> None:
        monkeypatch.setattr(auto_search, "measure", Races(**speeds))
        monkeypatch.setattr(auto_search, "prove_programs", lambda task, programs: proving(parity)(programs))

    return find


def images() -> hotloop.Task:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 3))
    return a_task(model=network, data=(torch.randn(12, 1, 6, 6), torch.arange(12) % 3))
