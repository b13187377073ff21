"""The step is found in loops as people write them, and each instant of it is in one phase."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hotloop.profiler import session
from hotloop.profiler.session import make_observers
from tests.support.profiler.profiled_steps import watched

FILE = Path(__file__).name
PATCHED = [
    (torch.autograd, "_engine_run_backward"),
    (nn.Module, "__call__"),
    (nn.Module, "train"),
    (DataLoader, "__iter__"),
    (torch, "save"),
    (torch._C._nn, "mse_loss"),
    (torch.Tensor, "__float__"),
    (torch.optim.Optimizer, "zero_grad"),
]


def line_of(text: str) -> str:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f":{next(number for number, line in enumerate(lines, 1) if line.endswith(f'# {text}'))}"


def two_optimizers() -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 1)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.01) for model in (one, other))
    for _ in range(120):
        loss = other(one(torch.randn(8, 4))).pow(2).mean()
        first.zero_grad()
        second.zero_grad()
        loss.backward()
        first.step()
        second.step()  # two optimizers


def many_optimizers() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(16)))
    optimizers = [torch.optim.SGD([value], lr=0.01) for value in model.parameters()]
    for _ in range(120):
        model(torch.randn(8, 4)).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()  # many optimizers


def one_more_often() -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 1)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.01) for model in (one, other))
    for step in range(120):
        other(one(torch.randn(8, 4))).pow(2).mean().backward()
        first.step()  # one more often
        if step % 5 == 4:
            second.step()


def closure() -> None:
    model = nn.Linear(4, 1)
    inputs, targets = torch.randn(20, 4), torch.randn(20, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    for _ in range(120):
        optimizer.step(evaluate)  # closure


def accumulated() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(480):
        model(torch.randn(8, 4)).pow(2).mean().backward()
        if step % 4 == 3:
            optimizer.step()  # accumulated
            optimizer.zero_grad()


def by_hand() -> None:
    weight = torch.randn(4, 1, requires_grad=True)
    for _ in range(120):
        loss = nn.functional.mse_loss(torch.randn(8, 4) @ weight, torch.zeros(8, 1))
        loss.backward()  # by hand
        with torch.no_grad():
            weight -= 0.01 * weight.grad
            weight.grad = None


def by_gradients() -> None:
    model = nn.Linear(4, 1)
    for _ in range(120):
        loss = model(torch.randn(8, 4)).pow(2).mean()
        found = torch.autograd.grad(loss, list(model.parameters()))  # by gradients
        for value, gradient in zip(model.parameters(), found, strict=True):
            value.data -= 0.01 * gradient


def inside_the_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizers = {value: torch.optim.SGD([value], lr=0.01) for value in model.parameters()}
    for value in model.parameters():
        value.register_post_accumulate_grad_hook(lambda value: optimizers[value].step())
    for _ in range(120):
        model(torch.randn(8, 4)).pow(2).mean().backward()  # inside the backward


def optimizers_made_anew() -> None:
    model = nn.Linear(4, 1)
    for _ in range(130):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model(torch.randn(8, 4)).pow(2).mean().backward()
        optimizer.step()  # optimizers made anew


def one_optimizer() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(130):
        model(torch.randn(8, 4)).pow(2).mean().backward()
        optimizer.step()


@pytest.mark.parametrize(("loop", "made"), [(optimizers_made_anew, 1.0), (one_optimizer, 0.0)])
def test_an_optimizer_in_anothers_place_is_told(loop: Callable[[], None], made: float) -> None:
    (use,) = watched(loop).optimizers
    assert use.made == pytest.approx(made, abs=0.2) and use.steps == 1.0 and use.ms > 0


LOOPS = [
    two_optimizers,
    many_optimizers,
    one_more_often,
    closure,
    accumulated,
    by_hand,
    by_gradients,
    inside_the_backward,
    optimizers_made_anew,
]


@pytest.mark.few("two_optimizers", "accumulated", "by_hand", "closure")
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_the_line_that_ends_a_step_is_found_and_phases_add_up(loop) -> None:
    before = [vars(owner).get(name) for owner, name in PATCHED]
    profile = watched(loop)
    assert profile.step_where.endswith(FILE + line_of(loop.__name__.replace("_", " ")))
    assert profile.steps == 24
    assert sum(profile.phases.values()) == pytest.approx(profile.step_ms)
    assert {"backward", "update"} <= profile.phases.keys()
    assert all(ms > 0 for ms in profile.phases.values())
    assert [vars(owner).get(name) for owner, name in PATCHED] == before


def test_an_error_of_the_watch_is_none_of_the_loops(monkeypatch) -> None:
    def broken(*arguments: object, **named: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(session.LoaderRecorder, "begin", broken)
    with pytest.raises(AssertionError, match="ZeroDivisionError: planted"):
        watched(two_optimizers)


def test_a_loop_that_goes_elsewhere_early_is_followed() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loop() -> None:
        for _ in range(5):
            model(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()
        for _ in range(80):
            model(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()  # the loop that counts

    assert watched(loop).step_where.endswith(line_of("the loop that counts"))


def test_an_evaluation_counts_in_whatever_step_it_falls() -> None:
    """Also in those that are looked at, and in those that go by before a clean one."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pause_s = 0.15  # far longer than steps are on a busy machine

    def loop() -> None:
        for step in range(400):
            model(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()
            if step in range(30, 100, 10):
                model.eval()
                time.sleep(pause_s)
                model.train()

    assert watched(loop).apart.evaluation_s > 0.95 * 7 * pause_s  # six of the seven are 0.86 of all, on an idle machine


@pytest.mark.more
@pytest.mark.parametrize("many", [5, *(pytest.param(more, marks=pytest.mark.more) for more in (8, 40))])
def test_many_backwards_to_an_update_are_one_step(many: int) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = DataLoader(TensorDataset(torch.randn(20_000, 4)), batch_size=2)

    def loop() -> None:
        for step, (inputs,) in enumerate(data):
            model(inputs).pow(2).mean().backward()
            if step % many == many - 1:
                optimizer.step()  # many backwards
                optimizer.zero_grad()

    profile = watched(loop)
    assert profile.step_where.endswith(line_of("many backwards"))
    assert profile.samples_per_step == 2 * many and profile.steps > 20
    assert not [note for note in profile.notes if "no optimizer" in note]
    assert profile.phases["update"] > 0


def test_several_backwards_in_a_line_before_an_update_are_one_step() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loop() -> None:
        for _ in range(80):
            for _ in range(6):
                model(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()  # after several

    assert watched(loop).step_where.endswith(line_of("after several"))


def test_samples_of_a_step_are_unknown_where_several_backwards_share_it_and_no_loader_tells() -> None:
    assert watched(accumulated).samples_per_step is None
    assert (watched(two_optimizers).samples_per_step, watched(closure).samples_per_step) == (8, 20)


@pytest.mark.parametrize(("parts", "many", "one"), [(1, 1, True), (4, 1, False), (4, 4, True)])
def test_all_samples_may_be_one_batch_or_the_batches_of_one_step(parts: int, many: int, one: bool) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = torch.randn(8, 4).chunk(parts)

    def loop() -> None:
        for step in range(60 * many):
            model(batches[step % parts]).pow(2).mean().backward()
            if step % many == many - 1:
                optimizer.step()

    assert watched(loop).one_batch is one


def test_updates_too_few_to_tell_steps_by_are_told_of() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loop() -> None:
        for step in range(60):
            model(torch.randn(8, 4)).pow(2).mean().backward()
            if step % 30 == 29:
                optimizer.step()

    profile = watched(loop)
    assert any("stepped only 2 times" in note for note in profile.notes)
    assert not [note for note in profile.notes if "no optimizer" in note]
    assert not [one for one in profile.optimizers if one.kind == "by hand"]


@pytest.mark.parametrize(("loop", "by_hand"), [(inside_the_backward, False), (by_hand, True)])
def test_an_update_inside_the_backward_is_none_by_hand(loop, by_hand: bool, own_optimizers: None) -> None:
    profile = watched(loop)
    said = " ".join(profile.notes)
    assert ("no optimizer stepped" in said, "inside the backward" in said) == (by_hand, not by_hand)
    assert [one.kind for one in profile.optimizers] == ["by hand"] * by_hand


def test_nothing_remains_of_a_loop_that_the_script_has_left() -> None:
    first, second = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), nn.Sequential(nn.Conv1d(1, 2, 3))
    one, other = torch.optim.Adam(first.parameters()), torch.optim.SGD(second.parameters(), lr=0.01)

    def loop() -> None:
        for inputs in DataLoader(torch.randn(40, 4), batch_size=2):
            first(inputs).pow(2).mean().backward(retain_graph=True)
            one.step()
        for inputs in DataLoader(torch.randn(600, 1, 16), batch_size=3):
            second(inputs).pow(2).mean().backward()
            other.step()  # the second loop

    profile = watched(loop, observers=lambda watch: make_observers(watch, None))
    assert profile.step_where.endswith(line_of("the second loop")) and profile.steps == 24
    assert {module.kind for module in profile.modules if module.kind} == {"Sequential", "Conv1d"}
    assert not [one.name for one in profile.operators if "addmm" in one.name or "tanh" in one.name]
    assert profile.operators and not profile.habits
    assert [use.kind for use in profile.optimizers] == ["SGD"]
    assert (profile.batch, profile.samples_per_step) == (["3x1x16"], 3)
    assert [use.batch_size for use in profile.loaders] == [3]


def test_many_optimizers_that_step_at_one_line_are_one_record() -> None:
    (use,) = watched(many_optimizers).optimizers
    assert len(use.groups) == 32 and {group.settings for group in use.groups} == {0} and use.steps == 1
