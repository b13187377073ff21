"""What a script's own modes, hooks and tensors hear of torch under a watch is what they hear alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hotloop.profiler.session import make_observers
from tests.support.profiler.profiled_steps import watched

STEPS, MEASURED = 40, 8
Heard = list[Any]


@contextmanager
def function_mode(heard: Heard) -> Iterator[None]:
    class Noting(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            heard.append(func)
            return func(*args, **(kwargs or {}))

    with Noting():
        yield


@contextmanager
def dispatch_mode(heard: Heard) -> Iterator[None]:
    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            heard.append(func)
            return func(*args, **(kwargs or {}))

    with Noting():
        yield


@contextmanager
def global_hooks(heard: Heard) -> Iterator[None]:
    handles = [
        register_module_forward_hook(lambda module, inputs, output: heard.append(type(module))),
        register_module_full_backward_pre_hook(lambda module, gradients: heard.append(type(module).__name__)),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def train(heard: Heard) -> None:
    """With a forward before each that counts, so that what networks are given is compared."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(STEPS):
        heard.append(step)
        batch = torch.ones(8, 4, requires_grad=True).to("cpu")
        net.eval()
        with torch.no_grad():
            net(batch)
        net.train()
        loss = F.mse_loss(net(batch), torch.zeros(8, 4).copy_(batch))
        loss.detach().item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def of_both(run: Callable[[Heard], None]) -> tuple[Heard, Heard]:
    """What is heard of a loop alone, and under a watch."""
    alone: Heard = []
    run(alone)
    under: Heard = []
    watched(lambda: run(under), steps=MEASURED, observers=lambda watch: make_observers(watch, None))
    return alone, under


@pytest.mark.parametrize("listening", [function_mode, dispatch_mode, global_hooks], ids=lambda one: one.__name__)
def test_modes_and_global_hooks_hear_nothing_of_the_watch(
    listening: Callable[[Heard], AbstractContextManager[None]],
) -> None:
    def run(heard: Heard) -> None:
        with listening(heard):
            train(heard)

    alone, under = of_both(run)
    assert len(alone) > 3 * STEPS
    assert under == alone


def test_tensors_of_a_class_of_their_own_hear_the_functions_that_torch_has() -> None:
    """As torchvision's, which stay what they are under the functions of a table alone."""
    heard: Heard = []

    class Noting(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            heard.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    def run(into: Heard) -> None:
        net = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(STEPS):
            into += [torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.copy_, torch.Tensor.item, torch.Tensor.tolist]
            batch = torch.zeros(8, 4).as_subclass(Noting).to("cpu").cpu().copy_(torch.ones(8, 4))
            batch.sum().item()
            batch.tolist()
            loss = net(batch).pow(2).mean()
            loss.backward()
            optimizer.step()
            into += heard
            heard.clear()

    alone, under = of_both(run)
    assert torch.Tensor.to in alone
    assert under == alone


def test_parameters_without_a_shape_can_be_moved() -> None:
    """They take the very functions that torch had when it was imported, and no other."""

    def run(heard: Heard) -> None:
        net = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(STEPS):
            lazy = nn.LazyLinear(4).to("cpu")
            heard.append(type(lazy.weight))
            net(lazy(torch.ones(8, 4))).pow(2).mean().backward()
            optimizer.step()

    alone, under = of_both(run)
    assert under == alone


def test_inputs_whose_numbers_lie_elsewhere_are_told_apart_without_them() -> None:
    """Such as those of a distributed tensor, of which one rank alone must not ask."""
    asked: Heard = []

    class Elsewhere(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func)
            return func(*(arg.held if isinstance(arg, Elsewhere) else arg for arg in args), **(kwargs or {}))

    def run(heard: Heard) -> None:
        net = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(STEPS):
            batch: Any = Tensor._make_wrapper_subclass(Elsewhere, (8, 4))
            batch.held = torch.ones(8, 4)
            net(batch).pow(2).mean().backward()
            optimizer.step()
            heard += asked
            asked.clear()

    alone, under = of_both(run)
    assert alone
    assert under == alone
