"""What a Task promises, each promise against numbers worked out by hand or by a plain loop."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler, swa_utils
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hotloop
from hotloop.errors import DataError, NonFiniteError, TaskError
from hotloop.evaluation import evaluate
from hotloop.state import differences
from tests.cpu.programs import a_task, advance, assert_resumes, labelled, last_state, state_after, trained


def still(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer that changes nothing, so that an epoch's figures are those of the first weights."""
    return torch.optim.SGD(parameters, lr=0.0)


# --- optimizers and parameter groups ------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "Adam": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "Adam, fused": lambda parameters: torch.optim.Adam(parameters, fused=True),
    "Adam, foreach": lambda parameters: torch.optim.Adam(parameters, foreach=True),
    "Adam, rate in a tensor": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.01)),
    "AdamW": torch.optim.AdamW,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, max_iter=4, line_search_fn="strong_wolfe"),
    "Muon": lambda parameters: torch.optim.Muon(parameters.where(lambda name, value: value.ndim == 2)),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, centered=True, momentum=0.9),
    "Rprop": torch.optim.Rprop,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
}


def test_lbfgs_asks_for_the_loss_as_often_as_it_likes() -> None:
    program = hotloop.lower(a_task(optimizer=OPTIMIZERS["LBFGS"], data=labelled(), batch_size=24))
    model = nn.Linear(6, 3)
    model.load_state_dict(program.model.state_dict())
    plain = OPTIMIZERS["LBFGS"](list(model.parameters()))
    x, y = labelled()

    def closure() -> Tensor:
        plain.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        loss = program.step((x, y))
        assert loss.equal(plain.step(closure).detach())
    assert all(value.equal(program.state().parameters[name]) for name, value in model.named_parameters())


def test_lbfgs_sees_the_same_dropout_at_each_look() -> None:
    seen: list[Tensor] = []

    class Watched(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            seen.append(out.detach() != 0)
            return out

    def step(model: nn.Module, batch: Any) -> Tensor:
        return model(torch.ones(4, 6)).square().mean()

    task = a_task(model=lambda: nn.Sequential(Watched(), nn.Linear(6, 3)), step=step, optimizer=OPTIMIZERS["LBFGS"])
    program = hotloop.lower(task)
    program.step(labelled())
    first = len(seen)
    program.step(labelled())
    assert first > 2
    assert all(mask.equal(seen[0]) for mask in seen[:first])
    assert not seen[first].equal(seen[0])


class Slowing(torch.optim.SGD):
    """Keeps a count that belongs to no parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.state["steps"] = 0

    def step(self, closure: Any = None) -> None:
        self.state["steps"] += 1
        self.param_groups[0]["lr"] = 0.1 / self.state["steps"]
        super().step()


def test_an_optimizers_own_state_is_kept_too() -> None:
    state = assert_resumes(a_task(optimizer=Slowing))
    assert state.optimizer["own"] == {"steps": 7}


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def frozen_first() -> nn.Module:
    model = two_layers()
    model[0].requires_grad_(False)
    return model


def test_parameter_groups_and_frozen_parameters() -> None:
    seen: list[hotloop.Parameters] = []

    def optimizer(parameters: hotloop.Parameters) -> torch.optim.Optimizer:
        seen.append(parameters)
        groups = [
            {"params": parameters.where(lambda name, value: value.ndim > 1), "weight_decay": 0.5},
            {"params": parameters.where(lambda name, value: name.endswith("bias")), "lr": 0.0},
        ]
        return torch.optim.SGD(groups, lr=0.1)

    task = a_task(model=frozen_first, optimizer=optimizer, average=0.9)
    program = hotloop.lower(task)
    assert list(seen[0].named) == ["2.weight", "2.bias"] and seen[0].model is program.model
    before = program.state()
    assert [group["params"] for group in before.optimizer["groups"]] == [["2.weight"], ["2.bias"]]
    assert list(before.average) == ["2.weight", "2.bias"]
    advance(program, 1)
    after = program.state().parameters
    moved = [name for name, value in before.parameters.items() if not value.equal(after[name])]
    assert moved == ["2.weight"]
    start = before.parameters["2.weight"].clone().requires_grad_()
    index = task.roles.order.epoch(0)[:5]
    x, y = labelled()
    first = F.linear(x[index], before.parameters["0.weight"], before.parameters["0.bias"]).tanh()
    F.cross_entropy(F.linear(first, start, before.parameters["2.bias"]), y[index]).backward()
    expected = start.detach() - 0.1 * (start.grad + 0.5 * start.detach())
    torch.testing.assert_close(after["2.weight"], expected)


def test_groups_resume_exactly() -> None:
    def optimizer(parameters: hotloop.Parameters) -> torch.optim.Optimizer:
        first, *others = parameters
        return torch.optim.Adam([{"params": others}, {"params": [first], "lr": 0.1, "betas": (0.5, 0.9)}])

    assert_resumes(a_task(model=two_layers, optimizer=optimizer))


def test_gradients_of_what_no_optimizer_holds_do_not_pile_up() -> None:
    task = a_task(model=two_layers, optimizer=lambda parameters: torch.optim.SGD(list(parameters)[2:], lr=0.0))
    program = hotloop.lower(task)
    norms = []
    for _ in range(3):
        program.step(labelled())
        norms.append(float(program.model[0].weight.grad.norm()))
    assert norms[0] > 0 and norms[1] == norms[0] == norms[2]


def test_parameters_from_elsewhere_are_refused() -> None:
    stray = nn.Parameter(torch.zeros(3))
    with pytest.raises(TaskError, match="not the model's"):
        hotloop.lower(a_task(optimizer=lambda parameters: torch.optim.SGD([*parameters, stray], lr=0.1)))


# --- schedules ----------------------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5]),
    "ConstantLR": lambda optimizer: lr_scheduler.ConstantLR(optimizer, total_iters=4),
    "LinearLR": lambda optimizer, total: lr_scheduler.LinearLR(optimizer, total_iters=total),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "PolynomialLR": lambda optimizer, total: lr_scheduler.PolynomialLR(optimizer, total),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.MultiStepLR(optimizer, [1, 3])],
        milestones=[2],
    ),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "CosineAnnealingLR": lr_scheduler.CosineAnnealingLR,  # its second argument is the number of steps
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3, 2),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda optimizer, total: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total),
    "SWALR": lambda optimizer: swa_utils.SWALR(optimizer, 0.05),
}


def scheduled(name: str, every: str, **fields: Any) -> hotloop.Task:
    return a_task(
        schedule=SCHEDULES[name],
        schedule_every=every,
        epochs=4,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.5),
        **fields,
    )


@pytest.mark.parametrize("every", ["step", "epoch"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_each_schedule_of_torch_resumes_exactly(name: str, every: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # torch warns of schedulers that step at the wrong time
        state = assert_resumes(scheduled(name, every), stop=7, steps=17)
    assert state.schedule["last_epoch" if "last_epoch" in state.schedule else "_last_lr"]


def test_no_schedule_of_torch_is_left_out() -> None:
    known = {
        name
        for name, value in vars(lr_scheduler).items()
        if isinstance(value, type) and issubclass(value, lr_scheduler.LRScheduler)
    }
    assert known - set(SCHEDULES) - {"LRScheduler", "_LRScheduler"} == set()


@pytest.mark.parametrize("every", ["step", "epoch"])
@pytest.mark.parametrize("name", sorted(SCHEDULES.keys() - {"ReduceLROnPlateau"}))
def test_learning_rates_are_those_of_a_plain_loop(name: str, every: str) -> None:
    program = hotloop.lower(scheduled(name, every))
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.5)
    total = 20 if every == "step" else 4
    takes_total = name in ("LinearLR", "PolynomialLR", "CosineAnnealingLR", "OneCycleLR")
    plain = SCHEDULES[name](optimizer, total) if takes_total else SCHEDULES[name](optimizer)
    for _ in range(4):
        for _ in range(5):
            assert program.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
            advance(program, 1)
            optimizer.step()
            if every == "step":
                plain.step()
        if every == "epoch":
            plain.step()


def test_a_schedule_that_names_the_total_gets_it_even_if_it_has_a_default() -> None:
    seen = []

    def schedule(optimizer: torch.optim.Optimizer, total: int = 100) -> Any:
        seen.append(total)
        return lr_scheduler.LinearLR(optimizer, total_iters=total)

    hotloop.lower(a_task(schedule=schedule, epochs=3))
    hotloop.lower(a_task(schedule=schedule, epochs=3, schedule_every="epoch"))
    assert seen == [15, 3]


def test_a_plateau_schedule_watches_the_monitored_figure(tmp_path: Path) -> None:
    figures = iter([3.0, 2.0, 2.5, 1.0, 1.5])

    class Told(nn.Module):
        """A metric that falls and rises as it was told."""

        def forward(self, output: Tensor, target: Tensor) -> float:
            return next(figures)

    task = a_task(
        schedule=lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
        validation=4,
        metrics={"told": Told()},
        monitor="validation_told",
        goal="min",
        epochs=5,
    )
    run = trained(task, tmp_path / "run")
    rates = [row["learning_rate"] for row in run.epochs]
    assert rates == [0.1, 0.1, 0.1, 0.05, 0.05]  # of the epoch itself; it halves after the third and the fifth
    assert last_state(run).optimizer["groups"][0]["lr"] == 0.025


# --- clipping and averaging ---------------------------------------------------------------------------------


def one_step(**fields: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The change of the weights in one step of plain gradient descent, and the gradients of a plain loop."""
    task = a_task(model=two_layers, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0), **fields)
    program = hotloop.lower(task)
    before = program.state().parameters
    model = two_layers()
    model.load_state_dict(before)
    x, y = labelled()
    F.cross_entropy(100 * model(x), y).backward()
    gradients = {name: value.grad for name, value in model.named_parameters()}
    program.step((x, y))
    after = program.state().parameters
    return {name: before[name] - after[name] for name in before}, gradients


def steep(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(100 * output, target)


def test_gradients_are_scaled_down_to_the_norm() -> None:
    change, gradients = one_step(loss=steep, clip_norm=0.5)
    norm = math.sqrt(sum(float(value.square().sum()) for value in gradients.values()))
    assert norm > 5
    for name, value in change.items():
        torch.testing.assert_close(value, gradients[name] * 0.5 / norm, rtol=1e-4, atol=1e-6)


def test_small_gradients_are_not_scaled_up() -> None:
    change, gradients = one_step(loss=steep, clip_norm=1e6)
    for name, value in change.items():
        torch.testing.assert_close(value, gradients[name], rtol=1e-4, atol=1e-5)


def test_gradient_elements_are_cut() -> None:
    change, gradients = one_step(loss=steep, clip_value=0.01)
    assert max(float(value.abs().max()) for value in gradients.values()) > 0.1
    for name, value in change.items():
        torch.testing.assert_close(value, gradients[name].clamp(-0.01, 0.01), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(clip_norm=1.0), "some are sparse"),
        (dict(clip_value=1.0), "some are sparse"),
        (dict(clip_value=1.0, model=lambda: Phases()), "complex parameters"),
    ],
)
def test_what_torch_cannot_clip_is_told(fields: dict[str, Any], message: str) -> None:
    tokens = torch.arange(24 * 6).view(24, 6) % 11, torch.arange(24) % 3
    task = a_task(**dict(model=lambda: nn.EmbeddingBag(11, 3, sparse=True), data=tokens) | fields)
    with pytest.raises(TaskError, match=message):
        advance(hotloop.lower(task), 1)


class Phases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(6, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.turn).abs()


def test_the_average_follows_the_weights(tmp_path: Path) -> None:
    task = a_task(model=two_layers, average=0.7, validation=6)
    program = hotloop.lower(task)
    expected = {name: value.double() for name, value in program.state().parameters.items()}
    for _ in range(6):
        advance(program, 1)
        for name, value in program.state().parameters.items():
            expected[name] = 0.7 * expected[name] + 0.3 * value.double()
    for name, value in program.state().average.items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6)


def test_evaluation_uses_the_average_and_training_does_not(tmp_path: Path) -> None:
    run = trained(a_task(model=two_layers, average=0.9, validation=6, epochs=2), tmp_path / "run")
    plain = trained(a_task(model=two_layers, validation=6, epochs=2), tmp_path / "plain")
    state, without = last_state(run), last_state(plain)
    assert all(value.equal(without.parameters[name]) for name, value in state.parameters.items())
    held_out = hotloop.lower(run.task).parts.roles.validation
    x, y = held_out.columns
    for weights, rows in ((state.average, run.epochs), (without.parameters, plain.epochs)):
        model = two_layers()
        model.load_state_dict(weights)
        with torch.no_grad():
            loss = F.cross_entropy(model(x), y)
        assert rows[-1]["validation_loss"] == pytest.approx(float(loss), rel=1e-5)
    assert run.epochs[-1]["validation_loss"] != plain.epochs[-1]["validation_loss"]


# --- what a loss counts -------------------------------------------------------------------------------------


def sequences(count: int = 22, length: int = 4) -> tuple[Tensor, Tensor]:
    """Inputs (count, 6, length) and labels (count, length), many of them -100, and some samples nothing but that."""
    draws = torch.Generator().manual_seed(2)
    x = torch.randn(count, 6, length, generator=draws)
    y = x[:, :3].argmax(1)
    y[torch.rand(count, length, generator=draws) < 0.4] = -100
    y[:3] = -100
    return x, y


def last_ignored() -> tuple[Tensor, Tensor]:
    x, y = labelled()
    return x, torch.where(torch.arange(24) % 3 == 0, 2, y)


def probabilities() -> tuple[Tensor, Tensor]:
    x, y = labelled()
    return x, F.one_hot(y, 3).float()


def pointwise() -> nn.Module:
    return nn.Conv1d(6, 3, 1)


CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 0.1])
LOSSES: dict[str, dict[str, Any]] = {
    "plain": dict(loss=nn.CrossEntropyLoss()),
    "function": dict(loss=F.cross_entropy),
    "ignored": dict(loss=nn.CrossEntropyLoss(), data=sequences(), model=pointwise),
    "ignored by the function": dict(loss=F.cross_entropy, data=sequences(), model=pointwise),
    "ignored class": dict(loss=nn.CrossEntropyLoss(ignore_index=2), data=last_ignored()),
    "ignored by a partial": dict(loss=partial(F.cross_entropy, ignore_index=2), data=last_ignored()),
    "class weights": dict(loss=nn.CrossEntropyLoss(CLASS_WEIGHTS)),
    "class weights of a partial": dict(loss=partial(F.cross_entropy, weight=CLASS_WEIGHTS)),
    "class weights, ignored": dict(loss=nn.CrossEntropyLoss(CLASS_WEIGHTS), data=sequences(), model=pointwise),
    "likelihood": dict(
        loss=nn.NLLLoss(CLASS_WEIGHTS), model=lambda: nn.Sequential(nn.Linear(6, 3), nn.LogSoftmax(dim=1))
    ),
    "probabilities": dict(loss=nn.CrossEntropyLoss(), data=probabilities()),
    "probabilities and weights": dict(loss=nn.CrossEntropyLoss(CLASS_WEIGHTS), data=probabilities()),
    "squares": dict(loss=nn.MSELoss(), data=probabilities()),
    "own weight": dict(
        loss=lambda output, target: (F.cross_entropy(output, target, reduction="none") * target).sum() / target.sum(),
        weight=lambda batch: batch[1].sum(),
        # No batch without something that counts, or the loss itself is no number.
        data=(labelled()[0], 1 + labelled()[1] % 2),
    ),
}


class AsSamples(Dataset):
    """The same arrays, sample by sample: then nobody can look at all targets beforehand."""

    def __init__(self, arrays: tuple[Tensor, Tensor]) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(column[index] for column in self.arrays)


@pytest.mark.parametrize("as_samples", [False, True], ids=["arrays", "samples"])
@pytest.mark.parametrize("name", LOSSES)
def test_batches_add_up_to_the_loss_of_the_whole_data(name: str, as_samples: bool, tmp_path: Path) -> None:
    fields = dict(data=labelled(), model=lambda: nn.Linear(6, 3)) | LOSSES[name]
    arrays = fields["data"]
    if as_samples:
        fields["data"] = AsSamples(arrays)
    task = a_task(**fields, validation=AsSamples(arrays), optimizer=still, batch_size=5)
    run = trained(task, tmp_path / "run")
    model = task.build_model()
    with torch.no_grad():
        expected = float(task.loss(model(arrays[0]), arrays[1]))
    assert run.epochs[0]["train_loss"] == pytest.approx(expected, rel=1e-5)
    assert run.epochs[0]["validation_loss"] == pytest.approx(expected, rel=1e-5)


def test_a_batch_in_which_nothing_counts_does_no_harm() -> None:
    x, y = sequences()
    task = a_task(model=pointwise, data=(x, torch.full_like(y, -100)))
    program = hotloop.lower(task)
    before = program.state().parameters
    advance(program, 2)
    assert program.read_sums() == {"loss": 0.0, "weight": 0.0, "samples": 10.0}
    assert all(value.equal(before[name]) for name, value in program.state().parameters.items())


def test_a_sum_instead_of_a_mean_is_refused() -> None:
    for loss in (nn.MSELoss(reduction="sum"), partial(F.cross_entropy, reduction="sum")):
        with pytest.raises(TaskError, match="reduction='sum'"):
            a_task(loss=loss)


def test_a_loss_that_is_no_single_number_is_refused() -> None:
    for loss in (nn.CrossEntropyLoss(reduction="none"), lambda output, target: output.mean().reshape(1)):
        with pytest.raises(TaskError, match="the loss is a tensor of shape"):
            advance(hotloop.lower(a_task(loss=loss)), 1)


def test_a_loss_that_learns_belongs_into_the_model() -> None:
    class Scaled(nn.CrossEntropyLoss):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

    with pytest.raises(TaskError, match="trainable parameter 'scale'"):
        hotloop.lower(a_task(loss=Scaled()))


def test_a_loss_that_remembers_starts_anew_each_time(tmp_path: Path) -> None:
    class Smoothed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            loss = F.cross_entropy(output, target)
            if self.training:
                self.scale.lerp_(loss.detach(), 0.1)
            return loss / self.scale

    task = a_task(loss=Smoothed(), validation=4)
    with_looks, without = hotloop.lower(task), hotloop.lower(task)
    for program in (with_looks, without):
        advance(program, 2)
        if program is with_looks:
            evaluate(program, task.roles.validation)
        advance(program, 2)
    assert differences(with_looks.state(), without.state()) == []
    assert differences(state_after(task, 4), state_after(task, 4)) == []
    assert_resumes(task)


# --- metrics, and figures of a step -------------------------------------------------------------------------


def right(output: Tensor, target: Tensor) -> Tensor:
    return output.argmax(1) == target


METRICS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a mean": lambda output, target: right(output, target).float().mean(),
    "a number": lambda output, target: float(right(output, target).float().mean()),
    "a number of NumPy": lambda output, target: right(output, target).numpy().mean(dtype=np.float32),
    "one per sample": lambda output, target: right(output, target).float(),
    "yes or no per sample": right,
    "sum and count": lambda output, target: (right(output, target).sum(), len(target)),
    "a default of hotloop's": None,
}


def guesser() -> nn.Module:
    """Is right about the classes 0 and 1 more often than about 2, which it never names."""
    model = nn.Linear(6, 3)
    model.load_state_dict({"weight": torch.eye(3, 6), "bias": torch.tensor([0.0, 0.0, -100.0])})
    return model


@pytest.mark.parametrize("name", METRICS)
def test_all_forms_of_a_metric_give_the_same_figure(name: str, tmp_path: Path) -> None:
    metric = METRICS[name]
    task = a_task(
        metrics={"accuracy": metric} if metric else None,
        validation=AsSamples(labelled(23)),  # batches of 5, and 3 that are left
        optimizer=still,
        test=labelled(40),
        model=guesser(),
    )
    run = trained(task, tmp_path / "run")
    model = task.build_model()
    x, y = labelled(23)
    expected = float(right(model(x), y).float().mean())
    assert 0.1 < expected < 0.9
    assert run.epochs[0]["validation_accuracy"] == pytest.approx(expected)
    x, y = labelled(40)
    assert run.final["test_accuracy"] == pytest.approx(float(right(model(x), y).float().mean()))


def test_the_default_accuracy_leaves_ignored_targets_out(tmp_path: Path) -> None:
    x, y = sequences()
    for number, loss in enumerate((nn.CrossEntropyLoss(), F.cross_entropy)):
        task = a_task(loss=loss, model=pointwise, data=(x, y), validation=(x, y), optimizer=still)
        run = trained(task, tmp_path / str(number))
        hits = right(task.build_model()(x), y)[y != -100]
        assert run.epochs[0]["validation_accuracy"] == pytest.approx(float(hits.float().mean()))


def test_a_regression_has_no_accuracy(tmp_path: Path) -> None:
    x, _ = labelled()
    run = trained(a_task(loss=nn.MSELoss(), data=(x, x[:, :3]), validation=4), tmp_path / "run")
    assert run.epochs[0]["validation_accuracy"] is None
    assert run.epochs[0]["validation_loss"] > 0


def test_figures_of_a_step_are_averaged_over_samples(tmp_path: Path) -> None:
    def step(model: nn.Module, batch: Any) -> dict[str, Any]:
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        return {"loss": loss, "largest": x.max(), "size": len(x), "half": 0.5}

    task = a_task(step=step, optimizer=still, validation=AsSamples(labelled(7)))
    run = trained(task, tmp_path / "run")
    row = run.epochs[0]
    order, x = task.roles.order.epoch(0), labelled()[0]
    largest = [(float(x[index].max()), len(index)) for index in order.split(5)]
    assert row["train_largest"] == pytest.approx(sum(value * count for value, count in largest) / 24)
    assert row["train_size"] == pytest.approx((4 * 5 * 5 + 4 * 4) / 24)
    assert row["train_half"] == row["validation_half"] == 0.5
    assert row["validation_size"] == pytest.approx((5 * 5 + 2 * 2) / 7)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"error": 1.0}, "expected one with 'loss'"),
        ({"loss": 1.0, "scores": torch.zeros(2)}, "'scores' of shape"),
        (None, "the loss is None"),
        (1.0, "the loss is a float"),
    ],
)
def test_what_a_step_must_not_return(result: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        advance(hotloop.lower(a_task(step=lambda model, batch: result)), 1)


def test_metrics_beside_a_step_are_refused() -> None:
    with pytest.raises(TaskError, match="a step, which shows no output"):
        a_task(step=lambda model, batch: model(batch[0]).mean(), metrics={"accuracy": right})


def test_a_step_may_take_gradients_in_evaluation_too(tmp_path: Path) -> None:
    """As losses of physics do, which hold derivatives of the output with respect to the input."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        with torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope - 1).square().mean()

    run = trained(a_task(model=two_layers, step=step, validation=4, epochs=2), tmp_path / "run")
    first, second = (row["validation_loss"] for row in run.epochs)
    assert 0 < second < first


# --- validation, stopping, the best epoch -------------------------------------------------------------------


@pytest.mark.parametrize(("share", "count"), [(0.25, 6), (5, 5)])
def test_validation_is_split_off_by_seed(share: float, count: int) -> None:
    x = torch.arange(24)

    def parts(seed: int) -> tuple[Tensor, Tensor]:
        roles = a_task(data=(x.float()[:, None], x), validation=share, seed=seed, loss=nn.MSELoss()).roles
        return roles.train.columns[1], roles.validation.columns[1]

    train, held_out = parts(0)
    assert len(held_out) == count and torch.cat([train, held_out]).sort().values.equal(x)
    assert [a.equal(b) for a, b in zip(parts(0), parts(0), strict=True)] == [True, True]
    assert not parts(1)[1].equal(held_out)
    as_samples = a_task(data=AsSamples((x, x)), validation=share).roles.validation
    assert [as_samples.dataset[place][0].item() for place in range(count)] == held_out.tolist()


class Scripted(nn.Module):
    """A metric that says what it was told, evaluation by evaluation, and then keeps its last word."""

    def __init__(self, *figures: float) -> None:
        super().__init__()
        self.figures = list(figures)

    def forward(self, output: Tensor, target: Tensor) -> float:
        return self.figures.pop(0) if len(self.figures) > 1 else self.figures[0]


def steered(figures: list[float], tmp_path: Path, **fields: Any) -> hotloop.Run:
    task = a_task(
        validation=4,
        metrics={"told": Scripted(*figures)},
        monitor="validation_told",
        goal="min",
        epochs=8,
        **fields,
    )
    return trained(task, tmp_path / "run")


def test_training_stops_when_patience_ends(tmp_path: Path) -> None:
    run = steered([5.0, 3.0, 4.0, 3.0, 2.0, 9.0, 9.0, 9.0], tmp_path, patience=2)
    assert len(run.epochs) == 4  # the second 3.0 is no progress
    assert run.final["epoch"] == 2 and run.final["weights"] == "best"
    assert "no better validation_told for 2 epochs" in run.final["reason"]


def test_training_stops_below_a_figure(tmp_path: Path) -> None:
    run = steered([5.0, 3.0, 2.0, 1.0], tmp_path, stop_below=2.5)
    assert len(run.epochs) == 3 and "validation_told reached 2" in run.final["reason"]


def test_rising_figures_are_better_where_the_goal_says_so(tmp_path: Path) -> None:
    task = a_task(
        validation=4,
        metrics={"score": Scripted(0.5, 0.9, 0.7, 0.6)},
        monitor="validation_score",
        epochs=8,
        patience=2,
    )
    run = trained(task, tmp_path / "run")  # the name has nothing of a loss: rising is better
    assert len(run.epochs) == 4 and run.final["epoch"] == 2
    run = steered([0.5, 0.9, 0.7], tmp_path / "falling", patience=1)
    assert len(run.epochs) == 2 and run.final["epoch"] == 1


def test_the_best_epochs_weights_are_kept_and_tested(tmp_path: Path) -> None:
    weights = []

    def note(view: hotloop.View) -> None:
        if view.event == "epoch":
            weights.append(view.step)

    test = labelled(40)
    run = steered([5.0, 3.0, 4.0, 6.0], tmp_path, callbacks=[note], patience=3, test=test)
    assert run.final["epoch"] == 2
    best = run.checkpoints.load_best(run.checkpoints.newest()[0].best).state
    expected = state_after(replace(run.task, metrics=None, monitor=None), 8)  # 20 samples, 4 batches an epoch
    assert all(value.equal(best.parameters[name]) for name, value in expected.parameters.items())
    model = nn.Linear(6, 3).requires_grad_(False)
    model.load_state_dict(best.parameters)
    assert run.final["test_loss"] == pytest.approx(float(F.cross_entropy(model(test[0]), test[1])), rel=1e-5)


def test_without_validation_the_last_weights_are_tested(tmp_path: Path) -> None:
    run = trained(a_task(epochs=2, test=labelled(40)), tmp_path / "run")
    model = nn.Linear(6, 3).requires_grad_(False)
    model.load_state_dict(last_state(run).parameters)
    x, y = labelled(40)
    assert run.final["weights"] == "last"
    assert run.final["test_loss"] == pytest.approx(float(F.cross_entropy(model(x), y)), rel=1e-5)


@pytest.mark.parametrize("name", ["validation_f1", "f1", "train_f1", "learning_rat"])
def test_an_unknown_figure_to_monitor_is_told(name: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=f"{name}.* is no figure of this Task.*validation_accuracy"):
        trained(a_task(validation=4, monitor=name), tmp_path / "run")


def test_a_figure_of_validation_needs_validation(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no validation data"):
        trained(a_task(monitor="validation_loss"), tmp_path / "run")


def test_a_figure_that_is_no_number_steers_nothing(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="told is NaN"):
        steered([3.0, math.nan, 2.0], tmp_path)


# --- callbacks ----------------------------------------------------------------------------------------------


def test_callbacks_see_what_happens_and_change_nothing(tmp_path: Path) -> None:
    seen: list[hotloop.View] = []

    def meddle(view: hotloop.View) -> None:
        seen.append(view)
        with pytest.raises(FrozenInstanceError):
            view.step = 0  # type: ignore[misc]
        assert isinstance(view.history, tuple)
        for record in view.history:
            with pytest.raises(Exception, match="frozen"):
                record.step = 0
            record.train["loss"] = -1.0  # what it has is a copy
            record.validation.clear()

    fields = dict(validation=4, epochs=3, patience=1)
    run = trained(a_task(**fields, callbacks=[meddle]), tmp_path / "run", callbacks=[meddle])
    plain = trained(a_task(**fields), tmp_path / "plain")
    figures = ("train_loss", "validation_loss", "learning_rate", "step")
    assert [[row[name] for name in figures] for row in run.epochs] == [
        [row[name] for name in figures] for row in plain.epochs
    ]
    assert differences(last_state(run), last_state(plain)) == []
    events = [view.event for view in seen[::2]]
    assert events[0] == "start" and events[-2:] == ["stop", "final"] and events.count("epoch") == 3
    assert {"progress", "checkpoint"} & set(events)
    last = seen[-1]
    assert (last.epoch, last.epochs, last.step, last.batches) == (3, 3, 12, 4)


def test_a_callback_that_fails_is_named(tmp_path: Path) -> None:
    def broken(view: hotloop.View) -> None:
        raise ValueError("no such colour")

    with pytest.raises(TaskError, match=r"callback .*broken.* raised ValueError: no such colour"):
        trained(a_task(), tmp_path / "run", callbacks=[broken])


# --- forms of data ------------------------------------------------------------------------------------------


def test_a_small_data_set_makes_a_batch_of_its_own() -> None:
    assert a_task(data=labelled(7), batch_size=None).roles.batch_size == 7
    assert a_task(data=labelled(40), batch_size=None).roles.batch_size == 32
    assert a_task(data=labelled(40), batch_size=None, validation=10).roles.batch_size == 30
    with pytest.raises(DataError, match="batch_size=8 is larger than the data"):
        _ = a_task(data=labelled(7), batch_size=8).roles


def padded(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    rows, labels = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True), torch.as_tensor(labels)


def ragged(count: int = 12) -> list[tuple[Tensor, int]]:
    return [(torch.full((1 + place % 4, 6), float(place)), place % 3) for place in range(count)]


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mean(1))


RAGGED: dict[str, Any] = {
    "list of samples": ragged(),
    "columns": tuple(map(list, zip(*ragged(), strict=True))),
    "columns with an array": ([row for row, _ in ragged()], np.array([label for _, label in ragged()])),
}


@pytest.mark.parametrize("form", RAGGED)
def test_rows_of_different_lengths_go_through_collate(form: str) -> None:
    task = a_task(model=Mean, data=RAGGED[form], collate=padded, batch_size=5)
    assert differences(assert_resumes(task), state_after(replace(task, data=ragged()), 7)) == []


def test_collate_is_never_passed_over() -> None:
    def double(samples: list) -> Any:
        x, y = torch.utils.data.default_collate(samples)
        return 2 * x, y

    x, y = labelled()
    expected = state_after(a_task(data=(2 * x, y)), 6)
    for data in ((x, y), TensorDataset(x, y), list(zip(x, y, strict=True)), AsSamples((x, y))):
        assert differences(state_after(a_task(data=data, collate=double), 6), expected) == []


def test_a_list_with_a_collate_function_is_a_list_of_samples() -> None:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        assert batch.shape == (4, 4, 6)  # samples, the longest of them, features
        return model(batch).square().mean()

    rows = [row for row, _ in ragged()]
    task = a_task(
        model=Mean,
        step=step,
        data=rows,
        collate=partial(nn.utils.rnn.pad_sequence, batch_first=True),
        batch_size=4,
        shuffle=False,
    )
    advance(hotloop.lower(task), 3)


def test_dicts_reach_the_step_with_or_without_collate() -> None:
    x, y = labelled()

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        assert list(batch) == ["x", "y"]
        return F.cross_entropy(model(batch["x"]), batch["y"])

    expected = state_after(a_task(), 6)
    data = {"x": x, "y": y}
    for fields in (dict(data=data), dict(data=data, collate=torch.utils.data.default_collate)):
        assert differences(state_after(a_task(step=step, **fields), 6), expected) == []


def test_several_inputs_go_to_the_model_as_several_arguments() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 3), nn.Linear(4, 3)

        def forward(self, one: Tensor, two: Tensor) -> Tensor:
            return self.first(one) + self.second(two)

    x, y = labelled()
    one, two = x[:, :2], x[:, 2:]
    expected = assert_resumes(a_task(model=Two, data=(one.numpy(), two.numpy(), y.numpy())))
    for data in (TensorDataset(one, two, y), AsSamples((one, two, y))):
        assert differences(state_after(a_task(model=Two, data=data), 7), expected) == []


def test_prepare_and_augment_see_the_inputs_alone() -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def augment(x: Tensor, draws: hotloop.data.Draws) -> Tensor:
        noise = draws.uniform(6)
        seen.append((x, noise))
        return x + noise

    task = a_task(prepare=lambda x: 2 * x, augment=augment, validation=4)
    assert_resumes(task)
    seen.clear()
    advance(hotloop.lower(task), 8)
    raw, x = labelled()[0], a_task(validation=4).roles.train.columns[0]
    assert len(x) == 20 and torch.isin(x, raw).all()
    order = [task.roles.order.epoch(epoch) for epoch in (0, 1)]
    assert torch.cat([rows for rows, _ in seen[:4]]).equal(2 * x[order[0]])
    noise = [torch.cat([noise for _, noise in part]) for part in (seen[:4], seen[4:])]
    first, second = (rows[places.argsort()] for rows, places in zip(noise, order, strict=True))
    assert not first.equal(second), "each epoch draws anew"
    seen.clear()
    advance(hotloop.lower(replace(task, batch_size=3)), 7)
    again = torch.cat([noise for _, noise in seen])[order[0].argsort()]
    assert again.equal(first), "a sample's draws don't depend on its batch"


def test_prepare_reaches_every_form_of_data() -> None:
    x, y = labelled()
    expected = state_after(a_task(data=(2 * x + 1, y)), 7)
    for data in ((x, y), AsSamples((x, y)), DataLoader(AsSamples((x, y)), batch_size=5, shuffle=True)):
        assert differences(state_after(a_task(data=data, prepare=lambda x: 2 * x + 1), 7), expected) == []
    in_order = state_after(a_task(data=(2 * x + 1, y), shuffle=False), 5).parameters
    stream = DataLoader(
        AsSamples((x, y)), batch_sampler=[range(start, min(start + 5, 24)) for start in range(0, 24, 5)]
    )
    prepared = state_after(a_task(data=stream, batch_size=None, prepare=lambda x: 2 * x + 1), 5).parameters
    assert all(value.equal(prepared[name]) for name, value in in_order.items())


# --- models -------------------------------------------------------------------------------------------------


def test_a_module_instead_of_a_factory_is_copied(tmp_path: Path) -> None:
    module = two_layers()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    task = a_task(model=module, epochs=2)
    first, second = (last_state(trained(task, tmp_path / name)) for name in "ab")
    assert differences(first, second) == []
    assert all(value.equal(before[name]) for name, value in module.state_dict().items())
    assert not first.parameters["0.weight"].equal(before["0.weight"])
    assert state_after(task, 0).parameters["0.weight"].equal(before["0.weight"])


def test_a_factory_that_returns_one_module_again_and_again_is_told() -> None:
    module = two_layers()
    task = a_task(model=lambda: module)
    advance(hotloop.lower(task), 1)
    with pytest.raises(TaskError, match="the same module twice"):
        hotloop.lower(task)


def test_a_factory_that_puts_a_layer_from_outside_into_each_model_is_told() -> None:
    """Such as a backbone that was loaded once: what trains one of the models, or turns it into float64, changes the others."""
    backbone, activation = nn.Linear(6, 4), nn.ReLU()  # which holds nothing
    task = a_task(model=lambda: nn.Sequential(backbone, activation, nn.Linear(4, 3)))
    advance(hotloop.lower(task), 1)
    with pytest.raises(TaskError, match="the same module '0' twice"):
        hotloop.lower(task)
    fresh = a_task(model=lambda: nn.Sequential(nn.Linear(6, 4), activation, nn.Linear(4, 3)))
    assert hotloop.lower(fresh) is not hotloop.lower(fresh)


def test_a_model_without_anything_to_train_is_refused() -> None:
    for model in (nn.Identity, lambda: nn.Linear(6, 3).requires_grad_(False)):
        with pytest.raises(TaskError, match="no trainable parameter"):
            hotloop.lower(a_task(model=model))
