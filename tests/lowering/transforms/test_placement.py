"""Modules on devices of their own: the result is that of one device, copies are made where they must be, and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.core.random.rng import RandomStreams
from hotloop.core.state import differing_paths
from hotloop.lowering.evaluation import evaluate
from hotloop.lowering.transforms.placement import DeviceCopies, DeviceTrip, ModulePlaces
from hotloop.parity.proof import prove
from hotloop.plan import Plan
from hotloop.training.run import Run
from hotloop.tuning.races.runner import measure_peak_memory
from tests.support.fake_device import FAR, Far, SecondDevice, second_device
from tests.support.killed_training import train
from tests.support.processes.resumed_training import disagreements
from tests.support.programs import a_task, advance, labelled, through_file, trained
from tests.support.tasks.placed_models import DTYPES, a_chain, alone, both, come_to, distance, on


@pytest.fixture
def machine() -> Iterator[SecondDevice]:
    with second_device() as machine:
        yield machine


PLACED: dict[str, dict[str, str]] = {
    "a part of a part": {"encoder": "far", "encoder.inside": "cpu", "blocks.1.0": "far"},
    "a list": {"blocks": "far", "blocks.0": "cpu", "stem": "far"},
    "all": dict.fromkeys(("stem", "encoder", "blocks", "branch", "head"), "far"),
}


@pytest.mark.few("a list")
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
    move = ModulePlaces.move
    patch.setattr(
        ModulePlaces, "move", lambda self, model: move(replace(self, named_modules={"": self.named_modules[""]}), model)
    )


def inputs_not_moved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        DeviceTrip, "move_inputs", lambda self, module, args, kwargs: self._open_calls.append(DeviceCopies(self.there))
    )


def inputs_by_name_not_moved(patch: pytest.MonkeyPatch) -> None:
    go = DeviceTrip.move_inputs
    patch.setattr(
        DeviceTrip, "move_inputs", lambda self, module, args, kwargs: (go(self, module, args, kwargs)[0], kwargs)
    )


def output_not_moved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceTrip, "move_outputs", lambda self, module, args, output: None)


def all_comes_home_to_the_plan_s_device(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ModulePlaces, "run_across_devices", lambda self, name: self.named_modules[""])


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
    of = DeviceCopies.copy_of
    monkeypatch.setattr(
        DeviceCopies, "copy_of", lambda self, tree: of(self, tree.detach() if isinstance(tree, Tensor) else tree)
    )
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
    assert measure_peak_memory(program) is None  # of one of them it would be too little


def test_what_is_one_tensor_is_copied_once_and_nothing_is_copied_within_a_device(machine: SecondDevice) -> None:
    program = hotloop.lower(both(), on({"encoder": "far", "encoder.inside": "far"}))
    batch = program.parts.splits.validation.columns  # type: ignore[union-attr]
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
    assert program.parts.splits.validation is not None
    machine.seeds.clear()
    evaluate(program, program.parts.splits.validation)
    assert len(machine.seeds) == 1
    streams = RandomStreams(program.parts.task.seed, *program.devices)
    streams.reseed("evaluate", 0)
    assert machine.seeds[0] == machine.seeds[1]


# --- State

ELSEWHERE = on({"1": "far", "4": "far"})


def test_a_training_goes_on_bitwise_with_another_placement_and_with_none(machine: SecondDevice) -> None:
    expected = hotloop.lower(a_chain())
    advance(expected, 9)
    state = None
    for plan in (Plan(), ELSEWHERE, on({"0": "far"}), Plan()):
        program = hotloop.lower(a_chain(), plan)
        if state is not None:
            program.restore(through_file(state))
            assert differing_paths(program.state(), state) == []
        advance(program, 2)
        state = program.state()
    assert state is not None and state.position.step == 8
    advance(program, 1)
    assert differing_paths(program.state(), expected.state()) == []


@pytest.mark.more
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


@pytest.mark.more
def test_a_proof_compares_it_with_one_device(machine: SecondDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.parity.free_run.STEPS", 2)
    brief = dict(epochs=1, batch_size=12)
    assert prove(a_chain(model=still, **brief), on({"0": "far"})).parity == "bitwise"
    drawing = prove(a_chain(**brief), on({"2": "far"}))
    assert drawing.parity == "unproven" and "draws random numbers on several devices" in drawing.reason
