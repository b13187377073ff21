"""Where a network is called several times before a backward, what stands between the calls is no loss, on the timeline and in lines."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from hotloop.core.records.profile import Profile
from hotloop.profiler.session import make_observers
from hotloop.profiler.timers import line_sampler
from tests.support.profiler.profiled_steps import watched

pytestmark = pytest.mark.more

WORLD_S, LOSS_S = 0.004, 0.002


def busy(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def world(state: Tensor) -> Tensor:
    """An environment in plain Python, as of reinforcement learning."""
    busy(WORLD_S)
    return state.roll(1)


def surprise(outputs: list[Tensor]) -> Tensor:
    busy(LOSS_S)
    return torch.stack(outputs).pow(2).mean()


def seen() -> Profile:
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def loop() -> None:
        for _ in range(40):
            state, outputs = torch.randn(2, 4), []
            for _ in range(4):
                outputs.append(net(state))
                if len(outputs) < 4:
                    state = world(state)
            loss = surprise(outputs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return watched(loop, observers=lambda watch: make_observers(watch, None))


def spent(profile: Profile, function: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in profile.lines:
        if one.function.endswith(function):
            found[one.phase] = found.get(one.phase, 0.0) + one.own_ms
    return found


def test_lines_between_calls_of_a_network_are_in_the_phase_that_the_timeline_ends_with(one_thread: None) -> None:
    profile = seen()
    assert profile.phases["python"] > profile.phases["loss"]
    between = spent(profile, "world")
    busily = spent(profile, "busy")
    assert set(between) <= {"python"}
    assert busily["python"] > 1.5 * busily["loss"] > 0  # 12 ms and 2


def test_lines_that_stay_in_the_loss_are_seen(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_sampler.StackSampler, "amend", lambda self, marks, phase: None)
    busily = spent(seen(), "busy")
    assert busily.get("python", 0.0) <= 1.5 * busily["loss"]
