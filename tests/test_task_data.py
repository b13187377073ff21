"""What a Task promises of all forms of data, and of models."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.core.state import differing_paths
from hotloop.errors import DataError, TaskError
from tests.support.programs import a_task, advance, assert_resumes, labelled, last_state, state_after, trained
from tests.support.tasks.layers_and_samples import AsSamples, two_layers

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
    assert differing_paths(assert_resumes(task), state_after(replace(task, data=ragged()), 7)) == []


def test_collate_is_never_passed_over() -> None:
    def double(samples: list) -> Any:
        x, y = torch.utils.data.default_collate(samples)
        return 2 * x, y

    x, y = labelled()
    expected = state_after(a_task(data=(2 * x, y)), 6)
    for data in ((x, y), TensorDataset(x, y), list(zip(x, y, strict=True)), AsSamples((x, y))):
        assert differing_paths(state_after(a_task(data=data, collate=double), 6), expected) == []


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
        assert differing_paths(state_after(a_task(step=step, **fields), 6), expected) == []


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
        assert differing_paths(state_after(a_task(model=Two, data=data), 7), expected) == []


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
        assert differing_paths(state_after(a_task(data=data, prepare=lambda x: 2 * x + 1), 7), expected) == []
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
    assert differing_paths(first, second) == []
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
