"""Operators of a step whose forward and backward lie in a closure that the optimizer calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hotloop.core.records.profile import Profile
from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.detectors import small_ops
from hotloop.profiler.detectors.step import ProfiledStep
from hotloop.profiler.session import make_observers
from hotloop.profiler.timers.line_tracer import TraceMark
from hotloop.profiler.trace.events import TraceEvent, TraceReader
from tests.support.profiler.profiled_steps import watched

ROUNDS = 24


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs.new_zeros(len(inputs), 8)
        for time in range(ROUNDS):
            hidden = torch.tanh(inputs[:, time] + self.before(hidden))
        return hidden


class Plain(torch.optim.Optimizer):
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for value in self.param_groups[0]["params"]:
                value.sub_(value.grad.sign().mul(0.01))
        return loss


def trained(kind: str) -> Profile:
    model = Recurrent()
    made = {
        "Adam": lambda p: torch.optim.Adam(p, fused=True),
        # At LBFGS's own rate of 1 the tanh saturate, and a step without a gradient ends before its first product.
        "LBFGS": lambda p: torch.optim.LBFGS(p, lr=1e-3, max_iter=1),
    }
    optimizer = made.get(kind, lambda p: Plain(p, {}))(model.parameters())
    inputs, targets = torch.randn(16, ROUNDS, 8), torch.arange(16) % 8

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    def loop() -> None:
        for _ in range(40):
            optimizer.step(closure)

    return watched(loop, observers=lambda watch: make_observers(watch, None))


def phases_of(profile: Profile, *names: str) -> set[Phase]:
    return {one.phase for one in profile.operators if one.name in names}


@pytest.mark.few("LBFGS-dot", "own-sub_")
@pytest.mark.parametrize(("kind", "updating"), [("Adam", "_fused_adam_"), ("LBFGS", "dot"), ("own", "sub_")])
def test_what_a_closure_computes_is_no_update(kind: str, updating: str) -> None:
    profile = trained(kind)
    assert phases_of(profile, "aten::addmm", "aten::tanh") == {"forward"}
    assert phases_of(profile, "aten::_log_softmax") == {"loss"}
    assert phases_of(profile, f"aten::{updating}") == {"update"}
    assert {one.phase for one in profile.operators if one.name.startswith("Optimizer.")} == {"update"}
    assert profile.step_ms is not None
    found = list(small_ops.python_loops(ProfiledStep(profile, profile.step_ms)))
    assert [one for one in found if f"of {ROUNDS} rounds" in one.cause]


def test_an_optimizer_takes_what_its_closure_leaves() -> None:
    """By a made record: the update goes from 10 to 100, the closure's forward from 20 to 60, and 80 to 90 is its kernel."""
    ran: list[tuple[int, Phase]] = [(0, "python"), (15, "update"), (20, "forward"), (60, "update"), (110, "python")]
    marks = [TraceMark(0, None, ("train.py", number), phase, False) for number, (_, phase) in enumerate(ran)]
    events = [TraceEvent(f"hotloop#{number}", 1, start, start) for number, (start, _) in enumerate(ran)]
    events += [
        TraceEvent("Optimizer.step#SGD.step", 1, 10, 100, id=1),
        TraceEvent("Optimizer.zero_grad#SGD.zero_grad", 1, 16, 18, id=2),
        TraceEvent("aten::tanh", 1, 30, 50, number=0, id=3),
        TraceEvent("aten::add_", 1, 80, 90, id=4),
    ]
    found = {
        one.event.name.split("#")[0]: (one.phase, one.ns)
        for one in TraceReader(marks, lambda event: None).operators(events)
    }
    assert found == {
        "Optimizer.step": ("update", 90 - 40 - 2 - 10),
        "Optimizer.zero_grad": ("update", 2),
        "aten::tanh": ("forward", 20),
        "aten::add_": ("update", 10),
    }


@pytest.mark.more
@pytest.mark.parametrize("kind", ["LBFGS", "SGD"])
def test_what_a_closure_makes_before_the_forward_is_no_update(kind: str) -> None:
    """The line search of LBFGS calls it several times, each after what it updates of its own."""
    rows, frequencies = torch.randn(1500, 20), torch.randn(20, 512)
    targets = torch.randn(1500, 1)
    model = nn.Linear(512, 1)
    more = {"max_iter": 4, "tolerance_grad": 0.0, "tolerance_change": 0.0} if kind == "LBFGS" else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-3, **more)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(torch.cos(rows @ frequencies)), targets)
        loss.backward()
        return loss

    def loop() -> None:
        for _ in range(30):
            optimizer.step(closure)

    profile = watched(loop, observers=lambda watch: make_observers(watch, None))
    assert phases_of(profile, "aten::mm", "aten::cos") == {"batch", "backward"}


@pytest.mark.more
def test_a_functional_closure_has_a_forward() -> None:
    rows, targets = torch.randn(1500, 64), torch.randn(1500, 1)
    weight = torch.randn(64, 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], lr=1e-3, max_iter=4, tolerance_grad=0.0, tolerance_change=0.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(torch.exp(torch.sin(rows).cos()) @ weight, targets)
        loss.backward()
        return loss

    def loop() -> None:
        for _ in range(30):
            optimizer.step(closure)

    profile = watched(loop, observers=lambda watch: make_observers(watch, None))
    assert phases_of(profile, "aten::sin", "aten::cos", "aten::exp") == {"forward"}


def test_an_update_stays_one_beside_a_closure_that_only_returns_the_loss() -> None:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    inputs = torch.randn(16, 256)

    def loop() -> None:
        for _ in range(40):
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step(lambda: loss)  # noqa: B023  called at once

    profile = watched(loop, observers=lambda watch: make_observers(watch, None))
    assert phases_of(profile, "aten::_fused_adam_") == {"update"}
    assert profile.optimizers[0].evaluations == 1


class Late(torch.optim.Optimizer):
    """Clears the gradients before it goes by them."""

    def step(self, closure=None):
        with torch.no_grad():
            values = [value for value in self.param_groups[0]["params"] if value.grad is not None]
            gradients = [value.grad for value in values]
            self.zero_grad()
            for value, gradient in zip(values, gradients, strict=True):
                value.sub_(gradient.sign().mul(0.01))


def test_an_optimizer_of_ones_own_may_clear_gradients_first() -> None:
    model, inputs = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), torch.randn(16, 64)
    optimizer = Late(model.parameters(), {})

    def loop() -> None:
        for _ in range(40):
            model(inputs).square().mean().backward()
            optimizer.step()

    profile = watched(loop, observers=lambda watch: make_observers(watch, None))
    assert phases_of(profile, "aten::sub_", "aten::sign") == {"update"}


@pytest.mark.more
def test_many_optimizers_cleared_by_one_line_are_no_line_search() -> None:
    heads, model = [nn.Linear(8, 8) for _ in range(8)], Recurrent()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01, fused=True) for one in (*heads, model)]
    inputs = torch.randn(16, ROUNDS, 8)

    def loop() -> None:
        for _ in range(40):
            for one in optimizers:
                one.zero_grad()
            hidden = model(inputs)
            sum(head(hidden).square().mean() for head in heads).backward()
            for one in optimizers:
                one.step()

    profile = watched(loop, observers=lambda watch: make_observers(watch, None))
    assert profile.step_ms is not None
    assert ROUNDS in {round(one.rounds) for one in small_ops.find_loops(ProfiledStep(profile, profile.step_ms))}
