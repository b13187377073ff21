"""What networks of all kinds say of inputs of all kinds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.errors import DataError, TaskError
from tests.support.programs import a_task, labelled, trained


def test_a_prepare_that_works_in_place_leaves_the_inputs_alone(tmp_path) -> None:
    run = trained(a_task(prepare=lambda x: x.mul_(2)), tmp_path / "run")
    x = labelled()[0].numpy()
    kept = x.copy()
    expected = hotloop.load_model(run)(torch.from_numpy(2 * kept)).detach().numpy()
    np.save(tmp_path / "x.npy", x)
    for form in (x, tmp_path / "x.npy"):  # a file is mapped into memory that can't be written to
        np.testing.assert_allclose(hotloop.predict(run, form), expected, atol=1e-6)
    assert np.array_equal(x, kept)


def test_predictions_repeat_even_if_the_model_draws(tmp_path) -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.randn(len(x), 3)

    run = trained(a_task(model=lambda: Noisy(6, 3)), tmp_path / "run")
    x = labelled()[0]
    assert np.array_equal(hotloop.predict(run, x), hotloop.predict(run, x))


def test_without_prepare_shapes_are_still_looked_at(tmp_path) -> None:
    run = trained(a_task(), tmp_path / "run")
    with pytest.raises(DataError, match=r"\(\).*\(6,\)"):
        hotloop.predict(run, np.zeros(6, np.float32))  # a lone sample: a linear layer would take it
    with pytest.raises(DataError, match=r"float32 \(5,\).*\(6,\)"):
        hotloop.predict(run, np.zeros((2, 5), np.float32))
    with pytest.raises(DataError, match=r"int64 \(6,\)"):
        hotloop.predict(run, np.zeros((2, 6), np.int64))


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
