"""Runs a loop in this process under a watch, without a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from hotloop.core.records.profile import Profile
from hotloop.profiler.base.call_sites import CallSites
from hotloop.profiler.base.steps import Observer
from hotloop.profiler.session import ProfilerSession
from hotloop.profiler.summary import summarize

Step = Callable[[nn.Module, Tensor], Tensor]
"""Gives the loss of a batch, and does what it does beside."""


def watched(
    loop: Callable[[], Any],
    *,
    steps: int | None = 24,
    observers: Callable[[ProfilerSession], list[Observer]] | None = None,
) -> Profile:
    """What a watch says of a loop; modules, operators and lines are left out unless observers are given."""
    watch = ProfilerSession(steps, CallSites(), lambda facts: None, observers or (lambda watch: []))
    watch.install()
    try:
        loop()
    finally:
        watch.close()
        watch.remove()
    assert not [note for note in watch.facts.notes if "internal error" in note], watch.facts.notes
    assert not hasattr(Distribution.__init__, "__wrapped__"), "left installed"
    return summarize(watch.facts, "loop")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def training(step: Step) -> Callable[[], None]:
    """A loop of 40."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def loop() -> None:
        for _ in range(40):
            loss = step(net, torch.randn(8, 4))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return loop
