"""What Python does beside a step's tensors is refused where a compiled step would do it once, and else trains as eagerly."""

from __future__ import annotations

import importlib
import itertools
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotloop
from hotloop.plan import Plan
from tests.support import programs
from tests.support.eager_comparison import Layer, assert_trains_as_eagerly, refusal
from tests.support.programs import a_task, advance, state_after


class CountingInADict(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.counts = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.counts["calls"] += 1
        return self.layer(x) * (2 if self.counts["calls"] > 1000 else 1)


class CountingInAList(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        return self.layer(x) * (2 if len(self.seen) > 1000 else 1)


class CountingInAnObject(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.course = SimpleNamespace(calls=0)

    def forward(self, x: Tensor) -> Tensor:
        self.course.calls += 1
        return self.layer(x) * (2 if self.course.calls > 1000 else 1)


class DrawingItsOwn(Layer):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (2 if self.generator.random() > 2 else 1)


CALLS = {"calls": 0}


def counting_step(model: nn.Module, batch: Any) -> Tensor:
    CALLS["calls"] += 1
    return F.cross_entropy(model(batch[0]), batch[1]) * (2 if CALLS["calls"] > 1000 else 1)


class Trainer:
    calls = 0

    def step(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        return F.cross_entropy(model(batch[0]), batch[1]) * (2 if self.calls > 1000 else 1)


TOTAL = 0


class CountingInAGlobal(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.factor()

    def factor(self) -> int:
        global TOTAL
        TOTAL += 1
        return 2 if TOTAL > 1000 else 1


class CountingInItsClass(Layer):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return self.layer(x) * (2 if self.calls > 1000 else 1)


class CountingByAnIterator(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.turns = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (2 if next(self.turns) > 1000 else 1)


class CountingLoss(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        CALLS["calls"] += 1
        return F.cross_entropy(output, target) * (2 if CALLS["calls"] > 1000 else 1)


def counting_hook(module: nn.Module, given: Any, output: Tensor) -> Tensor:
    CALLS["calls"] += 1
    return output * (2 if CALLS["calls"] > 1000 else 1)


def hooked() -> nn.Module:
    model = nn.Linear(6, 3)
    model.register_forward_hook(counting_hook)
    return model


@dataclass(slots=True)
class Course:
    calls: int = 0


COURSE = Course()


def counting_in_a_slot(model: nn.Module, batch: Any) -> Tensor:
    COURSE.calls += 1
    return F.cross_entropy(model(batch[0]), batch[1]) * (2 if COURSE.calls > 1000 else 1)


def counting_in_a_file(model: nn.Module, batch: Any) -> Tensor:
    programs.calls = getattr(programs, "calls", 0) + 1  # type: ignore[attr-defined]
    return F.cross_entropy(model(batch[0]), batch[1]) * (2 if programs.calls > 1000 else 1)  # type: ignore[attr-defined]


def counting_further_in(model: nn.Module, batch: Any) -> Tensor:
    def factor() -> int:
        CALLS["calls"] += 1
        return 2 if CALLS["calls"] > 1000 else 1

    return F.cross_entropy(model(batch[0]), batch[1]) * factor()


def counting_in_a_default(model: nn.Module, batch: Any, seen: list[int] = []) -> Tensor:  # noqa: B006
    seen.append(1)
    return F.cross_entropy(model(batch[0]), batch[1]) * (2 if len(seen) > 1000 else 1)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model": CountingInADict}, "the attribute 'counts.calls' of the model"),
        ({"model": CountingInAList}, "the attribute 'seen."),
        ({"model": CountingInAnObject}, "the attribute 'course.calls' of the model"),
        ({"model": lambda: DrawingItsOwn(random.Random(1))}, "the attribute 'generator' of the model"),
        ({"model": lambda: DrawingItsOwn(np.random.default_rng(1))}, "the attribute 'generator.state."),
        ({"step": counting_step}, "'CALLS.calls', outside of the step"),
        ({"step": partial(counting_step)}, "'func.CALLS.calls', outside of the step"),
        ({"step": Trainer().step}, "'self.calls', outside of the step"),
        ({"model": CountingInAGlobal}, "'CountingInAGlobal.factor().TOTAL', outside of the model"),
        ({"model": CountingInItsClass}, "the attribute 'CountingInItsClass.calls' of the model"),
        ({"model": CountingByAnIterator}, "the attribute 'turns' of the model"),
        ({"loss": CountingLoss()}, "'CountingLoss.forward().CALLS.calls', outside of the loss"),
        ({"model": hooked}, ".CALLS.calls' of the model"),
        ({"step": counting_in_a_slot}, "'COURSE.calls', outside of the step"),
        ({"step": counting_in_a_file}, "'programs.calls', outside of the step"),
        ({"step": counting_further_in}, "'CALLS.calls', outside of the step"),
        ({"step": counting_in_a_default}, "'seen."),
    ],
)
def test_a_count_of_pythons_is_refused_wherever_it_stands(fields: dict[str, Any], says: str) -> None:
    assert says in refusal(**fields)


LIBRARY = """
import torch

CALLS = 0

class Counter:
    calls = 0

def tanh(x):
    global CALLS
    CALLS, Counter.calls = CALLS + 1, Counter.calls + 1
    return x.tanh()

def loss(output, target):
    return torch.nn.functional.cross_entropy(tanh(output), target)
"""


def test_what_an_installed_package_counts_by_itself_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "a_library_that_counts.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder)
    library = importlib.import_module("a_library_that_counts")
    tanh, counter = library.tanh, library.Counter

    class Calling(Layer):
        def forward(self, x: Tensor) -> Tensor:
            assert counter.calls == library.CALLS
            return tanh(self.layer(x))

    assert "'tanh.CALLS', outside of the loss" in refusal(loss=library.loss)  # it is what the user trains
    assert_trains_as_eagerly(model=Calling)


class Yogi(torch.optim.Optimizer):
    """Adam as it is written by hand, which counts in a number of its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for value in group["params"]:
                state = self.state[value]
                if not state:
                    state["step"], state["mean"] = 0, torch.zeros_like(value)
                state["step"] += 1
                state["mean"].lerp_(value.grad, 0.1)
                value.add_(state["mean"], alpha=-group["lr"] / (1 - 0.9 ** min(state["step"], 2)))


class Late(Yogi):
    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        Late.calls += 1
        for value in self.param_groups[0]["params"]:
            value.sub_(value.grad, alpha=0.1)
            if Late.calls > 2:
                self.state[value]["mean"] = torch.zeros_like(value)


class Slow(torch.optim.SGD):
    """Looks at the clock of its own every so many steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.turn = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.turn += 1
        if self.turn % 5:
            super().step()


class Counting(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.state["steps"] = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["steps"] += 1
        super().step()


class Around(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        self.base = torch.optim.Adam(parameters, lr=0.1)
        super().__init__(self.base.param_groups, {})
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


class OutOfPlace(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for value in group["params"]:
                value.data = value.data - group["lr"] * value.grad


@pytest.mark.parametrize(
    ("optimizer", "says", "instead"),
    [
        (Yogi, "the optimizer changes its own 'step' of ", "compile=forward"),
        (Late, "the optimizer changes its own 'state' of ", "compile=forward"),
        (Slow, "the optimizer changes its own 'turn'", "compile=none"),
        (Counting, "the optimizer changes its own 'state' of 'steps'", "compile=forward"),
        (Around, "the optimizer changes its own 'base'", "compile=none"),
        (OutOfPlace, "the optimizer gives a parameter other memory", "compile=forward"),
    ],
)
def test_what_an_optimizer_does_in_python_is_refused(optimizer: Any, says: str, instead: str) -> None:
    line = refusal(optimizer=optimizer)
    assert says in line and f"choose {instead}" in line.lower()


@pytest.mark.parametrize("optimizer", [Yogi, OutOfPlace])
def test_what_an_optimizer_does_outside_of_what_is_compiled_is_as_it_is_eagerly(optimizer: Any) -> None:
    program = hotloop.lower(a_task(optimizer=optimizer), Plan(compile="forward"))
    advance(program, 4)
    assert program.compiled_steps
    torch.testing.assert_close(program.state().parameters, state_after(a_task(optimizer=optimizer), 4).parameters)
