"""A last batch of one sample that a model can't take is refused before training, and `drop_last` leaves it out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hotloop
from hotloop.errors import DataError, TaskError
from hotloop.lowering.build import lower
from hotloop.plan import Plan
from tests.support.tasks.sample_data import roles

DRAWS = torch.Generator().manual_seed(0)
X, Y = torch.randn(17, 4, generator=DRAWS), torch.randn(17, 1, generator=DRAWS)
IMAGES = torch.randn(9, 2, 4, 4, generator=DRAWS), torch.randn(9, 1, generator=DRAWS)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


class Squeezed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze().unsqueeze(1)


class Functional(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(super().forward(x), None, None, training=True)


def frozen() -> nn.Module:
    model = normed()
    model[1].eval()  # type: ignore[operator, index]
    return model


def a_task(model: Any = normed, data: Any = (X, Y), **fields: Any) -> hotloop.Task:
    given = dict(optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch_size=4)
    return hotloop.Task(model=model, loss=nn.MSELoss(), data=data, **given | fields)


REFUSED = {
    "a batch norm": a_task(),
    "a function": a_task(lambda: Functional(4, 1)),
    "a squeeze": a_task(lambda: Squeezed(4, 1)),
    "a data set": a_task(data=TensorDataset(X, Y)),
    "samples": a_task(data=list(zip(X, Y, strict=True))),
    "a DataLoader": a_task(data=DataLoader(TensorDataset(X, Y), batch_size=4)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_last_batch_of_one_sample_is_refused_before_training(case: str, tmp_path: Path) -> None:
    says = r"the last batch of each epoch has 1 sample \(17 samples in batches of 4\), on which the model fails .*drop_last=True"
    with pytest.raises(TaskError, match=says):
        hotloop.fit(REFUSED[case], run=tmp_path / "run", plan="baseline", progress=False)
    assert not (tmp_path / "run").exists()


def test_batches_of_one_sample_ask_for_larger_ones() -> None:
    with pytest.raises(TaskError, match=r"batches have 1 sample, .* Use a batch_size of 2 or more"):
        lower(a_task(batch_size=1))


def test_pieces_of_one_sample_are_refused_before_training() -> None:
    with pytest.raises(TaskError, match=r"a part of a batch has 1 sample, .*fewer pieces"):
        lower(a_task(lambda: Squeezed(4, 1), (X[:16], Y[:16])), Plan(accumulation=4))


TAKEN = {
    "drop_last": a_task(drop_last=True),
    "drop_last of the DataLoader": a_task(data=DataLoader(TensorDataset(X, Y), batch_size=4, drop_last=True)),
    "no batch of one": a_task(batch_size=6),
    "no norm": a_task(lambda: nn.Linear(4, 1)),
    "images": a_task(lambda: nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 1)), IMAGES),
    "instance norm": a_task(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 1), nn.InstanceNorm2d(3), nn.Flatten(), nn.Linear(48, 1)), IMAGES
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TAKEN)
def test_what_takes_one_sample_or_gets_none_is_trained(case: str) -> None:
    program = lower(TAKEN[case])
    while not program.advance(100).ended:
        pass
    assert program.position.step > 0


def test_trying_one_sample_changes_neither_the_model_nor_the_draws() -> None:
    def after(task: hotloop.Task) -> tuple[list[Tensor], Tensor]:
        torch.manual_seed(3)
        program = lower(task)
        return [value.clone() for value in program.model.state_dict().values()], torch.rand(3)

    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Dropout(), nn.Flatten(), nn.Linear(48, 1))

    tried, untried = after(a_task(model, IMAGES)), after(a_task(model, IMAGES, batch_size=3))
    assert all(map(torch.equal, tried[0], untried[0]))
    assert torch.equal(tried[1], untried[1])


def test_a_norm_that_the_factory_froze_is_tried_as_built() -> None:
    lower(a_task(frozen))


# --- drop_last


def test_drop_last_leaves_an_incomplete_batch_out_as_a_plain_loop_does(tmp_path: Path) -> None:
    task = a_task(drop_last=True, shuffle=False, epochs=2)
    run = hotloop.fit(task, run=tmp_path / "run", plan="baseline", progress=False)
    model = task.build_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in [*DataLoader(TensorDataset(X, Y), batch_size=4, drop_last=True)] * 2:
        sgd.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        sgd.step()
    found = hotloop.load_model(run, task=task, weights="last").state_dict()
    for name, value in model.state_dict().items():
        assert torch.allclose(found[name], value, atol=1e-6), name
    assert [epoch["samples"] for epoch in run.epochs] == [16, 16]


@pytest.mark.parametrize(
    ("asked", "loader", "batches"), [(None, True, 4), (False, True, 5), (True, False, 4), (None, False, 5)]
)
def test_the_task_says_so_or_else_the_loader(asked: bool | None, loader: bool, batches: int) -> None:
    given = roles(DataLoader(TensorDataset(X, Y), batch_size=4, drop_last=loader), drop_last=asked)
    assert given.batches == batches


def test_an_iterable_data_set_is_cut_so_too() -> None:
    class Counted(IterableDataset):
        def __iter__(self) -> Any:
            return iter(zip(X, Y, strict=True))

    program = lower(a_task(data=Counted(), drop_last=True))
    assert program.advance(100).steps == 4


def test_batches_of_ones_own_are_none_to_drop() -> None:
    with pytest.raises(DataError, match="drop_last=True, and data cuts its batches itself"):
        lower(a_task(data=DataLoader(TensorDataset(X, Y), batch_sampler=[[0, 1], [2]]), drop_last=True))


def test_it_is_no_number() -> None:
    with pytest.raises(TaskError, match="drop_last='yes'; expected True or False"):
        a_task(drop_last="yes")


def test_a_run_knows_whether_it_dropped_the_last_batch(tmp_path: Path) -> None:
    plain = roles((X, Y), batch_size=4)
    assert roles((X, Y), batch_size=4, drop_last=False).digest == plain.digest
    assert roles((X, Y), batch_size=4, drop_last=True).digest != plain.digest


def test_a_batch_of_one_that_comes_unforeseen_names_the_way_out(tmp_path: Path) -> None:
    data = DataLoader(TensorDataset(X, Y), batch_sampler=[[0, 1], [2, 3], [4]])
    with pytest.raises(DataError, match=r"step 3 .*a batch has one value for each channel in .*drop_last"):
        hotloop.fit(a_task(data=data, batch_size=None), run=tmp_path / "run", plan="baseline", progress=False)
