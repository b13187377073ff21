"""What stands in place of a function is known, called and nested as the function itself is."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn

from hotloop.core.patches import Patches
from hotloop.profiler.base import transparency
from hotloop.profiler.base.transparency import RecursionHeadroom, RecursionHeadrooms
from hotloop.profiler.hooks.torch_hooks import with_callbacks
from hotloop.profiler.session import make_observers
from tests.support.profiler.profiled_steps import watched

LIMIT = sys.getrecursionlimit()


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever watches earlier tests have left open."""
    monkeypatch.setattr(transparency, "_HEADROOMS", RecursionHeadrooms())
    sys.setrecursionlimit(LIMIT)
    yield
    assert sys.getrecursionlimit() == LIMIT
    sys.setrecursionlimit(LIMIT)


def trained(net: nn.Module, *inputs: Any, steps: int = 80, **named: Any) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def loop() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            net(torch.randn(4, 8), *inputs, **named).square().mean().backward()
            optimizer.step()

    assert watched(loop, observers=lambda watch: make_observers(watch, None)).modules


hear = with_callbacks(lambda: True, lambda args, kwargs: None, lambda *ended: None)

FUNCTIONS: list[tuple[Any, str]] = [
    (torch, "save"),
    (torch, "kl_div"),
    (torch._C._nn, "mse_loss"),
    (torch.distributed, "all_reduce"),
    (torch.accelerator, "synchronize"),
    (torch.autograd, "_engine_run_backward"),
    (nn.Module, "train"),
]


@pytest.mark.parametrize(("owner", "name"), FUNCTIONS, ids=lambda one: one if isinstance(one, str) else "")
def test_what_stands_in_place_of_a_function_is_pickled_by_its_name(owner: Any, name: str) -> None:
    original, patches = getattr(owner, name), Patches()
    patches.patch(owner, name, hear)
    try:
        patches.patch(owner, name, hear)  # as the step that is watched closely does
        heard = getattr(owner, name)
        texts = [pickle.dumps(partial(heard, 1), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
        assert heard is not original and not any(b"hotloop" in text for text in texts)
    finally:
        patches.undo()
    assert all(pickle.loads(text).func == original for text in texts)


def test_it_is_pickled_still_when_it_stands_there_no_more() -> None:
    assert pickle.loads(pickle.dumps(hear(torch.save))) is torch.save


def test_what_cannot_be_pickled_says_so_as_alone() -> None:
    write = io.TextIOWrapper(io.BytesIO()).write
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(hear(write))


@pytest.mark.more
def test_another_process_saves_what_a_loop_hands_to_it(tmp_path: Path) -> None:
    net = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def loop() -> None:
        for step in range(20):
            net(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            if step == 10:
                pool.submit(torch.save, {"step": step}, tmp_path / "state.pt").result()

    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        watched(loop)
    assert torch.load(tmp_path / "state.pt") == {"step": 10}


def test_it_looks_like_the_function() -> None:
    heard = hear(torch.save)
    for of in (inspect.signature, inspect.getdoc, inspect.getsource):
        assert of(heard) == of(torch.save)
    assert (heard.__name__, heard.__module__, heard.__defaults__) == ("save", torch.save.__module__, None)
    assert copy.copy(heard) is copy.deepcopy(heard) is heard and repr(heard).startswith("<function save at")

    class Saver:
        save, kl_div = hear(lambda self, value: value), hear(torch.kl_div)
        bound = heard

    assert Saver().save(3) == 3 and Saver().bound.__self__.__class__ is Saver
    assert Saver().kl_div(torch.ones(2), torch.ones(2)).shape == (2,)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"text": nn.Linear(8, 2), "image": nn.Linear(8, 2)})

    def forward(self, x: Tensor, module: str = "text", **others: Any) -> Tensor:
        return self.parts[module](x)


def test_arguments_may_have_any_name() -> None:
    trained(Parts(), module="image", call=1, args=2, kwargs=3, original=4, self_=5, tensor=6)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(8, 8)

    def forward(self, x: Tensor, left: int) -> Tensor:
        return self(torch.tanh(self.cell(x)), left - 1) if left else x


def deepest(net: nn.Module) -> int:
    """As deep as it may go from here."""
    fits, fails = 1, LIMIT
    while fails - fits > 1:
        middle = (fits + fails) // 2
        try:
            with torch.no_grad():
                net(torch.randn(4, 8), middle)
            fits = middle
        except RecursionError:
            fails = middle
    return fits


@pytest.mark.more
def test_modules_that_call_themselves_go_as_deep_as_alone() -> None:
    net = Chain()
    trained(net, deepest(net) * 9 // 10)


def test_too_little_room_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transparency.RecursionHeadroom, "make", lambda self: None)
    net = Chain()
    with pytest.raises(RecursionError):
        trained(net, deepest(net) * 9 // 10)


def test_rooms_are_given_back_in_any_order() -> None:
    first, second = RecursionHeadroom(), RecursionHeadroom()
    for room_ in (first, second):
        room_.make()
    first.give_back()
    assert LIMIT < sys.getrecursionlimit() < 2 * LIMIT
    second.give_back()
    assert sys.getrecursionlimit() == LIMIT


def test_a_limit_that_the_script_has_set_stays() -> None:
    first, second = RecursionHeadroom(), RecursionHeadroom()
    first.make()
    second.make()
    first.make()
    assert sys.getrecursionlimit() == 2 * LIMIT
    second.give_back()
    second.give_back()
    sys.setrecursionlimit(5 * LIMIT)
    first.give_back()
    assert sys.getrecursionlimit() == 5 * LIMIT
    sys.setrecursionlimit(2**31 - 1)
    first.make()
    first.give_back()
    assert sys.getrecursionlimit() == 2**31 - 1
    sys.setrecursionlimit(LIMIT)
