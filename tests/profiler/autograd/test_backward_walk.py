"""What backwards and forwards do twice or in vain is told from what looks like it and is a part of the method."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hotloop.core.records.profile_terms import SlowPattern
from tests.support.profiler.profiled_steps import watched

Network = tuple[nn.Module, nn.Module]
"""A body and a head."""


def seen(step: Callable[[Network, Tensor], None], *, trained: str = "both") -> dict[str, SlowPattern]:
    """The habits of a loop of 40 steps over a network of which both parts or the head alone are in the optimizer."""
    body, head = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), nn.Linear(4, 4)
    parameters = [*(body.parameters() if trained == "both" else ()), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01)

    def loop() -> None:
        for _ in range(40):
            optimizer.zero_grad()
            step((body, head), torch.randn(8, 4))
            optimizer.step()

    return {habit.what: habit for habit in watched(loop).habits}


def plain(network: Network, batch: Tensor) -> None:
    body, head = network
    head(body(batch)).pow(2).mean().backward()


def updated_by_hand(network: Network, batch: Tensor) -> None:
    plain(network, batch)
    for value in network[0].parameters():
        value.data -= 0.01 * value.grad
        value.grad = None


def hooked(network: Network, batch: Tensor) -> None:
    body, _ = network
    handles = [value.register_hook(lambda gradient: gradient) for value in body.parameters()]
    plain(network, batch)
    for handle in handles:
        handle.remove()


def frozen(network: Network, batch: Tensor) -> None:
    network[0].requires_grad_(False)
    plain(network, batch)


def behind_a_checkpoint(network: Network, batch: Tensor) -> None:
    body, head = network
    head(checkpoint(body, batch.requires_grad_(), use_reentrant=True)).pow(2).mean().backward()


def test_gradients_of_what_no_optimizer_updates_are_named() -> None:
    found = seen(plain, trained="head")
    assert set(found) == {"unused gradients"} and found["unused gradients"].per_step == 4
    assert found["unused gradients"].ms is not None and "unused gradients" not in seen(plain)


@pytest.mark.parametrize("step", [updated_by_hand, hooked, frozen, behind_a_checkpoint])
def test_gradients_that_somebody_uses_are_not(step: Callable[[Network, Tensor], None]) -> None:
    assert set(seen(step, trained="head")) <= {"recomputed forward"}  # as a checkpoint asks for


def creating(network: Network, batch: Tensor) -> None:
    body, head = network
    head(body(batch)).pow(2).mean().backward(create_graph=True)
    for value in (*body.parameters(), *head.parameters()):
        value.grad = value.grad.detach()


def penalised(network: Network, batch: Tensor) -> None:
    body, head = network
    loss = head(body(batch)).pow(2).mean()
    gradients = torch.autograd.grad(loss, list(body.parameters()), create_graph=True)
    (loss + sum(gradient.square().sum() for gradient in gradients)).backward()


def curved(network: Network, batch: Tensor) -> None:
    body, head = network
    values = [*body.parameters(), *head.parameters()]
    head(body(batch)).pow(2).mean().backward(create_graph=True)
    gradients = [value.grad for value in values]
    torch.autograd.grad(gradients, values, [torch.ones_like(value) for value in values])
    for value in values:
        value.grad = value.grad.detach()


def test_a_graph_of_the_backward_that_nobody_goes_through_is_named() -> None:
    found = seen(creating)
    assert set(found) == {"created graph"} and found["created graph"].ms > 0


@pytest.mark.parametrize("step", [plain, penalised, curved])
def test_one_that_a_later_pass_goes_through_is_not(step: Callable[[Network, Tensor], None]) -> None:
    assert "created graph" not in seen(step)


def of_inputs(network: Network, batch: Tensor) -> None:
    plain(network, batch.requires_grad_())


def penalised(network: Network, batch: Tensor) -> None:
    """As a penalty on the gradient of a critic, or an equation that a network solves."""
    body, head = network
    loss = head(body(batch.requires_grad_())).pow(2).mean()
    (gradient,) = torch.autograd.grad(loss, batch, create_graph=True)
    (loss + gradient.pow(2).mean()).backward()


@pytest.mark.parametrize(("step", "named"), [(of_inputs, True), (penalised, False)])
def test_gradients_of_inputs_are_named_unless_they_are_asked_for(
    step: Callable[[Network, Tensor], None], named: bool
) -> None:
    assert set(seen(step)) == ({"input gradients"} if named else set())


def twice(network: Network, batch: Tensor) -> None:
    body, head = network
    (head(body(batch)).pow(2).mean() + body(batch).abs().mean()).backward()


def with_dropout(network: Network, batch: Tensor) -> None:
    body, head = network
    dropped = nn.Sequential(nn.Dropout(0.5), body)
    F.mse_loss(head(dropped(batch)), head(dropped(batch))).backward()


def perturbed(network: Network, batch: Tensor) -> None:
    """As in sharpness-aware minimisation, which asks for the same again a little further."""
    plain(network, batch)
    for value in network[0].parameters():
        value.data += 0.01
    plain(network, batch)


@pytest.mark.parametrize(("step", "named"), [(twice, True), (with_dropout, False), (perturbed, False)])
def test_a_forward_is_repeated_if_it_gives_the_same(step: Callable[[Network, Tensor], None], named: bool) -> None:
    assert set(seen(step)) == ({"repeated forward"} if named else set())


def two_backwards(network: Network, batch: Tensor) -> None:
    body, head = network
    features = body(batch)
    head(features).pow(2).mean().backward(retain_graph=True)
    features.abs().mean().backward()


def each_by_itself(network: Network, batch: Tensor) -> None:
    """As where gradients of several tasks are compared."""
    body, head = network
    features = body(batch)
    head(features).pow(2).mean().backward(retain_graph=True)
    kept = [value.grad for value in body.parameters()]
    for value in body.parameters():
        value.grad = None
    features.abs().mean().backward()
    for value, gradient in zip(body.parameters(), kept, strict=True):
        value.grad += gradient


def cleared_between(network: Network, batch: Tensor) -> None:
    """As a critic's gradients are, while those of the trunk that it shares with an actor stay."""
    body, head = network
    answers = head(body(batch))
    answers.pow(2).mean().backward(retain_graph=True)
    for value in head.parameters():
        value.grad = None
    answers.abs().mean().backward()


def apart(network: Network, batch: Tensor) -> None:
    body, head = network
    body(batch).pow(2).mean().backward()
    head(batch).pow(2).mean().backward()


@pytest.mark.parametrize(
    ("step", "named"), [(two_backwards, True), (each_by_itself, False), (cleared_between, False), (apart, False)]
)
def test_two_backwards_that_add_up_go_through_what_they_share_twice(
    step: Callable[[Network, Tensor], None], named: bool
) -> None:
    assert set(seen(step)) == ({"shared graph"} if named else set())


def test_nothing_of_what_backwards_went_through_is_kept() -> None:
    kept: list[weakref.ref[Tensor]] = []

    def step(network: Network, batch: Tensor) -> None:
        twice(network, batch.requires_grad_())
        kept.append(weakref.ref(batch))

    seen(step, trained="head")
    gc.collect()
    assert not [one for one in kept if one() is not None]
