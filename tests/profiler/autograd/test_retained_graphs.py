"""What a loop keeps, clears and writes at each step, and where."""

from __future__ import annotations

import inspect
import sys
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hotloop.profiler.backward_walk import match_lines
from hotloop.profiler.base import call_sites
from tests.support.profiler.profiled_steps import Step, network, training, watched


def habits_of(step: Step) -> set[str]:
    return {habit.what for habit in watched(training(step)).habits}


def keeping(what: str) -> Step:
    kept: list[Tensor] = []

    def step(net: nn.Module, batch: Tensor) -> Tensor:
        out = net(batch)
        first, second = out.pow(2).mean(), out.abs().mean()
        if what == "the last":
            kept.clear()
        kept.append({"a term": first, "outputs": out, "numbers": first.detach(), "the last": first}[what])
        return first + second

    return step


@pytest.mark.parametrize(("what", "is_kept"), [("a term", 1), ("outputs", 1), ("numbers", 0), ("the last", 0)])
def test_whatever_keeps_a_part_of_the_graph_is_seen(what: str, is_kept: int) -> None:
    assert habits_of(keeping(what)) == ({"kept graph"} if is_kept else set())


def put(kept: Any, value: Any, way: str) -> None:
    match way:
        case "append":
            kept.append(value)
        case "a tuple":
            kept.append((3, value))
        case "extend":
            kept.extend([value])
        case "appendleft":
            kept.appendleft(value)
        case "no call":
            kept += [value]


WAYS = ["append", "a tuple", "extend", "appendleft"]


@pytest.mark.parametrize("way", [*WAYS, "no call"])
def test_a_kept_graph_is_told_where_it_is_put_into_a_list_and_else_at_its_backward(way: str) -> None:
    kept: deque[Any] = deque()

    def step(net: nn.Module, batch: Tensor) -> Tensor:
        loss = net(batch).pow(2).mean()
        put(kept, loss, way)
        return loss

    (habit,) = watched(training(step)).habits
    code, text = inspect.getsourcelines(put)[1], inspect.getsource(put).splitlines()
    puts = [code + number for number, line in enumerate(text) if "kept" in line and "def" not in line]
    backward = inspect.getsourcelines(training)[1]
    line = int(habit.where.rpartition(":")[2])
    assert line == puts[WAYS.index(way)] if way in WAYS else backward < line < backward + 20
    assert sys.getprofile() is None


def test_each_of_two_kept_graphs_is_told_where_it_is_put() -> None:
    lines = Counter({"gan.py:9": 3, "gan.py:12": 3})
    assert match_lines(["gan.py:8", "gan.py:11"], lines) == {"gan.py:8": "gan.py:9", "gan.py:11": "gan.py:12"}
    assert match_lines(["gan.py:8", "gan.py:11"], Counter({"log.py:3": 6})) == {
        "gan.py:8": "log.py:3",
        "gan.py:11": "log.py:3",
    }
    assert match_lines(["gan.py:8", "gan.py:11"], lines + Counter({"gan.py:20": 1})) == {}
    assert match_lines(["gan.py:8"], Counter()) == {}


def test_a_profiler_of_the_scripts_own_is_left_in_its_place() -> None:
    kept: list[Tensor] = []

    def mine(*event: Any) -> None: ...

    def step(net: nn.Module, batch: Tensor) -> Tensor:
        kept.append(net(batch).pow(2).mean())
        assert sys.getprofile() is mine
        return kept[-1]

    sys.setprofile(mine)
    try:
        (habit,) = watched(training(step)).habits
        assert sys.getprofile() is mine
    finally:
        sys.setprofile(None)
    assert habit.what == "kept graph"


@pytest.mark.parametrize(("many", "what"), [(100, "carried graph"), (4, "kept graph")])
def test_a_graph_is_carried_over_where_backwards_have_more_and_more_to_go_through(many: int, what: str) -> None:
    """Where they go through those of a few steps each time, it may be the method."""
    weight = nn.Parameter(torch.randn(4))
    optimizer = torch.optim.SGD([weight], lr=0.01)

    def loop() -> None:
        losses: deque[Tensor] = deque(maxlen=many)
        for _ in range(80):
            losses.append((weight * torch.randn(4)).sum())
            optimizer.zero_grad()
            torch.stack(list(losses)).mean().backward(retain_graph=True)
            optimizer.step()

    found = {habit.what: habit for habit in watched(loop).habits}
    assert what in found and len({"kept graph", "carried graph"} & found.keys()) == 1
    assert (found[what].ms is not None) is (what == "carried graph")


def test_what_all_steps_share_is_no_kept_graph() -> None:
    weight = torch.randn(4, requires_grad=True)
    scale = weight.exp() * 2

    def loop() -> None:
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(40):
            (net(torch.randn(8, 4)) * scale).mean().backward(retain_graph=True)
            optimizer.step()

    assert "kept graph" not in {habit.what for habit in watched(loop).habits}


def adversarial(way: str, fused: bool) -> Callable[[], None]:
    """A generator and a discriminator in turn; some ways go back through the generator for nothing."""
    make, judge = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4)), nn.Linear(4, 1)
    first, second = (torch.optim.SGD(net.parameters(), lr=0.01, fused=fused) for net in (judge, make))

    def loop() -> None:
        for _ in range(40):
            fake = make(torch.randn(8, 4))
            if way == "two backwards":
                first.zero_grad()
                judge(torch.randn(8, 4)).pow(2).mean().backward()
                judge(fake).abs().mean().backward(retain_graph=True)
            else:
                first.zero_grad()
                given = fake.detach() if way == "detached" else fake
                (judge(torch.randn(8, 4)).pow(2).mean() + judge(given).abs().mean()).backward(retain_graph=True)
            first.step()
            if way != "added up":
                second.zero_grad(set_to_none=way != "zeros")
            judge(fake).mean().backward()
            second.step()
            if way == "added up":
                second.zero_grad()

    return loop


@pytest.mark.few("*-False")
@pytest.mark.parametrize("fused", [False, True])  # which leaves the versions of what it updates as they were
@pytest.mark.parametrize(
    ("way", "told"), [("once", 1), ("two backwards", 1), ("zeros", 1), ("detached", 0), ("added up", 0)]
)
def test_gradients_of_a_network_that_are_cleared_before_it_is_updated_are_for_nothing(
    way: str, told: int, fused: bool
) -> None:
    habits_ = [habit for habit in watched(adversarial(way, fused)).habits if habit.what == "cleared gradients"]
    assert len(habits_) == told
    if told:
        assert (habits_[0].ms or 0.0) > 0


def test_gradients_that_are_put_aside_before_they_are_cleared_are_used() -> None:
    """As those of several losses that are made to agree with one another."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def loop() -> None:
        for _ in range(40):
            out, aside = net(torch.randn(8, 4)), []
            for loss in (out.pow(2).mean(), out.abs().mean()):
                optimizer.zero_grad()
                loss.backward(retain_graph=True)
                aside.append([value.grad.clone() for value in net.parameters() if value.grad is not None])
            for value, *both in zip(net.parameters(), *aside, strict=True):
                value.grad = both[0] + both[1]
            optimizer.step()

    assert "cleared gradients" not in {habit.what for habit in watched(loop).habits}


@pytest.mark.parametrize(("every", "told"), [(1, True), (5, False)])
def test_a_checkpoint_at_each_step_is_a_habit(every: int, told: bool, tmp_path: Path) -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def loop() -> None:
        for step in range(60):
            optimizer.zero_grad()
            net(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()
            if step % every == 0:
                torch.save(net.state_dict(), tmp_path / "last.pt")

    found = [habit for habit in watched(loop).habits if habit.what == "checkpoint"]
    assert [habit.per_step for habit in found] == [1.0] * told
    if told:
        line = inspect.getsourcelines(test_a_checkpoint_at_each_step_is_a_habit)[1]
        assert line < int(found[0].where.rpartition(":")[2]) < line + 16 and (found[0].ms or 0.0) > 0


def test_the_line_that_says_how_many_threads_there_are_is_known() -> None:
    before = torch.get_num_threads()

    def loop() -> None:
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        torch.set_num_threads(before)
        for _ in range(40):
            optimizer.zero_grad()
            net(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()

    threads = watched(loop).threads
    assert threads is not None and "test_retained_graphs.py" in threads.where
    assert not hasattr(torch.set_num_threads, "__wrapped__")


def test_threads_that_somebody_else_asks_for_are_at_no_line_of_the_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """As hotloop does where it runs a plan."""
    before = torch.get_num_threads()
    monkeypatch.setattr(call_sites, "is_library", lambda file: file.endswith("taking_part.py") or file != __file__)

    def loop() -> None:
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(40):
            exec(
                compile("torch.set_num_threads(threads)", "taking_part.py", "exec"), {"torch": torch, "threads": before}
            )
            optimizer.zero_grad()
            net(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()

    threads = watched(loop).threads
    assert threads is not None and threads.where == ""
