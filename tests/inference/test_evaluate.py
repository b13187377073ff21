"""What an evaluation finds: figures, classes, confusions, mistakes and their pictures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import hotloop
from hotloop.errors import DataError
from hotloop.inference.evaluate import Evaluator, to_pictures
from hotloop.task import StepResult
from tests.support.programs import a_task, labelled, trained


def constant(*values: float) -> Any:
    """A factory of a linear model whose output is its bias, and an optimizer that leaves it alone."""

    def model() -> nn.Module:
        made = nn.Linear(6, len(values))
        nn.init.zeros_(made.weight)
        made.bias = nn.Parameter(torch.tensor(values, dtype=torch.float32))
        return made

    return dict(model=model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))


def test_what_is_evaluated_on_by_default(tmp_path) -> None:
    x, y = labelled()
    run = trained(a_task(data=(x, y), validation=(x[:6], y[:6])), tmp_path / "with")
    assert (hotloop.evaluate(run).on, hotloop.evaluate(run).samples) == ("validation", 6)
    assert hotloop.evaluate(run, on="train").samples == 24
    with pytest.raises(DataError, match="no test data"):
        hotloop.evaluate(run, on="test")
    with pytest.raises(DataError, match=r"'tests'.*test or validation or train"):
        hotloop.evaluate(run, on="tests")
    with pytest.raises(DataError, match="neither test nor validation"):
        hotloop.evaluate(trained(a_task(), tmp_path / "without"))


def test_augmentation_stays_out_of_an_evaluation_on_training_data(tmp_path) -> None:
    x, y = labelled()
    task = a_task(data=(x, y), validation=(x, y), augment=lambda x, draws: x + 10 * draws.normal(*x.shape[1:]))
    run = trained(task, tmp_path / "run")
    assert hotloop.evaluate(run, on="train").loss == hotloop.evaluate(run, on="validation").loss


def test_other_tasks_have_loss_and_metrics_only(tmp_path) -> None:
    x, _ = labelled()
    task = a_task(
        data=(x, x[:, :3]),
        test=(x, x[:, :3]),
        loss=nn.MSELoss(),
        metrics={"largest": lambda output, target: (output - target).abs().amax(1)},
    )
    found = hotloop.evaluate(trained(task, tmp_path / "run"))
    assert list(found.metrics) == ["largest"]
    assert (found.classes, found.confusion, found.mistakes, found.accuracy_per_class) == ([], [], [], [])


def test_a_task_with_a_step_has_its_scalars(tmp_path) -> None:
    def step(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": nn.functional.cross_entropy(model(x), y), "norm": model(x).norm()}

    run = trained(a_task(step=step, test=labelled()), tmp_path / "run")
    found = hotloop.evaluate(run)
    assert (found.loss, found.metrics["norm"]) == (run.final["test_loss"], run.final["test_norm"])
    assert found.classes == []


class Forever(IterableDataset):
    def __iter__(self) -> Any:
        x, y = labelled(100)
        return iter(list(zip(x, y, strict=True)))


def test_a_stream_is_evaluated_in_one_pass_with_the_same_findings(tmp_path) -> None:
    x, y = labelled(100)
    stream = trained(a_task(test=DataLoader(Forever(), batch_size=7)), tmp_path / "stream")
    arrays = trained(a_task(test=(x, y)), tmp_path / "arrays")
    told: list[Any] = []
    one, other = hotloop.evaluate(stream, progress=lambda *seen: told.append(seen)), hotloop.evaluate(arrays)
    assert told[-1] == (100, None)
    assert (one.samples, one.confusion) == (other.samples, other.confusion)
    assert [mistake.index for mistake in one.mistakes] == [mistake.index for mistake in other.mistakes]
    assert one.loss == pytest.approx(other.loss)


def test_targets_at_each_position_count_one_by_one_and_ignored_ones_do_not(tmp_path) -> None:
    target = torch.tensor([[0, 1, -100], [1, 1, 0]]).repeat(4, 1)

    class PerPosition(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.tensor([0.0, 1.0]))

        def forward(self, x: Tensor) -> Tensor:
            return self.bias[None, :, None].expand(len(x), 2, 3)

    data = (torch.zeros(8, 1), target)
    task = a_task(model=PerPosition, data=data, test=data, loss=nn.CrossEntropyLoss(), batch_size=3)
    found = hotloop.evaluate(trained(task, tmp_path / "run"))
    assert found.confusion == [[0, 8], [0, 12]]
    assert found.accuracy_per_class == [0.0, 1.0]
    assert found.mistakes == []


def test_a_class_without_samples_has_no_accuracy(tmp_path) -> None:
    data = (torch.zeros(6, 6), torch.tensor([0, 0, 0, 2, 2, 2]))
    found = hotloop.evaluate(trained(a_task(**constant(1, 0, 0), data=data, test=data), tmp_path / "run"))
    assert found.accuracy_per_class == [1.0, None, 0.0]
    assert [mistake.index for mistake in found.mistakes] == [3, 4, 5]
    assert found.classes == ["0", "1", "2"]


def test_no_mistakes(tmp_path) -> None:
    data = (torch.zeros(6, 6), torch.ones(6, dtype=torch.int64))
    found = hotloop.evaluate(trained(a_task(**constant(0, 1), data=data, test=data), tmp_path / "run"))
    assert found.mistakes == [] and found.metrics["accuracy"] == 1.0


def test_a_label_that_the_model_cannot_put_out_is_named(tmp_path) -> None:
    x, y = labelled()
    run = trained(a_task(), tmp_path / "run")
    with pytest.raises(DataError, match="label 7"):
        hotloop.evaluate(run, data=(x, y.clone().fill_(7)))


def watch(answers: Evaluator, output: Tensor, target: Tensor, inputs: Tensor | None = None) -> None:
    given = torch.zeros(len(target), 2) if inputs is None else inputs
    answers((given, target), len(target), StepResult(torch.zeros(()), output, {}, classified=True))


def test_the_worst_of_all_batches_are_kept_whatever_their_order() -> None:
    output = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    target = torch.zeros(500, dtype=torch.int64)
    kept = []
    for size in (500, 64, 1):
        answers = Evaluator(keep=10)
        for rows, labels in zip(output.split(size), target.split(size), strict=True):
            watch(answers, rows, labels)
        kept.append([(mistake.index, mistake.confidence) for mistake in answers.findings()["mistakes"]])
    assert kept[0] == kept[1] == kept[2]
    assert len(kept[0]) == 10


def test_too_many_classes_for_a_matrix_are_said_to_be() -> None:
    answers = Evaluator()
    watch(answers, torch.randn(5, 1001), torch.zeros(5, dtype=torch.int64))
    found = answers.findings()
    assert "1,001 classes" in found["note"] and "confusion" not in found and found["mistakes"]


def test_pictures_of_unequal_sizes_are_left_out_and_no_mistake_is() -> None:
    answers = Evaluator()
    for size in (8, 9):
        watch(answers, torch.eye(2).repeat(2, 1), torch.tensor([0, 0, 0, 0]), torch.rand(4, 1, size, size))
    found = answers.findings()["mistakes"]
    assert [mistake.index for mistake in found] == [1, 3, 5, 7]
    assert all(mistake.picture is None for mistake in found)


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (torch.tensor([0, 100, 255, 7], dtype=torch.uint8), [0, 100, 255, 7]),
        (torch.tensor([0.0, 0.5, 1.0, 0.2]), [0, 128, 255, 51]),
        (torch.tensor([-1.0, 1.0, 0.0, 0.6]), [0, 255, 128, 204]),
        (torch.full((4,), 3.0), [0, 0, 0, 0]),
    ],
    ids=["bytes", "0 to 1", "standardised", "blank"],
)
def test_numbers_become_pixels(images, expected) -> None:
    (picture,) = to_pictures(images.reshape(1, 1, 2, 2))
    assert (picture.height, picture.width, picture.channels) == (2, 2, 1)
    assert list(picture.pixels) == expected


def test_colours_come_last_in_a_picture() -> None:
    image = torch.arange(12, dtype=torch.uint8).reshape(1, 3, 2, 2)
    (picture,) = to_pictures(image)
    assert list(picture.pixels) == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]
