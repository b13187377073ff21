"""Modules on devices of their own: the result is that of one device, copies are made where they must be, and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.errors import DeviceError, MemoryExhausted, NonFiniteError, PlanError
from hotloop.evaluation import evaluate
from hotloop.lowering.placing import Copies, Places, Trip
from hotloop.measuring.clocks import peak_of_step
from hotloop.parity import prove
from hotloop.plan import Plan
from hotloop.rng import Streams
from hotloop.run import Run
from hotloop.state import State, differences, leaves
from tests.cpu.families import family
from tests.cpu.far import FAR, Far, SecondDevice, second_device
from tests.cpu.killing import train
from tests.cpu.programs import a_task, advance, labelled, through_file, trained
from tests.cpu.test_plans import assert_equal_within_rounding
from tests.resuming import disagreements

STEPS = 20
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@pytest.fixture
def machine() -> Iterator[SecondDevice]:
    with second_device() as machine:
        yield machine


class Encoder(nn.Module):
    """Takes tensors by name and within containers, and gives a dict of some; a batch norm, dropout, and a part inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.hidden, self.drop = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.3)
        self.inside = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor, others: Any, *, how: dict[str, Any]) -> dict[str, Any]:
        assert others[0] is x and others[1][0] is x
        x = self.drop(torch.relu(self.hidden(self.norm(x)))) * how["scale"]
        return {"deep": x + self.inside(x), "all": [x, (x, how["name"])]}


class Both(nn.Module):
    """Skips over placed modules and branches beside them, joined afterwards; a parameter that belongs to no other module."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.encoder = nn.Linear(6, 8), Encoder()
        # A bias before a norm would have no gradient but noise.
        self.blocks = nn.ModuleList(
            [nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU())]
        )
        self.branch = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.2))
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        found = self.encoder(x, (x, [x]), how={"scale": self.scale, "name": "encoder"})
        assert found["all"][0] is found["all"][1][0] and found["all"][1][1] == "encoder"
        x = x + found["deep"] + found["all"][0]
        for block in self.blocks:
            x = x + block(x)
        return self.head(torch.cat([x, self.branch(x)], 1))


def both(dtype: str = "fp64", **fields: Any) -> hotloop.Task:
    """Adam, clipping, an average of the weights; four batches of 5 and an incomplete one, and data to validate."""
    x, y = labelled()
    given: dict[str, Any] = dict(
        model=lambda: Both().to(DTYPES[dtype]),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        data=(x.to(DTYPES[dtype]), y),
        validation=4,
        clip_norm=0.5,
        average=0.9,
    )
    return a_task(**given | fields)


PLACED: dict[str, dict[str, str]] = {
    "a part of a part": {"encoder": "far", "encoder.inside": "cpu", "blocks.1.0": "far"},
    "a list": {"blocks": "far", "blocks.0": "cpu", "stem": "far"},
    "all": dict.fromkeys(("stem", "encoder", "blocks", "branch", "head"), "far"),
}


def on(placement: dict[str, str]) -> Plan:
    return Plan(placement=placement)


def come_to(task: hotloop.Task, plan: Plan) -> tuple[State, dict[str, float]]:
    """The State after 20 steps, and figures of the validation data."""
    program = hotloop.lower(task, plan)
    advance(program, STEPS)
    assert task.roles.validation is not None
    return program.state(), evaluate(program, task.roles.validation).values


@cache
def alone(dtype: str) -> tuple[State, dict[str, float]]:
    return come_to(both(dtype), Plan())


def distance(one: tuple[State, dict[str, float]], other: tuple[State, dict[str, float]]) -> float:
    """How far the tensor is off that is farthest, as a share of its size."""
    a, b = (
        {
            path: torch.as_tensor(value).double()
            for path, value in leaves([s.parameters, s.buffers, s.optimizer["state"], s.average, s.sums, figures])
        }
        for s, figures in (one, other)
    )
    if a.keys() != b.keys():
        return float("inf")
    return max(float((a[path] - b[path]).norm() / b[path].norm().clamp(min=1e-3)) for path in a)


@pytest.mark.parametrize("name", PLACED)
def test_it_comes_to_what_one_device_comes_to(name: str, machine: SecondDevice) -> None:
    found = {dtype: come_to(both(dtype), on(PLACED[name])) for dtype in DTYPES}
    assert machine.copies
    assert distance(found["fp64"], alone("fp64")) < 1e-10
    assert distance(found["fp32"], alone("fp64")) <= 4 * distance(alone("fp32"), alone("fp64"))


def off_by(placement: dict[str, str]) -> float:
    return distance(come_to(both(), on(placement)), alone("fp64"))


# What is planted, and how it shows: torch itself fails, or the result is another one.


def left_where_it_was(patch: pytest.MonkeyPatch) -> None:
    move = Places.move
    patch.setattr(Places, "move", lambda self, model: move(replace(self, named={"": self.named[""]}), model))


def inputs_not_moved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Trip, "go", lambda self, module, args, kwargs: self._under_way.append(Copies(self.there)))


def inputs_by_name_not_moved(patch: pytest.MonkeyPatch) -> None:
    go = Trip.go
    patch.setattr(Trip, "go", lambda self, module, args, kwargs: (go(self, module, args, kwargs)[0], kwargs))


def output_not_moved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Trip, "come", lambda self, module, args, output: None)


def all_comes_home_to_the_plan_s_device(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Places, "around", lambda self, name: self.named[""])


@pytest.mark.parametrize(
    "plant",
    [
        left_where_it_was,
        inputs_not_moved,
        inputs_by_name_not_moved,
        output_not_moved,
        all_comes_home_to_the_plan_s_device,
    ],
)
def test_what_is_in_the_wrong_place_is_caught(
    plant: Callable, machine: SecondDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(RuntimeError, match="found two devices"):
        come_to(both(), on(PLACED["a part of a part"]))


def test_a_copy_that_autograd_does_not_follow_is_caught(machine: SecondDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    of = Copies.of
    monkeypatch.setattr(Copies, "of", lambda self, tree: of(self, tree.detach() if isinstance(tree, Tensor) else tree))
    assert off_by({"stem": "far"}) > 1e-3


# --- where everything is


def test_each_tensor_is_where_its_module_is_and_the_optimizer_s_with_it(machine: SecondDevice) -> None:
    program = hotloop.lower(both(), on(PLACED["a part of a part"]))
    advance(program, 1)

    def far(name: str) -> bool:
        return name.startswith(("encoder.", "blocks.1.0.")) and not name.startswith("encoder.inside.")

    named = {**dict(program.model.named_parameters()), **dict(program.model.named_buffers())}
    assert {name: isinstance(value, Far) for name, value in named.items()} == {name: far(name) for name in named}
    names = {id(value): name for name, value in named.items()}
    for parameter, values in program.optimizer.state.items():
        assert isinstance(values["exp_avg"], Far) is far(names[id(parameter)])
    assert {name: isinstance(value, Far) for name, value in program.average.items()} == {
        name: far(name) for name in program.average
    }
    assert program.devices == (torch.device("cpu"), FAR)
    assert peak_of_step(program) is None  # of one of them it would be too little


def test_what_is_one_tensor_is_copied_once_and_nothing_is_copied_within_a_device(machine: SecondDevice) -> None:
    program = hotloop.lower(both(), on({"encoder": "far", "encoder.inside": "far"}))
    batch = program.parts.roles.validation.columns  # type: ignore[union-attr]
    with program.inference():
        machine.copies.clear()
        program.model(batch[0])
    rows = tuple(batch[0].shape[:1])
    # There the input, which comes in three places, and the scale; back two results, one of them in two places.
    assert machine.copies == [((*rows, 8), "far"), ((8,), "far"), ((*rows, 8), "near"), ((*rows, 8), "near")]


def test_each_part_goes_straight_to_its_device(machine: SecondDevice) -> None:
    task = a_task(model=lambda: nn.Sequential(nn.Linear(6, 7), nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))))
    hotloop.lower(task, on({"1": "far", "1.1": "cpu"}))
    assert machine.copies == [((5, 7), "far"), ((5,), "far")]


def test_devices_draw_numbers_of_their_own_by_the_step_alone(machine: SecondDevice) -> None:
    task, plan = both(), on(PLACED["all"])
    program = hotloop.lower(task, plan)
    machine.seeds.clear()
    advance(program, 3)
    seeds = list(machine.seeds)
    assert len(set(seeds)) == 3
    assert torch.initial_seed() not in seeds
    machine.seeds.clear()
    program.restore(program.state())
    advance(program, 1)
    again = hotloop.lower(task, plan)
    again.restore(program.state())
    advance(again, 1)
    assert len(set(machine.seeds)) == 2 and not set(machine.seeds) & set(seeds)
    machine.seeds.clear()
    advance(hotloop.lower(task, plan), 3)
    assert machine.seeds == seeds


def test_an_evaluation_seeds_them_too(machine: SecondDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    program = hotloop.lower(both(), on(PLACED["all"]))
    assert program.parts.roles.validation is not None
    machine.seeds.clear()
    evaluate(program, program.parts.roles.validation)
    assert len(machine.seeds) == 1
    streams = Streams(program.parts.task.seed, *program.devices)
    streams.reseed("evaluate", 0)
    assert machine.seeds[0] == machine.seeds[1]


# --- State


def chain() -> nn.Module:
    """Without sums of several gradients, whose order copies may change."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))


def a_chain(**fields: Any) -> hotloop.Task:
    adam = dict(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True))
    return a_task(**adam | dict(model=chain, validation=4, average=0.9, epochs=3) | fields)


ELSEWHERE = on({"1": "far", "4": "far"})


def test_a_training_goes_on_bitwise_with_another_placement_and_with_none(machine: SecondDevice) -> None:
    expected = hotloop.lower(a_chain())
    advance(expected, 9)
    state = None
    for plan in (Plan(), ELSEWHERE, on({"0": "far"}), Plan()):
        program = hotloop.lower(a_chain(), plan)
        if state is not None:
            program.restore(through_file(state))
            assert differences(program.state(), state) == []
        advance(program, 2)
        state = program.state()
    assert state is not None and state.position.step == 8
    advance(program, 1)
    assert differences(program.state(), expected.state()) == []


def test_a_run_is_evaluated_stopped_killed_and_gone_on_with(machine: SecondDevice, tmp_path: Path) -> None:
    task = a_chain(test=labelled(12))
    whole = trained(task, tmp_path / "whole")
    placed = tmp_path / "placed"
    assert train(placed, task, plan=ELSEWHERE, until=7) is None
    train(placed, task)
    assert Run.open(placed).plan == ELSEWHERE.with_axes(device="cpu")
    assert machine.copies
    assert disagreements(whole.path, placed) == []
    here: dict[str, Any] = dict(task=task, device="cpu")
    answers = [hotloop.predict(run, labelled(12)[0], **here) for run in (placed, whole)]
    assert (answers[0] == answers[1]).all()
    figures = [hotloop.evaluate(run, **here).loss for run in (placed, whole)]
    assert figures[0] == figures[1]


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
    monkeypatch.setattr(Copies, "write_back", lambda self: None)
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
    assert "tensors on meta and cpu meet" in str(caught.value) and "all on one device" in str(caught.value)
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
    assert hook.__self__._under_way == []
    broken.clear()
    advance(program, 1)


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
    "one tensor in two places": ({"words": "far"}, "'words.weight' and 'scores.weight' are one tensor.*: on meta, and on cpu"),
    "one module in two places": ({"act": "far"}, "'hidden.act' and 'act' are one module|'act' and 'hidden.act' are one"),
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


# --- on one device


def test_where_all_is_on_one_device_nothing_changes() -> None:
    plan = on({"encoder": "cpu", "blocks": "cpu", "head": "cpu"})
    parity = prove(both("fp32"), plan)
    assert (parity.parity, parity.plan) == ("bitwise", "placement=blocks=cpu,encoder=cpu,head=cpu")
    program = hotloop.lower(both("fp32"), plan)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in program.model.modules())
    assert program.devices == (torch.device("cpu"),)


def still() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def test_a_proof_compares_it_with_one_device(machine: SecondDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.parity.running.STEPS", 2)
    brief = dict(epochs=1, batch_size=12)
    assert prove(a_chain(model=still, **brief), on({"0": "far"})).parity == "bitwise"
    drawing = prove(a_chain(**brief), on({"2": "far"}))
    assert drawing.parity == "unproven" and "draws random numbers on several devices" in drawing.reason
