"""What forwards of modules on devices of their own may do, and what is refused in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.errors import DeviceError, MemoryExhausted, NonFiniteError, PlanError
from hotloop.lowering.transforms.placement import DeviceCopies
from hotloop.plan import Plan
from tests.lowering.test_cpu_plans import assert_equal_within_rounding
from tests.support.fake_device import Far, SecondDevice, second_device
from tests.support.programs import a_task, advance
from tests.support.tasks.model_families import family
from tests.support.tasks.placed_models import a_chain, come_to, distance, on


@pytest.fixture
def machine() -> Iterator[SecondDevice]:
    with second_device() as machine:
        yield machine


# --- what forwards do


class Layered(nn.Module):
    def __init__(self, inner: nn.Module, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 6), inner, nn.Linear(6, 3)
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.run(self, self.first(x)))


def layered(inner: Callable[[], nn.Module], forward: Callable[[Any, Tensor], Tensor]) -> hotloop.Task:
    return a_task(model=lambda: Layered(inner(), forward), validation=4)


def in_place(model: Any, x: Tensor) -> Tensor:
    y = x * 2
    model.inner(y)
    return y + x


def test_what_is_changed_in_place_there_is_changed_here_too(
    machine: SecondDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = layered(lambda: nn.ReLU(inplace=True), in_place)
    expected, there = come_to(task, Plan()), on({"inner": "far"})
    assert distance(come_to(task, there), expected) < 1e-6
    monkeypatch.setattr(DeviceCopies, "write_back", lambda self: None)
    assert distance(come_to(task, there), expected) > 1e-3


class Collecting(nn.Module):
    def forward(self, x: Tensor, found: list[Tensor]) -> None:
        found.append(x * 2)


def collected(model: Any, x: Tensor) -> Tensor:
    found: list[Tensor] = [x]
    model.inner(x, found)
    return sum(found)  # type: ignore[return-value]


def test_a_list_that_a_module_adds_to_is_refused_where_it_would_be_another(machine: SecondDevice) -> None:
    task = layered(Collecting, collected)
    come_to(task, on({"inner": "cpu"}))
    with pytest.raises(PlanError, match="'inner' changes a list or dict"):
        come_to(task, on({"inner": "far"}))


def test_a_packed_sequence_goes_there(machine: SecondDevice) -> None:
    seen: list[Any] = []

    class Looking(nn.Module):
        def forward(self, packed: Any, other: nn.Module) -> Tensor:
            seen.append(type(packed.data))
            seen.append(type(other.weight))  # type: ignore[arg-type]
            return packed.data

    def run(model: Any, x: Tensor) -> Tensor:
        return model.inner(nn.utils.rnn.pack_sequence([row[None] for row in x]), model.first)

    advance(hotloop.lower(layered(Looking, run), on({"inner": "far"})), 1)
    assert seen[-2] is Far and seen[-1] is nn.Parameter  # a module is no tensor, and stays


def test_a_parameter_that_is_used_past_its_module_is_named(machine: SecondDevice, tmp_path: Path) -> None:
    task = layered(lambda: nn.Linear(6, 6), lambda model, x: x @ model.inner.weight if model.training else x)
    with pytest.raises(DeviceError) as caught:
        hotloop.fit(task, run=tmp_path / "run", plan=on({"inner": "far"}), device="cpu", progress=False)
    assert "one operation has tensors on meta and cpu" in str(caught.value) and "all on one device" in str(caught.value)
    assert "Call a placed module, use neither its weights nor other methods" in str(caught.value)


def test_a_module_that_comes_to_nan_is_named(machine: SecondDevice, tmp_path: Path) -> None:
    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(x - 100)

    with pytest.raises(NonFiniteError, match=r"the output of 'inner' \(Log\) became NaN"):
        hotloop.fit(
            layered(Log, lambda model, x: model.inner(x) if torch.is_grad_enabled() else x),
            run=tmp_path / "run",
            plan=on({"inner": "far"}),
            device="cpu",
            progress=False,
        )


def test_a_lack_of_memory_names_all_devices(machine: SecondDevice, tmp_path: Path) -> None:
    class Full(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return x

    with pytest.raises(MemoryExhausted) as caught:
        task = layered(Full, lambda model, x: model.inner(x))
        hotloop.fit(task, run=tmp_path / "run", plan=on({"inner": "far"}), device="cpu", progress=False)
    message = str(caught.value)
    assert "ran out of memory on cpu or meta when it asked for 2.0 GiB" in message
    assert "free without the batch" in message and "place modules otherwise" in message


def test_a_failed_call_leaves_nothing_behind(machine: SecondDevice) -> None:
    broken = [True]

    def run(model: Any, x: Tensor) -> Tensor:
        return model.inner(x[:, :5] if broken and torch.is_grad_enabled() else x)

    program = hotloop.lower(layered(lambda: nn.Linear(6, 6), run), on({"inner": "far"}))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        advance(program, 1)
    [hook] = program.model.inner._forward_hooks.values()  # type: ignore[union-attr]
    assert hook.__self__._open_calls == []
    broken.clear()
    advance(program, 1)


@pytest.mark.more
def test_accumulated_pieces_are_placed_too(machine: SecondDevice) -> None:
    task = layered(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh()), lambda model, x: x + model.inner(x))
    plan = on({"inner": "far"}).with_axes(accumulation=2)
    assert distance(come_to(task, plan), come_to(task, Plan(accumulation=2))) < 1e-5


# --- what can't be


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden, self.scores = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False)
        self.scores.weight = self.words.weight
        self.act = self.hidden.act = nn.ReLU()
        self.more = nn.ParameterList([torch.zeros(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.act(self.hidden(self.words(x))))


REFUSED = {
    "a name": ({"wrods": "far"}, "placement names 'wrods', and the model has no such module; expected .*such as words"),
    "a name of nothing alike": ({"q": "far"}, "such as words, hidden, hidden.act"),
    "a parameter": ({"words.weight": "far"}, "no such module"),
    "one tensor in two places": ({"words": "far"}, "'words.weight' and 'scores.weight' share one tensor.*: on meta, and on cpu"),
    "one module in two places": ({"act": "far"}, "'hidden.act' and 'act' share one module|'act' and 'hidden.act' share one"),
    "what nobody calls": ({"more": "far"}, r"'more' \(ParameterList\), which has no forward"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_placed_is_refused_in_one_line(name: str, machine: SecondDevice) -> None:
    placement, says = REFUSED[name]
    x = torch.arange(24).reshape(12, 2) % 9
    with pytest.raises(PlanError, match=says) as caught:
        hotloop.lower(a_task(model=Tied, data=(x, x), step=lambda model, batch: model(batch[0]).sum()), on(placement))
    assert "\n" not in str(caught.value)


def test_shared_weights_in_one_place_stay_one(machine: SecondDevice) -> None:
    program, expected = (hotloop.lower(family("gpt"), plan) for plan in (on({"words": "far", "head": "far"}), Plan()))
    for one in (program, expected):
        advance(one, 6)
    assert program.model.words.weight is program.model.head.weight
    assert isinstance(program.model.words.weight, Far)
    assert_equal_within_rounding(program.state(), expected.state())


def test_a_device_that_is_not_there_is_one_line() -> None:
    with pytest.raises(PlanError, match=r"placement=0=cuda:7 can't be run here: there is no cuda:7 for '0'.* has cpu"):
        hotloop.lower(a_chain(), on({"0": "cuda:7"}))
