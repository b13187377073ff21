"""A network trained on digits put to use: what it says of new inputs, which ones it refuses, how good it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix
from torch import Tensor, nn

import hotloop
from hotloop.errors import DataError, RunError
from hotloop.training.run import Run
from tests.support.programs import a_task, trained


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
    model = hotloop.load_model(run)
    with torch.no_grad():
        return model(run.task.data.prepare(x)).numpy()


# --- which weights


def test_buffers_are_restored_and_the_model_is_ready_for_use(digits) -> None:
    model = hotloop.load_model(digits)
    assert not any(module.training for module in model.modules())
    assert int(model[1].num_batches_tracked) == digits.final["epoch"] * digits.record.facts.batches


def test_weights_of_another_name(digits) -> None:
    with pytest.raises(RunError, match="'best' or 'last'"):
        hotloop.load_model(digits, weights="newest")


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
