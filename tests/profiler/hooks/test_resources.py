"""What is left on while a script trains: profilers, and collections of garbage."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hotloop.core.records.profile_terms import SlowPattern
from hotloop.profiler.base.call_sites import CallSites
from hotloop.profiler.hooks.resources import GarbageCollections
from hotloop.profiler.session import make_observers
from tests.support.profiler.profiled_steps import watched


def seen(*, collects: bool = False, profiles: bool = False) -> dict[str, SlowPattern]:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def train() -> None:
        for _ in range(60):
            net(torch.randn(8, 4)).pow(2).mean().backward()
            if collects:
                gc.collect()  # LINE collects
            optimizer.step()
            optimizer.zero_grad()

    def loop() -> None:
        with torch.autograd.profiler.profile(enabled=profiles):
            train()

    closely = (lambda watch: make_observers(watch, None)) if collects else None
    return {habit.what: habit for habit in watched(loop, observers=closely).habits}


def test_collections_in_each_step_are_timed_and_have_a_line() -> None:
    before = list(gc.callbacks)
    gc.freeze()  # there is much
    try:
        found = seen(collects=True)["garbage collection"]
    finally:
        gc.unfreeze()
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    number = next(at for at, line in enumerate(lines, 1) if line.endswith("# LINE collects"))
    assert found.where.endswith(f":{number}") and found.per_step >= 1 and found.ms
    assert gc.callbacks == before


@pytest.mark.parametrize("profiles", [True, False])
def test_a_profiler_of_the_scripts_own_is_seen(profiles: bool) -> None:
    found = seen(profiles=profiles)
    assert ("profiler" in found) is profiles
    assert not profiles or (found["profiler"].calls and found["profiler"].call_us)


def test_collections_that_end_are_told_no_more() -> None:
    """What was said earlier in the run is taken back."""
    collections = GarbageCollections(CallSites())

    def stepped(times: int, collects: bool) -> list[dict[str, Any]]:
        for _ in range(times):
            collections.begin()
            if collects:
                gc.collect()
            collections.end()
        return collections.records()["collections"]

    assert stepped(0, False) == [] and len(stepped(3, True)) == 1 and stepped(4, False) == []
