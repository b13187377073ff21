"""State: every optimizer, schedule and module comes back bit by bit, and a difference of one bit is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as schedules

import hotloop
from hotloop.core.state import State, differing_paths, tree_leaves
from hotloop.errors import CheckpointError
from hotloop.training.checkpoint import Checkpoint, CheckpointFolder, has_only_finite_parameters
from hotloop.training.loop import TrainingLoop
from tests.support.programs import a_task, assert_resumes, labelled, state_after

# ---------------------------------------------------------------- what counts as a difference


def state_of(value: Any) -> State:
    return State(parameters={"weight": torch.ones(3)}, buffers={}, extra={"module": value})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.tensor([1.0]), torch.tensor(1.0)),
        (torch.tensor([1, 2]), torch.tensor([2, 1])),
        (torch.tensor([0x7FC00000]).int().view(torch.float32), torch.tensor([0x7FC00001]).int().view(torch.float32)),
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        (None, 0),
        ({"a": 1}, {"b": 1}),
        ([1, 2], [1, 2, 3]),
        (1.0, np.float64(1.0)),
    ],
    ids=repr,
)
def test_a_difference_is_seen(one: Any, other: Any) -> None:
    assert differing_paths(state_of(one), state_of(other))
    assert differing_paths(state_of(one), state_of(one)) == differing_paths(state_of(other), state_of(other)) == []


def test_nan_equals_itself() -> None:
    assert differing_paths(state_of(torch.tensor(float("nan"))), state_of(torch.tensor(float("nan")))) == []


def test_a_difference_of_position_is_seen() -> None:
    state = state_of(1)
    assert differing_paths(state, replace(state, position=replace(state.position, batch=1))) == ["/position/batch"]


# ---------------------------------------------------------------- optimizers


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, 3))


OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "ASGD": (optim.ASGD, {"t0": 2}),
    "ASGD foreach": (optim.ASGD, {"foreach": True, "weight_decay": 0.1}),
    "Adadelta": (optim.Adadelta, {"rho": 0.8}),
    "Adadelta foreach": (optim.Adadelta, {"foreach": True}),
    "Adafactor": (optim.Adafactor, {}),
    "Adagrad": (optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "Adagrad foreach": (optim.Adagrad, {"foreach": True}),
    "Adagrad fused": (optim.Adagrad, {"fused": True}),
    "Adam": (optim.Adam, {}),
    "Adam amsgrad": (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "Adam foreach": (optim.Adam, {"foreach": True, "maximize": True}),
    "Adam fused": (optim.Adam, {"fused": True, "amsgrad": True}),
    "Adam tensor lr": (optim.Adam, {"lr": torch.tensor(0.01)}),
    "Adam tensor lr fused": (optim.Adam, {"lr": torch.tensor(0.01), "fused": True}),
    "AdamW": (optim.AdamW, {"amsgrad": True}),
    "AdamW fused": (optim.AdamW, {"fused": True}),
    "Adamax": (optim.Adamax, {}),
    "Adamax foreach": (optim.Adamax, {"foreach": True}),
    "LBFGS": (optim.LBFGS, {"lr": 0.1, "max_iter": 3, "history_size": 2}),
    "LBFGS line search": (optim.LBFGS, {"max_iter": 3, "line_search_fn": "strong_wolfe"}),
    "Muon": (optim.Muon, {"nesterov": True}),
    "NAdam": (optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "NAdam foreach": (optim.NAdam, {"foreach": True}),
    "RAdam": (optim.RAdam, {}),
    "RAdam foreach": (optim.RAdam, {"foreach": True}),
    "RMSprop": (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "RMSprop foreach": (optim.RMSprop, {"foreach": True, "momentum": 0.9}),
    "Rprop": (optim.Rprop, {}),
    "Rprop foreach": (optim.Rprop, {"foreach": True}),
    "SGD": (optim.SGD, {}),
    "SGD momentum": (optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "SGD nesterov foreach": (optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}),
    "SGD fused": (optim.SGD, {"momentum": 0.9, "fused": True}),
}


def test_no_optimizer_of_torch_is_left_out() -> None:
    own = {value for value in vars(optim).values() if isinstance(value, type) and issubclass(value, optim.Optimizer)}
    sparse_only = {optim.Optimizer, optim.SparseAdam}
    assert {kind for kind, _ in OPTIMIZERS.values()} == own - sparse_only


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_resumes_bitwise(name: str) -> None:
    kind, options = OPTIMIZERS[name]
    options = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    matrices_alone = kind is optim.Muon

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 3, bias=False))

    def optimizer(parameters: list[nn.Parameter]) -> optim.Optimizer:
        return kind(parameters, **{"lr": 0.01} | options)

    assert_resumes(a_task(model=model if matrices_alone else network, optimizer=optimizer))


def test_groups_with_rates_of_their_own_and_frozen_parameters_resume_bitwise() -> None:
    def model() -> nn.Module:
        made = network()
        made[1].bias.requires_grad_(False)
        return made

    def optimizer(parameters: hotloop.Parameters) -> optim.Optimizer:
        matrices = parameters.where(lambda name, value: value.ndim > 1)
        others = parameters.where(lambda name, value: value.ndim <= 1)
        return optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": 0.1}], lr=0.01)

    assert_resumes(a_task(model=model, optimizer=optimizer))


@pytest.mark.parametrize("fused", [True, False])
def test_state_keeps_the_strides_of_channels_last_parameters(fused: bool) -> None:
    """A fused optimizer walks through parameter and state in the order of memory, whatever their strides."""
    x, y = labelled(24, 6 * 25)

    def model() -> nn.Module:
        layers = nn.Sequential(nn.Unflatten(1, (6, 5, 5)), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(36, 3))
        return layers.to(memory_format=torch.channels_last)

    def optimizer(parameters: list[nn.Parameter]) -> optim.Optimizer:
        return optim.Adam(parameters, lr=0.01, fused=fused)

    assert not model()[1].weight.is_contiguous()
    assert_resumes(a_task(model=model, data=(x, y), optimizer=optimizer))


def test_complex_and_half_precision_parameters_resume_bitwise() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.waves = nn.Parameter(torch.randn(6, 5, dtype=torch.complex64))
            self.short = nn.Parameter(torch.randn(5, 3, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((x.to(torch.complex64) @ self.waves).abs().bfloat16() @ self.short).float()

    assert_resumes(a_task(model=Mixed, optimizer=lambda parameters: optim.Adam(parameters, lr=0.01)))


# ---------------------------------------------------------------- schedules


class Warmup:
    """A schedule's function that is an object, whose attributes torch saves."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / self.steps)


Schedule = Callable[[optim.Optimizer], Any]

SCHEDULES: dict[str, Schedule] = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda step: 1 / (step + 1)),
    "LambdaLR of an object": lambda o: schedules.LambdaLR(o, Warmup(5)),
    "LambdaLR of NumPy": lambda o: schedules.LambdaLR(o, lambda step: np.float32(0.9) ** step),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: schedules.StepLR(o, 2),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [2, 2, 5]),
    "ConstantLR": lambda o: schedules.ConstantLR(o, 0.5, total_iters=5),
    "LinearLR": lambda o: schedules.LinearLR(o, total_iters=6),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: schedules.PolynomialLR(o, 10, 2.0),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 2, 2),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.001, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=20),
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, total_iters=4), schedules.MultiStepLR(o, [1, 2])], milestones=[8]
    ),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler(
        [schedules.ConstantLR(o, 0.5, total_iters=4), schedules.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: optim.swa_utils.SWALR(o, swa_lr=0.001, anneal_epochs=5),
}


def test_no_schedule_of_torch_is_left_out() -> None:
    own = {name for name in schedules.__all__ if name != "LRScheduler"}
    assert own <= {name.partition(" ")[0] for name in SCHEDULES}


@pytest.mark.parametrize("every", ["step", "epoch"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_resumes_bitwise(name: str, every: str) -> None:
    schedule = SCHEDULES[name]
    momentum = lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9)  # noqa: E731
    assert_resumes(a_task(optimizer=momentum, schedule=lambda o: schedule(o), schedule_every=every), stop=6, steps=12)


def test_a_learning_rate_that_is_a_tensor_stays_the_one_the_schedule_changes() -> None:
    assert_resumes(
        a_task(
            optimizer=lambda parameters: optim.Adam(parameters, lr=torch.tensor(0.1)),
            schedule=lambda optimizer: schedules.ExponentialLR(optimizer, 0.9),
        )
    )


# ---------------------------------------------------------------- modules


class Grows(nn.Module):
    """Holds what modules may hold beside parameters: a buffer that grows, one unsaved, and a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("angles", torch.zeros(2))
        self.register_buffer("last", torch.zeros(6), persistent=False)
        self.calls: dict[str, Any] = {"count": 0, "rates": (0.5, None)}

    def get_extra_state(self) -> dict[str, Any]:
        return self.calls

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls = {**self.calls, "count": self.calls["count"] + 1}
            self.last = x[0].detach().clone()
            if self.calls["count"] == 2:
                self.angles = torch.arange(5.0)
        return self.layer(x) + self.angles.sum() * self.calls["count"] + self.last.mean()


def test_buffers_that_grow_and_extra_state_resume_bitwise() -> None:
    state = assert_resumes(a_task(model=Grows))
    assert state.buffers["angles"].shape == (5,)
    assert state.extra[""]["count"] == 7


class Centred(nn.Module):
    """A loss with a buffer that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.centre.lerp_(output.detach().mean(0), 0.1)
        return nn.functional.cross_entropy(output - self.centre, target)


def test_buffers_of_the_loss_resume_bitwise_and_stay_with_their_program() -> None:
    task = a_task(loss=Centred())
    assert assert_resumes(task).loss["centre"].abs().sum() > 0
    assert task.loss.centre.abs().sum() == 0  # the Task itself is as it was
    assert differing_paths(state_after(task, 4), state_after(task, 4)) == []


# ---------------------------------------------------------------- of something else

ADAM = lambda parameters: optim.Adam(parameters, lr=0.1)  # noqa: E731
STEP = lambda optimizer: schedules.StepLR(optimizer, 2)  # noqa: E731


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({}, {"model": network}, "another model.*has a parameter"),
        ({}, {"model": lambda: nn.Linear(6, 4)}, r"weight.*float32 \(3, 6\).*float32 \(4, 6\)"),
        ({"model": network}, {"model": lambda: nn.Linear(6, 3)}, "another model"),
        ({}, {"model": lambda: nn.Linear(6, 3).double()}, "weight.*float32.*float64"),
        ({}, {"optimizer": ADAM}, "another optimizer: SGD, where the Task has Adam"),
        ({}, {"schedule": STEP}, "another learning-rate schedule: the Task has a StepLR"),
        ({"schedule": STEP}, {}, "another learning-rate schedule: the Task has none"),
        ({"schedule": STEP}, {"schedule": SCHEDULES["CosineAnnealingLR"]}, "the Task has a CosineAnnealingLR"),
        ({}, {"average": 0.9}, "averaged parameter"),
        ({"loss": Centred()}, {}, "buffer of the loss"),
    ],
)
def test_a_state_of_another_task_is_one_clear_line(one: dict, other: dict, said: str) -> None:
    state = state_after(a_task(**one), 2)
    wide = (torch.randn(24, 6).double(), labelled()[1]) if "float64" in said else labelled()
    program = hotloop.lower(a_task(**other, data=wide))
    with pytest.raises(CheckpointError, match=said) as caught:
        program.restore(state)
    assert "\n" not in str(caught.value)


def test_another_division_into_groups_is_one_clear_line() -> None:
    def divided(parameters: hotloop.Parameters) -> optim.Optimizer:
        return optim.SGD([{"params": [value]} for value in parameters], lr=0.1)

    program = hotloop.lower(a_task(optimizer=divided))
    with pytest.raises(
        CheckpointError, match=r"SGD with groups of \[2\] parameters, where the Task has SGD with \[1, 1\]"
    ):
        program.restore(state_after(a_task(), 2))


# ---------------------------------------------------------------- never not a number


def finite(parameters: dict[str, torch.Tensor], trained: list[str]) -> bool:
    return has_only_finite_parameters(
        State(parameters=parameters, buffers={}, optimizer={"groups": [{"params": trained}]})
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_one_bad_number_is_seen(bad: float, dtype: torch.dtype) -> None:
    values = torch.ones(1000, dtype=dtype)
    assert finite({"a": torch.ones(3), "b": values}, ["a", "b"])
    values[777] = bad
    assert not finite({"a": torch.ones(3), "b": values}, ["a", "b"])


def test_what_is_not_trained_may_be_infinite_and_what_is_empty_is_fine() -> None:
    mask = torch.full((3, 3), -float("inf"))
    assert finite({"mask": mask, "weight": torch.ones(2), "none": torch.zeros(0, 4)}, ["weight", "none"])
    assert finite({"mask": mask}, [])
    assert finite({"huge": torch.full((9,), 3e38)}, ["huge"])


# ---------------------------------------------------------------- what is lent


def memory_of(state: State) -> set[int]:
    return {one.data_ptr() for _, one in tree_leaves([state.parameters, state.buffers, state.optimizer["state"]])}


def test_a_state_that_is_lent_is_the_same_without_a_copy() -> None:
    program = hotloop.lower(a_task(model=network, optimizer=optim.Adam))
    program.advance(3)
    copied, lent = program.state(), program.state(lent=True)
    assert differing_paths(copied, lent) == []
    live = [*program.model.parameters(), *program.model.buffers()]
    assert {one.data_ptr() for one in live} <= memory_of(lent)
    assert not memory_of(copied) & memory_of(lent)
    program.advance(1)
    assert differing_paths(copied, lent)  # it is training's own memory
    program.close()


def test_a_training_lends_its_state_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, live = [], set[int]()
    written = CheckpointFolder.save

    def save(self: CheckpointFolder, checkpoint: Checkpoint) -> Path:
        saved.append(memory_of(checkpoint.state))
        live.update(loop.program.model[0].weight.data_ptr() for loop in loops)
        return written(self, checkpoint)

    loops: list[Any] = []
    made = TrainingLoop.begin
    monkeypatch.setattr(TrainingLoop, "begin", lambda self, *given: (loops.append(self), made(self, *given))[1])
    monkeypatch.setattr(CheckpointFolder, "save", save)
    hotloop.fit(
        a_task(model=network, optimizer=optim.Adam, epochs=1), run=tmp_path / "run", plan="baseline", progress=False
    )
    assert live and live <= saved[-1]
