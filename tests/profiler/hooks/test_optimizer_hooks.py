"""The time of each parameter group, by a clock that moves where a test says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hotloop.profiler.base.call_sites import CallSites
from hotloop.profiler.hooks.optimizer_hooks import GroupClock, OptimizerRecorder


class Slow(torch.optim.Optimizer):
    def __init__(self, seconds: list[float]) -> None:
        self.now = 0.0
        groups = [{"params": [torch.nn.Parameter(torch.ones(n + 1))], "takes": s} for n, s in enumerate(seconds)]
        super().__init__(groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.now += 100.0
        for group in self.param_groups:
            self.now += group["takes"]
            if group["takes"] < 0:
                raise ValueError("mine")
        self.now += 100.0


def test_each_group_has_the_time_until_the_next_is_asked_for() -> None:
    slow = Slow([1.0, 20.0, 3.0])
    groups, clock = slow.param_groups, GroupClock(lambda: slow.now)
    clock.begin(slow)
    slow.step()
    assert clock.end(slow) == {0: 1.0, 1: 20.0, 2: 3.0}
    assert slow.param_groups is groups


def test_one_group_alone_is_left_as_it_is() -> None:
    slow = Slow([1.0])
    groups, clock = slow.param_groups, GroupClock(lambda: slow.now)
    clock.begin(slow)
    assert slow.param_groups is groups
    slow.step()
    assert clock.end(slow) == {}


def test_after_an_error_the_optimizer_gets_its_own_list_back() -> None:
    slow = Slow([1.0, -1.0])
    groups, clock = slow.param_groups, GroupClock(lambda: slow.now)
    clock.begin(slow)
    with pytest.raises(ValueError, match="mine"):
        slow.step()
    clock.begin(slow)
    clock.end(slow)
    assert slow.param_groups is groups


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("foreach", [False, True])
def test_torchs_own_take_their_groups_one_by_one_and_give_the_same_result(kind: Any, foreach: bool) -> None:
    def trained(watched: bool) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
        values = [torch.nn.Parameter(torch.arange(float(n + 2))) for n in range(3)]
        optimizer = kind([{"params": [value]} for value in values], lr=0.1, foreach=foreach)
        seen = OptimizerRecorder(CallSites())
        seen.on = watched
        for _ in range(4):
            for value in values:
                value.grad = torch.ones_like(value)
            seen.number(optimizer, "a.py:1")
            seen.began(optimizer)
            optimizer.step()
            seen.ended(optimizer)
        return [value.detach() for value in values], seen.records(8) if watched else []

    (watched, records), (alone, _) = trained(True), trained(False)
    assert all(torch.equal(one, other) for one, other in zip(watched, alone, strict=True))
    (use,) = records
    assert all(group["ms"] > 0 for group in use["groups"])
    assert sum(group["ms"] for group in use["groups"]) < 2 * use["ms"]


def test_groups_of_alike_settings_are_told_across_optimizers() -> None:
    rates, values = (0.1, 0.2, 0.1), [torch.nn.Parameter(torch.ones(2)) for _ in range(6)]
    seen = OptimizerRecorder(CallSites())
    seen.on = True
    made = [
        torch.optim.Adam([{"params": [value], "lr": rate} for value, rate in zip(part, rates, strict=True)])
        for part in (values[:3], values[3:])
    ]
    for optimizer in made:
        seen.began(optimizer)
        seen.ended(optimizer)
        seen.number(optimizer, "a.py:1")
    assert [[group["settings"] for group in use["groups"]] for use in seen.records(2)] == [[0, 1, 0], [0, 1, 0]]
