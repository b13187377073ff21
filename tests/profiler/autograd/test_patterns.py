"""What a loop does in vain is told from what looks like it and is a part of the method."""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from hotloop.core.hardware.limits import CgroupLimits
from hotloop.profiler import autograd_patterns
from hotloop.profiler.base import tensor_facts
from hotloop.profiler.base.call_sites import CallSites
from hotloop.profiler.hooks import resources
from hotloop.profiler.session import ProfilerSession
from tests.support.profiler.profiled_steps import Step, network, training, watched


def seen(step: Step) -> dict[str, float]:
    """How often each habit was seen in a step of a loop."""
    return {habit.what: habit.per_step for habit in watched(training(step)).habits}


def double_q(net: nn.Module, batch: Tensor) -> Tensor:
    with torch.no_grad():
        best = net(torch.randn(8, 4)).argmax(1, keepdim=True)
    return net(batch).gather(1, best).pow(2).mean()


def self_conditioned(net: nn.Module, batch: Tensor) -> Tensor:
    with torch.no_grad():
        guess = net(batch + torch.zeros(4))
    return (net(batch + guess) - batch).pow(2).mean()


def of_overwritten_memory(net: nn.Module, batch: Tensor) -> Tensor:
    """The next batch lies where the one before did."""
    with torch.no_grad():
        wanted = net(batch)
    return F.mse_loss(net(batch.add_(1.0)), wanted)


def frozen_norms(net: nn.Module, batch: Tensor) -> Tensor:
    """Trained in evaluation mode, as where its norms are left alone."""
    net.eval()
    return double_q(net, batch)


METHODS = [double_q, self_conditioned, of_overwritten_memory, frozen_norms]


@pytest.mark.parametrize("step", METHODS, ids=lambda step: step.__name__)
def test_a_forward_that_the_training_needs_is_no_evaluation(step: Step) -> None:
    assert seen(step) == {}


def validated(net: nn.Module, batch: Tensor) -> Tensor:
    net.eval()
    with torch.no_grad():
        net(torch.ones(16, 4))
    net.train()
    return net(batch).pow(2).mean()


def asked_again(net: nn.Module, batch: Tensor) -> Tensor:
    with torch.no_grad():
        net(batch.clone())
    return net(batch).pow(2).mean()


def asked_about_the_last(net: nn.Module, batch: Tensor) -> Tensor:
    """What is done after the update falls into the next step."""
    last = getattr(net, "last", None)
    if last is not None:
        with torch.no_grad():
            net(last)
    net.last = batch
    return net(batch).pow(2).mean()


@pytest.mark.parametrize("step", [validated, asked_again, asked_about_the_last], ids=lambda step: step.__name__)
def test_a_look_at_how_good_the_network_is_is_one(step: Step) -> None:
    assert seen(step) == {"evaluation": pytest.approx(1.0, abs=0.3)}


def test_a_few_samples_that_a_loader_gave_are_looked_at_too() -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    held = DataLoader(TensorDataset(torch.randn(2, 4)), 2)

    def loop() -> None:
        for _ in range(40):
            net.eval()
            with torch.no_grad():
                for (batch,) in held:
                    net(batch)
            net.train()
            net(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()

    assert [habit.what for habit in watched(loop).habits] == ["evaluation"]


def test_taking_every_such_forward_for_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd_patterns, "is_eval", lambda one, trained: True)
    assert all("evaluation" in seen(step) for step in METHODS)


def test_telling_inputs_by_their_memory_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_facts, "_fingerprint", lambda value: (value.data_ptr(),))
    assert "evaluation" in seen(of_overwritten_memory)


def test_a_graph_of_a_teacher_is_no_double_evaluation() -> None:
    teacher = network()
    found = seen(lambda net, batch: F.mse_loss(net(batch), teacher(batch).detach()))
    assert found == {"unused graph": pytest.approx(1.0, abs=0.3)}


def detached(net: nn.Module, batch: Tensor) -> Tensor:
    """As of a generator whose pictures only the discriminator learns from, or as targets of the next state."""
    target = net(torch.randn(8, 4)).detach()
    return F.mse_loss(net(batch), target)


def evaluated_twice(net: nn.Module, batch: Tensor) -> Tensor:
    net(batch.clone()).detach()
    return net(batch).pow(2).mean()


def evaluated_after_the_update(net: nn.Module, batch: Tensor) -> Tensor:
    last, net.last = getattr(net, "last", torch.ones(8, 4)), batch
    net(last)
    return net(batch).pow(2).mean()


@pytest.mark.parametrize(
    ("step", "what"),
    [
        (detached, "unused graph"),
        (evaluated_twice, "wasted forward"),
        (evaluated_after_the_update, "wasted forward"),
    ],
)
def test_only_the_same_inputs_are_evaluated_twice(step: Step, what: str) -> None:
    assert seen(step) == {what: pytest.approx(1.0, abs=0.3)}


class Data:
    """As graphs are given in PyTorch Geometric: its attributes lie in a store."""

    def __init__(self, x: Tensor) -> None:
        self.__dict__["store"] = {"x": x}

    def __getattr__(self, name: str) -> Tensor:
        if name in self.__dict__["store"]:
            return self.__dict__["store"][name]
        raise AttributeError(name)


@dataclass(slots=True)
class Slotted:
    x: Tensor


class OfObjects(nn.Sequential):
    """Asks a batch for its tensor, which is there as an attribute or by name."""

    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch["x"] if isinstance(batch, UserDict) else batch.x)


@pytest.mark.parametrize("made", [Data, Slotted, lambda x: SimpleNamespace(x=x, y=1), lambda x: UserDict(x=x)])
def test_a_batch_that_is_an_object_is_known_by_what_it_holds(made: Callable[[Tensor], Any]) -> None:
    net = OfObjects(*network())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def loop() -> None:
        for _ in range(40):
            batch = made(torch.randn(8, 4))
            optimizer.zero_grad()
            net(batch).pow(2).mean().backward()
            net(batch)
            optimizer.step()

    assert {habit.what: habit.per_step for habit in watched(loop).habits} == {"wasted forward": 1.0}


@pytest.mark.parametrize("graded", [True, False])
@pytest.mark.parametrize("is_after", [True, False])
def test_where_both_go_through_one_function_the_call_of_it_is_named(graded: bool, is_after: bool) -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    places = []

    def loss(batch: Tensor) -> Tensor:
        return net(batch).pow(2).mean()

    def looked_at(batch: Tensor) -> None:
        with torch.set_grad_enabled(graded):
            places.append(inspect.currentframe().f_lineno + 1)
            loss(batch).detach()

    def loop() -> None:
        for _ in range(40):
            batch = torch.randn(8, 4)
            if not is_after:
                looked_at(batch)
            optimizer.zero_grad()
            loss(batch).backward()
            optimizer.step()
            if is_after:
                looked_at(batch)

    (habit,) = watched(loop).habits
    assert habit.what == ("wasted forward" if graded else "evaluation")
    assert habit.where.endswith(f"test_patterns.py:{places[0]}")


def attacked(net: nn.Module, batch: Tensor) -> Tensor:
    net.eval()
    inputs = batch.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(net(inputs).pow(2).mean(), inputs)
    net.train()
    return net(batch + 0.1 * gradient.sign()).pow(2).mean()


def test_gradients_that_are_used_are_no_evaluation() -> None:
    assert seen(attacked) == {}


def test_a_habit_of_every_step_is_seen_once_in_each() -> None:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        assert seen(lambda net, batch: net(batch).pow(2).mean()) == {"hook": pytest.approx(1.0)}


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (2.0, 2), (1.5, 2), (0.2, 1), (16.0, 8)])
def test_a_container_has_the_cores_of_its_share_of_time(
    quota: float | None, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources.os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(resources, "cgroup_limits", lambda: CgroupLimits(cores=quota))
    assert resources.available_cores() == cores


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_computes_again_in_a_backward_is_no_forward_in_vain(reentrant: bool) -> None:
    body, head = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4)), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.01)

    def loop() -> None:
        for _ in range(40):
            inputs = torch.randn(256, 4, requires_grad=True)
            loss = head(checkpoint(body, inputs, use_reentrant=reentrant)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    found = {habit.what: habit for habit in watched(loop).habits if habit.what != "input gradients"}
    assert [*found] == ["recomputed forward"]
    assert found["recomputed forward"].per_step == 1.0 and found["recomputed forward"].ms


@dataclass
class Output:
    logits: Tensor
    values: Tensor


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, batch: Tensor) -> Output:
        return Output(self.body(batch), torch.zeros(4))


def acting(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(20):
        net.eval()
        net(torch.randn(8, 4))
        net.train()
        net(torch.randn(8, 4)).logits.pow(2).mean().backward()
        optimizer.step()


def test_outputs_whose_values_are_no_mappings_are_no_error() -> None:
    net = ActorCritic()
    assert watched(lambda: acting(net, torch.optim.SGD(net.parameters(), lr=0.01))).steps > 0


def test_an_error_in_the_midst_of_an_evaluation_is_none_of_the_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(value: object) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(autograd_patterns, "tensors_in", broken)
    watch = ProfilerSession(24, CallSites(), lambda facts: None, lambda watch: [])
    watch.install()
    net = ActorCritic()
    acting(net, torch.optim.SGD(net.parameters(), lr=0.01))
    watch.remove()
    assert watch.closed and "ValueError: planted" in watch.facts.notes[0]


def validating(net: nn.Module, evaluates: bool, graded: bool) -> None:
    """As after an epoch, in a few batches."""
    net.train(not evaluates)
    with torch.set_grad_enabled(graded):
        for _ in range(23):
            net(torch.ones(16, 4))
    net.train()


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("every", [5, 6, 9])
def test_what_is_done_once_in_an_epoch_is_no_habit(every: int, evaluates: bool, graded: bool) -> None:
    taken = iter(range(1000))

    def step(net: nn.Module, batch: Tensor) -> Tensor:
        if next(taken) % every == 0:
            validating(net, evaluates, graded)
        return net(batch).pow(2).mean()

    assert set(seen(step)) - {"autograd in evaluation"} == set()
