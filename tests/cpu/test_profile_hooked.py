"""Hooks on gradients, told from what really runs: they run within the backward, at lines of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hotloop.diagnosing import diagnose
from hotloop.profiles import Profile
from hotloop.profiling.observing import observers
from tests.cpu.watching import watched

Hook = Callable[[Tensor], Tensor | None]


def clipped(gradient: Tensor) -> Tensor:
    return torch.where(gradient.abs() > 1.0, gradient.sign(), gradient)


IN_A_LINE: Hook = lambda gradient: torch.where(gradient.abs() > 1.0, gradient.sign(), gradient)  # noqa: E731
SEEN: list[Tensor] = []


def profile_of(hook: Hook) -> Profile:
    layers = [layer for _ in range(12) for layer in (nn.Linear(16, 16), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for value in model.parameters():
        value.register_hook(hook)
    inputs = torch.randn(64, 16)

    def loop() -> None:
        for _ in range(60):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

    return watched(loop, observers=lambda watch: observers(watch, None))


@pytest.mark.parametrize("hook", [clipped, IN_A_LINE], ids=["function", "lambda"])
def test_what_a_hook_does_is_its_own_lines(hook: Hook) -> None:
    where = f"{__file__.rpartition('/')[2]}:{hook.__code__.co_firstlineno + (hook is clipped)}"
    profile = profile_of(hook)
    inside = [one for one in profile.operators if one.name in ("aten::sign", "aten::where")]
    assert inside and {one.where.rpartition("/")[2] for one in inside} == {where}
    assert {one.phase for one in inside} == {"backward"}
    (named,) = [one for one in diagnose(profile).remedies if "a hook on each parameter's gradient" in one.cause]
    assert named.where.endswith(where) and "24 tensors" in named.cause


def test_one_that_does_nothing_with_them_is_not_named() -> None:
    profile = profile_of(lambda gradient: SEEN.clear())
    assert not any("hook" in one.cause for one in diagnose(profile).remedies)
