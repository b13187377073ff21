"""What a Task promises of losses, metrics and figures of a step, against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotloop
from hotloop.core.state import differing_paths
from hotloop.errors import TaskError
from hotloop.lowering.evaluation import evaluate
from tests.support.programs import a_task, advance, assert_resumes, labelled, state_after, trained
from tests.support.tasks.layers_and_samples import AsSamples, two_layers


def still(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer that changes nothing, so that an epoch's figures are those of the first weights."""
    return torch.optim.SGD(parameters, lr=0.0)


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


@pytest.mark.few(
    "ignored by the function-arrays",
    "ignored class-arrays",
    "class weights-arrays",
    "likelihood-arrays",
    "probabilities-arrays",
)
@pytest.mark.parametrize("as_samples", [False, pytest.param(True, marks=pytest.mark.more)], ids=["arrays", "samples"])
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
    plain = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731 - decay alone would move them
    task = a_task(model=pointwise, data=(x, torch.full_like(y, -100)), optimizer=plain)
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
    assert differing_paths(with_looks.state(), without.state()) == []
    assert differing_paths(state_after(task, 4), state_after(task, 4)) == []
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
        ({"loss": 1.0, "weight": 2.0}, "step returned 'weight', which hotloop counts itself"),
        ({"loss": 1.0, "samples": 5}, "step returned 'samples', which hotloop counts itself"),
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
