"""Causes in the graphs and calls of a step. Each cause is named with its cost; a step without the cause gets no remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Normal

from hotloop.core.records.profile import Profile
from hotloop.profiler.detectors import diagnose
from tests.support.profiler.profiled_steps import network, watched

Way = dict[str, Any]


def whats(profile: Profile) -> set[str]:
    return {habit.what for habit in profile.habits}


def evaluating(*, graded: bool, before: bool = False, is_trained: bool = True) -> Callable[[], None]:
    """A training on 8 samples with a look at 32 others in each step."""
    net, other = network(), network()
    optimizer = torch.optim.SGD([*net.parameters(), *other.parameters()], lr=0.01)

    def how_good() -> None:
        asked = net if is_trained else nn.Linear(4, 4)
        asked.eval()
        with torch.set_grad_enabled(graded):
            asked(torch.randn(32, 4)).pow(2).mean().item()
        asked.train()

    def loop() -> None:
        for _ in range(40):
            if before:
                how_good()
            loss = net(torch.randn(8, 4)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not before:
                how_good()

    return loop


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("graded", [False, True])
def test_an_evaluation_has_one_name_with_a_graph_and_without(graded: bool, before: bool) -> None:
    profile = watched(evaluating(graded=graded, before=before))
    (found,) = [habit for habit in profile.habits if habit.what == "evaluation"]
    assert found.per_step == 1 and (found.ms or 0) > 0 and "unused graph" not in whats(profile)
    assert (profile.batch, profile.samples_per_step) == (["8x4"], 8)


def test_another_network_in_evaluation_mode_is_no_evaluation() -> None:
    assert "evaluation" not in whats(watched(evaluating(graded=True, is_trained=False)))


@pytest.mark.parametrize(("every", "named"), [(2, True), (20, False)])
@pytest.mark.parametrize("graded", [False, True])
def test_an_evaluation_of_every_second_step_counts_with_its_share(every: int, named: bool, graded: bool) -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def loop() -> None:
        for number in range(80):
            net(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()
            if number % every == 0:
                net.eval()
                with torch.set_grad_enabled(graded):
                    for _ in range(20):
                        net(torch.randn(8, 4)).sum().item()
                net.train()

    profile = watched(loop, steps=36)
    found = [one for one in diagnose(profile).remedies if one.cause.startswith("evaluation at each step")]
    assert bool(found) is named
    if named:
        assert 0.1 < found[0].gain <= 1 and "test_measured_causes.py" in found[0].where


def adversarial(*, frozen: bool = False, asked: bool = False, norm: bool = False) -> Callable[[], None]:
    """A generator whose loss goes through a discriminator, which clears its gradients before it is updated."""
    make = nn.Linear(4, 16)
    judge = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64) if norm else nn.Tanh(), nn.Linear(64, 1))
    first, second = (torch.optim.Adam(net.parameters(), fused=True) for net in (judge, make))

    def loop() -> None:
        for _ in range(40):
            fake = make(torch.randn(8, 4))
            first.zero_grad()
            (judge(torch.randn(8, 16)).pow(2).mean() + judge(fake.detach()).abs().mean()).backward()
            first.step()
            second.zero_grad()
            judge.requires_grad_(not frozen)
            judge(fake).mean().backward(inputs=list(make.parameters()) if asked else None)
            judge.requires_grad_(True)
            second.step()

    return loop


@pytest.mark.parametrize("norm", [False, True])
def test_gradients_of_weights_that_are_cleared_unread_are_named(norm: bool) -> None:
    profile = watched(adversarial(norm=norm))
    (found,) = [habit for habit in profile.habits if habit.what == "unread gradients"]
    assert found.per_step == 1 and 0 < (found.ms or 0) < 0.5 * profile.phases["backward"]


@pytest.mark.parametrize("way", [{"frozen": True}, {"asked": True}], ids=str)
def test_gradients_that_are_not_computed_are_not(way: Way) -> None:
    assert "unread gradients" not in whats(watched(adversarial(**way)))


def test_gradients_that_a_fused_optimizer_reads_without_a_change_are_read() -> None:
    """Those of a bias before a mean that is taken off are 0, and leave it as it is."""
    net = nn.Linear(4, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=True)

    def loop() -> None:
        for _ in range(40):
            out = net(torch.randn(8, 4))
            optimizer.zero_grad()
            (out - out.mean(0)).pow(2).mean().backward()
            optimizer.step()

    assert "unread gradients" not in whats(watched(loop))


def acting(*, validate: bool | None) -> Callable[[], None]:
    """A policy that is asked for one action after another, and updated with all of them."""
    policy = network()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)

    def act(state: Tensor) -> Tensor:
        actions = Categorical(logits=policy(state), validate_args=validate)
        return actions.log_prob(actions.sample())

    def loop() -> None:
        for _ in range(40):
            loss = -torch.stack([act(torch.randn(4)) for _ in range(3)]).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return loop


@pytest.fixture
def validating(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's default, which a script of another test may have changed in this process."""
    monkeypatch.setattr(Distribution, "_validate_args", True)


@pytest.mark.usefixtures("validating")
def test_validation_of_arguments_is_named_with_its_cost() -> None:
    profile = watched(acting(validate=None))
    found, *_ = [habit for habit in profile.habits if habit.what == "argument validation"]
    assert found.per_step >= 3 and (found.ms or 0) > 0
    (remedy, *_) = [one for one in diagnose(profile).remedies if "argument validation" in one.cause]
    assert "validate_args=False" in remedy.remedy
    assert Distribution.__init__.__module__ == "torch.distributions.distribution"
    assert not hasattr(Distribution.__init__, "__wrapped__"), "left installed"


def test_without_validation_nothing_is_named() -> None:
    assert "argument validation" not in whats(watched(acting(validate=False)))


@pytest.mark.usefixtures("validating")
def test_a_wrong_argument_is_the_scripts_error_as_without_a_watch() -> None:
    def loop() -> None:
        for number in range(40):
            net = network()
            net(torch.randn(8, 4)).pow(2).mean().backward()
            torch.optim.SGD(net.parameters(), lr=0.01).step()
            with pytest.raises(ValueError, match="to satisfy the constraint"):
                Normal(torch.zeros(2), torch.tensor([1.0, -1.0 - number]))

    watched(loop)
