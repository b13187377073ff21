"""The module clock, with a clock that only moves where a test says so: who gets the time is then known exactly."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

import hotloop.profiler.timers.modules
from hotloop.profiler.timers.module_names import ModuleNames
from hotloop.profiler.timers.modules import ModuleCallHooks, ModuleClock
from tests.support.profiler.manual_clock import HANDS, Block, Layer, Slow, measured, ms, ones, own_ms


def block_step() -> Callable[[], Any]:
    model = Block()
    return lambda: Slow.apply(model(ones()), 7, 5000).sum().backward()


def check_block() -> None:
    found = measured(block_step())
    assert own_ms(found) == {"": (300, 3000), "first": (1, 20), "second": (3, 40), "(loss)": (0, 5000)}
    assert ms(found) == {"": (304, 3060), "first": (1, 20), "second": (3, 40), "(loss)": (0, 5000)}


def test_each_module_gets_its_own_time_and_a_parent_what_is_left() -> None:
    check_block()


def test_calls_kinds_and_shares() -> None:
    found = measured(block_step())
    assert {name: (one.kind, one.calls) for name, one in found.items()} == {
        "": ("Block", 1),
        "first": ("Layer", 1),
        "second": ("Layer", 1),
        "(loss)": ("", 0),
    }
    assert found[""].share == pytest.approx(3364 / (3364 + 5000))


def wrong_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hotloop.profiler.timers.modules, "bisect_right", lambda numbers, number: 1)


def no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModuleClock, "_hook", lambda self, roots: (None, []))


def never_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModuleClock, "leave", lambda self, before: None)


@pytest.mark.parametrize("plant", [wrong_owner, no_hooks, never_back])
def test_a_planted_fault_is_seen(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_block()


@dataclass
class Answer:
    logits: Tensor
    hidden: list[Tensor]


class Odd(nn.Module):
    """Calls one layer twice, one from a list, one under two names, and answers with what isn't a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = Layer(1, 10)
        self.many = nn.ModuleList([Layer(2, 20), Layer(4, 40)])
        self.same = self.twice
        self.unused = Layer(9, 90)

    def forward(self, x: Tensor) -> Answer:
        x = self.same(self.twice(x))
        hidden = [layer(x) for layer in self.many]
        return Answer(hidden[1], hidden)


def test_modules_called_twice_in_lists_and_under_two_names() -> None:
    model = Odd()

    def step() -> None:
        answer = model(ones())
        (answer.logits.sum() + answer.hidden[0].sum()).backward()

    found = measured(step)
    assert ms(found) == {
        "": (8, 80),
        "twice": (2, 20),
        "many": (6, 60),
        "many.0": (2, 20),
        "many.1": (4, 40),
    }
    assert [found[name].calls for name in ("twice", "many", "many.0")] == [2, 0, 1]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(1, 10)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = Slow.apply(self.layer(x), 5, 50)
        return self(x, depth - 1) if depth else x


def test_a_module_that_calls_itself() -> None:
    model = Nested()
    found = measured(lambda: model(ones()).sum().backward())
    assert own_ms(found) == {"": (15, 150), "layer": (3, 30)}
    assert found[""].calls == 3


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.before, self.inside = Layer(1, 10), Block()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, self.before(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_checkpointing_computes_again_is_backward_of_that_module(reentrant: bool) -> None:
    model = Checkpointed(reentrant=reentrant)
    found = measured(lambda: model(ones()).sum().backward())
    assert ms(found)["before"] == (1, 10)
    assert ms(found)["inside.first"] == (1, 20 + 1)
    forward, backward = own_ms(found)["inside"]
    # Without reentrance the last part is not computed again: all that backward needs is there before it.
    assert (forward, backward) in [(300, 3000 + 300), (300, 3000 + 200)]
    assert found["inside"].calls == 1


def test_several_backwards_in_a_step_count_together() -> None:
    model = Block()

    def step() -> None:
        loss = model(ones()).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        torch.autograd.grad(model(ones()).sum(), model.first.weight)

    assert ms(measured(step))["second"] == (6, 120)


def test_a_gradient_of_a_gradient_belongs_to_the_module() -> None:
    model = nn.Sequential(Layer(1, 10))
    x = ones()

    def step() -> None:
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (slope**2).sum().backward()

    found = measured(step)
    assert found["0"].own_backward_ms is not None and found["0"].own_backward_ms >= 10


def test_several_models_go_by_their_variables() -> None:
    generator, critic = Block(), Layer(1, 10)
    criterion = nn.MSELoss()

    def step() -> None:
        criterion(critic(generator(ones())), torch.ones(3)).backward()

    assert set(measured(step)) == {"generator", "generator.first", "generator.second", "critic", "(loss)"}


class Coder(nn.Module):
    """Its own forward is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Layer(1, 10), Layer(2, 20)

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)


def test_modules_called_past_their_model_keep_their_place_in_it() -> None:
    model = Coder()
    found = measured(lambda: model.decoder(model.encode(ones())).sum().backward())
    assert ms(found) == {"": (3, 30), "encoder": (1, 10), "decoder": (2, 20)}
    assert found[""].calls == 0 and found[""].kind == "Coder"


class Maker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(1, 10)

    def forward(self, x: Tensor) -> Tensor:
        return Layer(2, 20)(self.layer(x))


def test_modules_made_in_every_step_share_one_name_and_fill_no_memory() -> None:
    model = Maker()
    clock = ModuleClock(now=HANDS, handover_ns=(0.0, 0.0))
    for _ in range(20):
        clock.begin()
        model(ones()).sum().backward()
        clock.end()
    assert {one.name: one.forward_ms for one in clock.times(None)} == {"": 3, "layer": 1, "(Layer)": 2}
    assert len(clock._owners) == 2


def test_what_the_engine_does_at_the_end_of_a_pass_is_not_the_last_modules() -> None:
    model = Block()
    clear_away = partial(Variable._execution_engine.queue_callback, partial(HANDS.move, 700_000))
    model.first.weight.register_hook(lambda gradient: clear_away())
    found = own_ms(measured(lambda: Slow.apply(model.second(model.first(ones())), 7, 5000).sum().backward()))
    assert (found["first"], found["(loss)"]) == ((1, 20), (0, 705_000))


def test_without_any_module_the_backward_has_a_name_too() -> None:
    weight = torch.ones(3, requires_grad=True)
    found = measured(lambda: Slow.apply(weight, 1, 10).sum().backward())
    assert ms(found) == {"(functional)": (0, 10)}


def test_a_module_of_some_steps_counts_by_its_share() -> None:
    often, seldom, steps = Layer(1, 10), Layer(4, 40), iter(range(4))

    def step() -> None:
        often(ones()).sum().backward()
        if next(steps) % 4 == 0:
            seldom(ones()).sum().backward()

    found = measured(step, steps=4)
    assert (found["seldom"].forward_ms, found["seldom"].calls) == (1, 0.25)


def test_an_error_in_a_forward_is_the_scripts_own_and_the_clock_goes_on() -> None:
    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("mine")

    model, broken = Block(), nn.Sequential(Breaks())

    def step() -> None:
        with pytest.raises(ValueError, match="mine"):
            broken(ones())
        model(ones()).sum().backward()

    assert ms(measured(step))["model" if "model" in measured(step) else ""] == (304, 3060)


def test_another_threads_modules_are_left_alone() -> None:
    from threading import Thread

    model = Layer(1, 10)

    def step() -> None:
        thread = Thread(target=model, args=(torch.ones(3),))
        thread.start()
        thread.join()

    assert measured(step) == {}


def trained(watched: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model[4].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    clock = ModuleClock()
    for _ in range(5):
        if watched:
            clock.begin()
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        if watched:
            clock.end()
    return [value.detach() for value in model.state_dict().values()] + [torch.rand(3)]


def test_results_are_bitwise_those_without_the_clock() -> None:
    for one, other in zip(trained(True), trained(False), strict=True):
        assert torch.equal(one, other)


def leavings() -> list[str]:
    call, run = nn.Module.__call__, torch.autograd._engine_run_backward
    model = Block()
    clock = ModuleClock()
    clock.begin()
    out = model(ones())
    loss = out.sum()
    loss.backward(retain_graph=True)
    clock.end()
    left = []
    if nn.Module.__call__ is not call or torch.autograd._engine_run_backward is not run:
        left.append("replaced functions")
    before = clock.times(None)
    loss.backward()
    if clock.times(None) != before:
        left.append("hooks")
    dead = [weakref.ref(out), weakref.ref(loss), weakref.ref(model)]
    del out, loss, model
    gc.collect()
    if any(ref() is not None for ref in dead):
        left.append("tensors")
    return left


def test_nothing_is_left_after_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert leavings() == []


def test_what_is_left_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    call, run = nn.Module.__call__, torch.autograd._engine_run_backward
    with monkeypatch.context() as planted:
        planted.setattr(ModuleCallHooks, "close", lambda self: None)
        assert "replaced functions" in leavings()
    nn.Module.__call__ = call  # type: ignore[method-assign]
    torch.autograd._engine_run_backward = run
    with monkeypatch.context() as planted:
        kept: list[Any] = []
        planted.setattr(ModuleNames, "name", lambda self, places: kept.extend([place.module for place in places]))
        with pytest.raises(AssertionError):
            assert leavings() == []


def test_somebody_elses_replacement_is_left_in_place() -> None:
    call = nn.Module.__call__
    clock = ModuleClock()
    clock.begin()
    mine = nn.Module.__call__

    def theirs(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return mine(module, *args, **kwargs)

    nn.Module.__call__ = theirs  # type: ignore[method-assign]
    try:
        clock.end()
        assert nn.Module.__call__ is theirs
        assert torch.equal(nn.Identity()(torch.ones(3)), torch.ones(3))
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]


@pytest.mark.slow
def test_compiled_modules_are_not_compiled_again() -> None:
    import torch._dynamo

    torch._dynamo.reset()
    plain, compiled = Odd(), nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    inside = torch.compile(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), backend="aot_eager")
    compiled.compile(backend="aot_eager")

    def step() -> None:
        inside(compiled(torch.ones(2, 3))).sum().backward()
        plain(ones()).logits.sum().backward()

    step()
    before = dict(torch._dynamo.utils.counters["stats"])
    found = measured(step)
    step()
    assert dict(torch._dynamo.utils.counters["stats"]) == before
    assert {"inside", "compiled", "plain.twice"} <= set(found)


def test_what_is_kept_of_a_step_that_goes_on_and_on_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.profiler.timers.modules._MAX_SWITCHES", 10)
    net, clock = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), ModuleClock()
    clock.begin()
    for _ in range(20):
        net(torch.ones(2, 4)).sum().backward()
    assert all(len(numbers) == len(owners) <= 10 for numbers, owners in clock._made.values())
    clock.end()
    tanh = next(module for module in clock.times(None) if module.name == "1")
    assert tanh.calls == 20 and tanh.backward_ms > 0
