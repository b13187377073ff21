"""A trained network put to use: which weights, what it says of new inputs, and how good it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import hotloop
from hotloop.answers import Answers, as_pictures
from hotloop.errors import CheckpointError, DataError, RunError, TaskError
from hotloop.run import Run
from hotloop.task import Computed
from tests.cpu.programs import a_task, labelled, last_state, trained

CPU = torch.device("cpu")


def image_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.LazyLinear(10)
    )


@pytest.fixture(scope="module")
def images() -> hotloop.data.Bundle:
    return hotloop.data.digits()


@pytest.fixture(scope="module")
def digits(tmp_path_factory, images) -> Run:
    """A little trained network with a lazy module, dropout and batch normalisation; it makes mistakes."""
    task = a_task(
        model=image_network,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02),
        data=images,
        batch_size=64,
        epochs=2,
    )
    return trained(task, tmp_path_factory.mktemp("digits") / "run")


def by_hand(run: Run, x: Tensor) -> np.ndarray:
    """The network's output, all samples at once."""
    model = hotloop.load_model(run)
    with torch.no_grad():
        return model(run.task.data.prepare(x)).numpy()


def constant(*values: float) -> Any:
    """A factory of a linear model whose output is its bias, and an optimizer that leaves it alone."""

    def model() -> nn.Module:
        made = nn.Linear(6, len(values))
        nn.init.zeros_(made.weight)
        made.bias = nn.Parameter(torch.tensor(values, dtype=torch.float32))
        return made

    return dict(model=model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))


# --- which weights


def worse_and_worse(**fields: Any) -> hotloop.Task:
    """Validation loss falls, and the Task takes the highest for the best: that of the first epoch."""
    x, y = labelled(40)
    task = dict(data=(x, y), validation=(x, y), monitor="validation_loss", goal="max", epochs=3)
    return a_task(**task | fields)


def test_best_is_the_best_epochs_and_last_the_last(tmp_path) -> None:
    run = trained(worse_and_worse(), tmp_path / "run")
    best, last = hotloop.load_model(run), hotloop.load_model(run, weights="last")
    losses = [epoch["validation_loss"] for epoch in run.epochs]
    assert losses[0] > losses[-1]
    assert hotloop.evaluate(run, on="validation").loss == losses[0]
    assert hotloop.evaluate(run, on="validation", weights="last").loss == losses[-1]
    assert not torch.equal(best.weight, last.weight)
    assert torch.equal(last.weight, last_state(run).parameters["weight"])
    found = hotloop.evaluate(run, on="validation")
    assert (found.weights, found.epoch) == ("best", 1)


def test_without_validation_best_means_the_last_as_in_the_final_figures(tmp_path) -> None:
    x, y = labelled(40)
    run = trained(a_task(data=(x, y), test=(x, y), monitor="train_loss", goal="max", epochs=2), tmp_path / "run")
    found = hotloop.evaluate(run)
    assert (found.weights, found.epoch) == (run.final["weights"], run.final["epoch"]) == ("last", 2)
    assert found.loss == run.final["test_loss"]


@pytest.mark.parametrize("weights", ["best", "last"])
def test_averaged_weights_take_the_place_of_the_parameters(tmp_path, weights) -> None:
    run = trained(worse_and_worse(average=0.9), tmp_path / "run")
    state = last_state(run)
    if weights == "best":
        state = run.checkpoints.load_best(run.checkpoints.newest()[0].best).state
    model = hotloop.load_model(run, weights=weights)
    assert torch.equal(model.weight, state.average["weight"])
    assert not torch.equal(model.weight, state.parameters["weight"])


def test_buffers_are_restored_and_the_model_is_ready_for_use(digits) -> None:
    model = hotloop.load_model(digits)
    assert not any(module.training for module in model.modules())
    assert int(model[1].num_batches_tracked) == digits.final["epoch"] * digits.record.facts.batches


def test_a_damaged_newest_checkpoint_is_passed_over_aloud(tmp_path) -> None:
    run = trained(worse_and_worse(), tmp_path / "run", checkpoint_every="5")
    newest = run.checkpoints.files()[0]
    newest.write_bytes(newest.read_bytes()[:-1])
    said: list[str] = []
    hotloop.load_model(run, weights="last", say=said.append)
    assert len(said) == 1 and newest.name in said[0]
    with pytest.warns(UserWarning, match=newest.name):
        hotloop.load_model(run)


def test_a_run_without_a_checkpoint(tmp_path) -> None:
    run = trained(a_task(), tmp_path / "run")
    for file in run.checkpoints.files():
        file.unlink()
    with pytest.raises(RunError, match=r"has no checkpoint.*train --resume"):
        hotloop.predict(run, labelled()[0])


def test_no_weights_are_taken_for_the_best_when_those_are_gone(tmp_path) -> None:
    run = trained(worse_and_worse(), tmp_path / "run")
    for file in run.checkpoints.best_folder.iterdir():
        file.unlink()
    said: list[str] = []
    with pytest.raises(RunError, match="no good checkpoint for its best weights"):
        hotloop.load_model(run, say=said.append)
    assert "can't be read" in said[0]
    hotloop.load_model(run, weights="last", say=said.append)


@pytest.mark.parametrize("path", ["", "nowhere"])
def test_a_folder_that_is_no_run(tmp_path, path) -> None:
    with pytest.raises(RunError):
        hotloop.load_model(tmp_path / path)


def test_weights_of_another_name(digits) -> None:
    with pytest.raises(RunError, match="'best' or 'last'"):
        hotloop.load_model(digits, weights="newest")


def test_another_task_is_refused(tmp_path) -> None:
    run = trained(a_task(), tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"another model.*'weight'"):
        hotloop.load_model(run, task=a_task(model=lambda: nn.Linear(6, 4)))


def test_a_run_from_python_is_opened_again_with_its_task(tmp_path) -> None:
    task = a_task()
    first = hotloop.predict(trained(task, tmp_path / "run"), labelled()[0])
    with pytest.raises(TaskError, match="trained from Python"):
        hotloop.predict(tmp_path / "run", labelled()[0])
    assert np.array_equal(hotloop.predict(tmp_path / "run", labelled()[0], task=task), first)


def test_the_callers_random_numbers_stay_where_they_were(digits, images) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    hotloop.load_model(digits)
    hotloop.predict(digits, images.test[0][:3])
    hotloop.evaluate(digits)
    assert torch.equal(torch.rand(3), expected)


# --- predict


def test_predict_prepares_and_gives_what_the_model_gives(digits, images) -> None:
    x = images.test[0]
    scores = hotloop.predict(digits, x.numpy())
    assert (scores.shape, scores.dtype) == ((len(x), 10), np.float32)
    np.testing.assert_allclose(scores, by_hand(digits, x), atol=1e-5)


def test_all_forms_of_the_same_inputs_give_the_same(digits, images, tmp_path) -> None:
    x = images.test[0][:20]
    expected = hotloop.predict(digits, x)
    np.save(tmp_path / "x.npy", x.numpy())
    np.savez(tmp_path / "x.npz", anything=x.numpy())
    np.save(tmp_path / "big_endian.npy", x.numpy().astype(">i2"))
    forms: list[Any] = [
        x.numpy(), x.numpy().tolist(), x[:, None], x.numpy()[:, :, ::-1].copy()[:, :, ::-1],
        tmp_path / "x.npy", str(tmp_path / "x.npz"), tmp_path / "big_endian.npy",
    ]  # fmt: skip
    for form in forms:
        assert np.array_equal(hotloop.predict(digits, form), expected)
    np.testing.assert_allclose(hotloop.predict(digits, x.numpy() / 255.0), expected, atol=1e-4)  # float64


def test_a_sample_is_told_the_same_in_any_company(digits, images) -> None:
    x = images.train[0]
    scores = hotloop.predict(digits, x)
    for place in (0, 500, len(x) - 1):
        np.testing.assert_allclose(hotloop.predict(digits, x[place : place + 1])[0], scores[place], atol=1e-5)


def test_a_prepare_that_works_in_place_leaves_the_inputs_alone(tmp_path) -> None:
    run = trained(a_task(prepare=lambda x: x.mul_(2)), tmp_path / "run")
    x = labelled()[0].numpy()
    kept = x.copy()
    expected = hotloop.load_model(run)(torch.from_numpy(2 * kept)).detach().numpy()
    np.save(tmp_path / "x.npy", x)
    for form in (x, tmp_path / "x.npy"):  # a file is mapped into memory that can't be written to
        np.testing.assert_allclose(hotloop.predict(run, form), expected, atol=1e-6)
    assert np.array_equal(x, kept)


def test_long_inputs_are_cut_into_batches_and_progress_is_told(images, tmp_path) -> None:
    x, told, sizes = images.train[0], [], []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            sizes.append(len(x))
            return super().forward(x.flatten(1))

    run = trained(a_task(model=lambda: Watched(784, 10), data=images, batch_size=64), tmp_path / "run")
    sizes.clear()
    hotloop.predict(run, x, progress=lambda done, total: told.append((done, total)))
    assert sum(sizes) == len(x) and max(sizes) < len(x)
    assert told[-1] == (len(x), len(x)) and len(told) == len(sizes)
    assert [done for done, _ in told] == sorted({done for done, _ in told})


def test_predictions_repeat_even_if_the_model_draws(tmp_path) -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.randn(len(x), 3)

    run = trained(a_task(model=lambda: Noisy(6, 3)), tmp_path / "run")
    x = labelled()[0]
    assert np.array_equal(hotloop.predict(run, x), hotloop.predict(run, x))


BAD: dict[str, tuple[Any, str]] = {
    "empty": (np.zeros((0, 28, 28), np.uint8), "empty"),
    "a number": (np.float32(3), "single number"),
    "NaN": (np.full((3, 28, 28), np.nan, np.float32), "sample 0 of x has NaN"),
    "text": (np.array(["a", "b"]), "text"),
    "ragged": ([[1, 2], [3]], "different lengths"),
    "wrong size": (np.zeros((3, 27, 28), np.uint8), r"\(3, 27, 28\).*\(N, 28, 28\)"),
    "one image": (np.zeros((28, 28), np.uint8), r"\(28, 28\)"),
    "twice": ((np.zeros((3, 28, 28)), np.zeros((3, 28, 28))), r"can't take.*\(1, 28, 28\)"),
    "unequal": ((np.zeros((3, 28, 28)), np.zeros((4, 28, 28))), "3, 4 samples"),
    "no file": (Path("nowhere.npy"), "no file nowhere.npy"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_inputs_are_one_clear_line(digits, case) -> None:
    x, says = BAD[case]
    with pytest.raises(DataError, match=says) as error:
        hotloop.predict(digits, x)
    assert "\n" not in str(error.value)


def test_nan_far_down_is_named_by_its_place(digits, images) -> None:
    x = images.train[0] / 255.0
    x[1234, 3, 3] = float("inf")
    with pytest.raises(DataError, match="sample 1234 of x"):
        hotloop.predict(digits, x)


def test_without_prepare_shapes_are_still_looked_at(tmp_path) -> None:
    run = trained(a_task(), tmp_path / "run")
    with pytest.raises(DataError, match=r"\(\).*\(6,\)"):
        hotloop.predict(run, np.zeros(6, np.float32))  # a lone sample: a linear layer would take it
    with pytest.raises(DataError, match=r"float32 \(5,\).*\(6,\)"):
        hotloop.predict(run, np.zeros((2, 5), np.float32))
    with pytest.raises(DataError, match=r"int64 \(6,\)"):
        hotloop.predict(run, np.zeros((2, 6), np.int64))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is no .npy or .npz file"),
        (b"hello", "is no .npy or .npz file"),
        (b"\x93NUMPY\x01\x00v\x00", "damaged"),
        (b"PK\x03\x04 and no more", "damaged"),
    ],
)
def test_files_that_numpy_did_not_write(digits, tmp_path, content, says) -> None:
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(DataError, match=says):
        hotloop.predict(digits, tmp_path / "x.npy")


@pytest.mark.parametrize("write", [np.save, np.savez], ids=["npy", "npz"])
def test_code_in_a_file_does_not_run(digits, tmp_path, write) -> None:
    ran = tmp_path / "ran"

    class Trap:
        def __reduce__(self) -> Any:
            return Path.touch, (ran,)

    path = tmp_path / ("x.npy" if write is np.save else "x.npz")
    write(path, np.array([Trap(), Trap()], dtype=object))
    with pytest.raises(DataError, match="Python objects"):
        hotloop.predict(digits, path)
    assert not ran.exists()


class Output(dict):
    """A dict with attributes, as libraries of transformers return them."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@pytest.mark.parametrize(
    ("wrap", "names"),
    [
        (lambda y: {"a": y, "b": y[:, 0]}, ["a", "b"]),
        (lambda y: (y, y * 2), ["output_0", "output_1"]),
        (lambda y: Output(loss=y.sum(), logits=y, hidden=(y, y)), None),
        (lambda y: y.double(), None),
    ],
    ids=["dict", "tuple", "logits", "float64"],
)
def test_outputs_of_several_kinds(tmp_path, wrap, names) -> None:
    task = a_task(predict=lambda model, x: wrap(model(x)))
    run = trained(task, tmp_path / "run")
    x = labelled()[0]
    plain = hotloop.load_model(run)(x).detach().numpy()
    found = hotloop.predict(run, x)
    if names is None:
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, plain, atol=1e-6)
    else:
        assert list(found) == names
        np.testing.assert_allclose(found[names[0]], plain, atol=1e-6)


def test_whole_numbers_stay_whole(tmp_path) -> None:
    run = trained(a_task(predict=lambda model, x: model(x).argmax(1)), tmp_path / "run")
    assert hotloop.predict(run, labelled()[0]).dtype == np.int64


@pytest.mark.parametrize(
    ("wrap", "says"),
    [
        (lambda y: None, "output is None.*predict"),
        (lambda y: (y, {"x": y}), "'output_1' is a dict"),
        (lambda y: y.sum(), r"has shape \(\)"),
        (lambda y: y[:-1], r"for 24 samples"),
    ],
    ids=["nothing", "nested", "a number", "a row too few"],
)
def test_outputs_that_are_no_row_per_sample(tmp_path, wrap, says) -> None:
    run = trained(a_task(predict=lambda model, x: wrap(model(x))), tmp_path / "run")
    with pytest.raises(TaskError, match=says):
        hotloop.predict(run, labelled()[0])


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(2, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.a(a) + self.b(b)


def test_several_inputs_as_a_tuple_or_in_the_order_of_a_file(tmp_path) -> None:
    x, y = labelled()
    z = x[:, :2] + 1
    run = trained(a_task(model=Two, data=(x, z, y)), tmp_path / "run")
    expected = hotloop.load_model(run)(x, z).detach().numpy()
    np.savez(tmp_path / "x.npz", second_by_name=x.numpy(), first_by_name=z.numpy())
    np.testing.assert_allclose(hotloop.predict(run, (x, z)), expected, atol=1e-6)
    np.testing.assert_allclose(hotloop.predict(run, tmp_path / "x.npz"), expected, atol=1e-6)
    with pytest.raises(DataError, match="holds 1 inputs; expected 2"):
        hotloop.predict(run, x)


def test_inputs_by_name_where_the_data_has_names(tmp_path) -> None:
    x, y = labelled()
    z = x[:, :2] + 1
    task = a_task(
        model=Two,
        data={"a": x, "b": z, "label": y},
        step=lambda model, batch: nn.functional.cross_entropy(model(batch["a"], batch["b"]), batch["label"]),
        predict=lambda model, batch: model(batch["a"], batch["b"]),
    )
    run = trained(task, tmp_path / "run")
    expected = hotloop.load_model(run)(x, z).detach().numpy()
    np.savez(tmp_path / "x.npz", b=z.numpy(), a=x.numpy())
    np.testing.assert_allclose(hotloop.predict(run, {"b": z, "a": x}), expected, atol=1e-6)
    np.testing.assert_allclose(hotloop.predict(run, tmp_path / "x.npz"), expected, atol=1e-6)


# --- evaluate


def test_evaluation_repeats_the_runs_own_figures_bit_by_bit(digits) -> None:
    test, validation = hotloop.evaluate(digits), hotloop.evaluate(digits, on="validation")
    assert (test.on, test.epoch, test.weights) == ("test", digits.final["epoch"], digits.final["weights"])
    assert test.loss == digits.final["test_loss"]
    assert test.metrics == {"accuracy": digits.final["test_accuracy"]}
    epoch = digits.epochs[test.epoch - 1]
    assert (validation.loss, validation.metrics["accuracy"]) == (epoch["validation_loss"], epoch["validation_accuracy"])


def test_confusions_and_classes_agree_with_the_predictions(digits, images) -> None:
    x, y = images.test
    found = hotloop.evaluate(digits)
    said = hotloop.predict(digits, x).argmax(1)
    assert found.samples == len(x)
    assert found.classes == list(images.classes)
    assert np.array_equal(found.confusion, confusion_matrix(y, said, labels=range(10)))
    for place, rate in enumerate(found.accuracy_per_class):
        assert rate == pytest.approx((said[y == place] == place).mean())


def test_the_worst_mistakes_are_the_most_confident_ones_with_their_pictures(digits, images) -> None:
    x, y = images.test[0], images.test[1].numpy()
    found = hotloop.evaluate(digits).mistakes
    probability = torch.from_numpy(hotloop.predict(digits, x)).softmax(1).numpy()
    said, sure = probability.argmax(1), probability.max(1)
    wrong = np.flatnonzero(said != y)
    worst = wrong[np.argsort(-sure[wrong], kind="stable")][: len(found)]
    assert len(found) == min(24, len(wrong)) > 1
    assert [mistake.index for mistake in found] == worst.tolist()
    for mistake in found:
        assert (mistake.true, mistake.predicted) == (y[mistake.index], said[mistake.index])
        assert mistake.confidence == pytest.approx(sure[mistake.index], abs=1e-5)
        picture = np.frombuffer(mistake.picture.pixels, np.uint8).reshape(28, 28)
        assert np.abs(picture.astype(int) - x[mistake.index].numpy()).max() <= 1
    assert "picture" not in found[0].model_dump()


def test_data_of_ones_own(digits, images) -> None:
    named, own = hotloop.evaluate(digits), hotloop.evaluate(digits, data=images.test)
    assert own.on == "data"
    assert own.model_dump(exclude={"on"}) == named.model_dump(exclude={"on"})
    with pytest.raises(DataError, match="one of them"):
        hotloop.evaluate(digits, on="test", data=images.test)


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


def watch(answers: Answers, output: Tensor, target: Tensor, inputs: Tensor | None = None) -> None:
    given = torch.zeros(len(target), 2) if inputs is None else inputs
    answers((given, target), len(target), Computed(torch.zeros(()), output, {}))


def test_the_worst_of_all_batches_are_kept_whatever_their_order() -> None:
    output = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    target = torch.zeros(500, dtype=torch.int64)
    kept = []
    for size in (500, 64, 1):
        answers = Answers(keep=10)
        for rows, labels in zip(output.split(size), target.split(size), strict=True):
            watch(answers, rows, labels)
        kept.append([(mistake.index, mistake.confidence) for mistake in answers.findings()["mistakes"]])
    assert kept[0] == kept[1] == kept[2]
    assert len(kept[0]) == 10


def test_too_many_classes_for_a_matrix_are_said_to_be() -> None:
    answers = Answers()
    watch(answers, torch.randn(5, 1001), torch.zeros(5, dtype=torch.int64))
    found = answers.findings()
    assert "1,001 classes" in found["note"] and "confusion" not in found and found["mistakes"]


def test_pictures_of_unequal_sizes_are_left_out_and_no_mistake_is() -> None:
    answers = Answers()
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
    (picture,) = as_pictures(images.reshape(1, 1, 2, 2))
    assert (picture.height, picture.width, picture.channels) == (2, 2, 1)
    assert list(picture.pixels) == expected


def test_colours_come_last_in_a_picture() -> None:
    image = torch.arange(12, dtype=torch.uint8).reshape(1, 3, 2, 2)
    (picture,) = as_pictures(image)
    assert list(picture.pixels) == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]
