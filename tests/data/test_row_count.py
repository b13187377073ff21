"""What a batch counts: its rows after `collate`, in the order of dimensions that it has, and in a DataLoader's sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.data.row_count import SecondDimension, count_rows
from hotloop.plan import BASELINE, Plan
from hotloop.task_file import LoadedTask
from tests.support.runs import start_run

DRAWS = torch.Generator().manual_seed(0)
X, Y = torch.randn(12, 4, generator=DRAWS), torch.randn(12, 1, generator=DRAWS)
DOUBT = "the rows of a batch can't be counted with certainty"


def still(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer that changes nothing, so that an epoch's figures are those of the first weights."""
    return torch.optim.SGD(parameters, lr=0.0)


def trained(task: hotloop.Task, path: Path, plan: Plan = BASELINE) -> tuple[Any, nn.Module, list[str]]:
    """The first epoch, the model and what was said."""
    lines: list[str] = []
    if plan.parallel == "none":
        run, _ = start_run(LoadedTask(task, None, {}), run=path / "run", plan=plan, say=lines.append)
    else:
        run = hotloop.fit(task, run=path / "run", plan=plan, progress=False)
    return run.epochs[0], hotloop.load_model(run, task=task, weights="last"), lines


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


COUNTED: dict[str, tuple[Any, int | None, int]] = {
    "left out": ([zeros(3, 3), zeros(3, 1)], 4, 3),
    "nested, left out": ({"x": zeros(3, 5), "more": {"mask": zeros(3, 5)}, "y": zeros(3)}, 4, 3),
    "time first, nothing asked": ((zeros(9, 8, 4), zeros(8, 1)), None, 8),
    "time first, as long as wide": ((zeros(2, 2, 4), zeros(2, 1)), None, 2),
    "time first, inputs and targets": ((zeros(7, 4, 2), zeros(7, 4)), 4, 4),
    "time first, last batch": ((zeros(7, 2, 2), zeros(7, 2)), 2, 2),
    "packed": ((pack_sequence([zeros(3), zeros(2)]), zeros(2)), 3, 2),
    "sequences of several lengths": (([zeros(3, 2), zeros(4, 2), zeros(5, 2)], zeros(3)), 4, 3),
    "images of several sizes": (((zeros(1, 3), zeros(1, 4)), ({"box": zeros(1)}, {"box": zeros(3)})), 3, 2),
    "one graph": ((zeros(50, 16), torch.zeros(2, 120), zeros(50), zeros(8)), 8, 8),
    "several rows a sample": ((zeros(8, 3), zeros(8)), 4, 8),
    "an anchor beside the rows": ({"x": zeros(3, 5), "anchors": zeros(5, 4)}, 3, 3),
}
UNCOUNTED: dict[str, tuple[Any, int]] = {
    "one graph, one left out": ((zeros(50, 16), torch.zeros(2, 120), zeros(50), zeros(7)), 8),
    "either dimension": ((zeros(3, 4), zeros(3, 4)), 4),
    "neither dimension": ({"x": zeros(3, 5), "anchors": zeros(7, 4)}, 4),
}


@pytest.mark.parametrize("case", COUNTED)
def test_rows_are_counted(case: str) -> None:
    batch, asked, rows = COUNTED[case]
    assert count_rows(batch, asked) == (rows, "")


@pytest.mark.parametrize("case", UNCOUNTED)
def test_rows_that_cannot_be_counted_are_those_asked_for(case: str) -> None:
    batch, asked = UNCOUNTED[case]
    found = count_rows(batch, asked)
    assert found.number == asked and found.doubt


def test_a_second_dimension_that_varies_alone_is_in_doubt() -> None:
    watch = SecondDimension()
    assert not watch.doubt((zeros(5, 4, 2), zeros(5, 4)))
    assert "second" in watch.doubt((zeros(5, 3, 2), zeros(5, 3)))
    plain = SecondDimension()
    assert not plain.doubt((zeros(5, 4), zeros(5, 1))) and not plain.doubt((zeros(3, 4), zeros(3, 1)))


# --- an epoch's figures against a plain loop


def leaving_out(samples: list[tuple[Tensor | None, Tensor | None]]) -> dict[str, Tensor]:
    found = [(x, y) for x, y in samples if x is not None and y is not None]
    return {"x": torch.stack([x for x, _ in found]), "y": torch.stack([y for _, y in found])}


def some_broken() -> hotloop.Task:
    data = [(None, None) if number in (1, 2, 7) else (X[number], Y[number]) for number in range(12)]
    return hotloop.Task(
        model=lambda: nn.Linear(4, 1),
        step=lambda model, batch: F.mse_loss(model(batch["x"]), batch["y"]),
        optimizer=still,
        data=data,
        validation=data,
        collate=leaving_out,
        batch_size=4,
        shuffle=False,
    )


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.more)])
def test_samples_that_collate_leaves_out_do_not_count(tmp_path: Path, ranks: int) -> None:
    plan = BASELINE if ranks == 1 else Plan(parallel="data", ranks=ranks)
    epoch, model, lines = trained(some_broken(), tmp_path, plan)
    good = [0, 3, 4, 5, 6, 8, 9, 10, 11]
    expected = F.mse_loss(model(X[good]), Y[good]).item()
    assert epoch["validation_loss"] == pytest.approx(expected, abs=1e-6)
    assert epoch["train_loss"] == pytest.approx(expected, abs=1e-6)
    assert not any(DOUBT in line for line in lines)


@pytest.mark.more
def test_pieces_of_a_batch_with_samples_left_out_learn_as_the_whole(tmp_path: Path) -> None:
    found = []
    for number, plan in enumerate((BASELINE, Plan(accumulation=2))):
        task = replace(some_broken(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        _, model, _ = trained(task, tmp_path / str(number), plan)
        found.append(torch.cat([value.flatten() for value in model.parameters()]))
    assert torch.allclose(*found, atol=1e-6)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.GRU(2, 3), nn.Linear(3, 1)

    def forward(self, x: PackedSequence) -> Tensor:
        _, last = self.cells(x)
        return self.head(last[0])


class PackedBatches:
    """Batches of 5, 2 and 1 sequences."""

    def __iter__(self) -> Iterator[tuple[PackedSequence, Tensor]]:
        for numbers in ([0, 1, 2, 3, 4], [5, 6], [7]):
            sequences = [X[number, :2].repeat(2 + number % 3, 1) for number in numbers]
            yield pack_sequence(sequences, enforce_sorted=False), Y[numbers]


def test_packed_sequences_count_as_many_as_they_hold(tmp_path: Path) -> None:
    batches = list(PackedBatches())
    task = hotloop.Task(
        model=Recurrent, loss=nn.MSELoss(), optimizer=still, data=PackedBatches(), validation=PackedBatches()
    )  # fmt: skip
    epoch, model, _ = trained(task, tmp_path)
    assert pad_packed_sequence(batches[0][0])[0].shape[1] == 5
    expected = torch.cat([(model(x) - y) ** 2 for x, y in batches]).mean().item()
    assert epoch["train_loss"] == pytest.approx(expected, abs=1e-6)
    assert epoch["validation_loss"] == pytest.approx(expected, abs=1e-6)


def test_a_graph_of_which_a_part_was_left_out_asks_for_a_weight(tmp_path: Path) -> None:
    def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        found = samples[1:] if len(samples) > 3 else samples
        nodes = torch.cat([x.repeat(3, 1) for x, _ in found])
        return nodes, torch.arange(len(found)).repeat_interleave(3), torch.stack([y for _, y in found])

    class Pooled(nn.Linear):
        def forward(self, nodes: Tensor, graph: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(torch.zeros(int(graph.max()) + 1, 4).index_add(0, graph, nodes) / 3)

    def task(**fields: Any) -> hotloop.Task:
        given = dict(model=lambda: Pooled(4, 1), loss=nn.MSELoss(), optimizer=still, data=list(zip(X, Y, strict=True)))
        return hotloop.Task(**given | dict(collate=collate, batch_size=5, shuffle=False) | fields)

    _, _, lines = trained(task(), tmp_path / "without")
    assert (
        [line for line in lines if DOUBT in line and "give the Task a weight(batch)" in line]
        == [line for line in lines if DOUBT in line]
        != []
    )
    epoch, model, lines = trained(task(weight=lambda batch: len(batch[-1])), tmp_path / "with")
    kept = [1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    expected = F.mse_loss(F.linear(X[kept], model.weight, model.bias), Y[kept]).item()  # type: ignore[arg-type]
    assert epoch["train_loss"] == pytest.approx(expected, abs=1e-6)
    assert not any(DOUBT in line for line in lines)


# --- evaluation in a DataLoader's batches


def contrast(output: Tensor, target: Tensor) -> Tensor:
    """InfoNCE: each sample against the others of its batch."""
    return F.cross_entropy(output @ target.T, torch.arange(len(output), device=output.device))


PAIRED = TensorDataset(X, torch.randn(12, 3, generator=DRAWS))
EVALUATED = {
    "another size": (DataLoader(PAIRED, batch_size=3), [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]),
    "drop_last": (DataLoader(PAIRED, batch_size=5, drop_last=True), [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]),
    "an own sampler": (DataLoader(PAIRED, batch_size=2, sampler=[4, 2, 0, 7]), [[4, 2], [0, 7]]),
    "own batches": (DataLoader(PAIRED, batch_sampler=[[0, 5], [1, 2, 3, 4]]), [[0, 5], [1, 2, 3, 4]]),
    "own collate": (
        DataLoader(PAIRED, batch_size=4, collate_fn=lambda s: tuple(torch.stack(c).flip(0) for c in zip(*s, strict=True))),
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]],
    ),
    "arrays": (PAIRED.tensors, [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]),
}  # fmt: skip


@pytest.mark.parametrize("case", EVALUATED)
@pytest.mark.parametrize("form", ["loss", "step"])
def test_a_loss_of_the_batch_is_evaluated_in_the_batches_that_were_given(case: str, form: str, tmp_path: Path) -> None:
    data, batches = EVALUATED[case]
    given: dict[str, Any] = {"loss": contrast}
    if form == "step":
        given = {"step": lambda model, batch: contrast(model(batch[0]), batch[1])}
    task = hotloop.Task(
        model=lambda: nn.Linear(4, 3), optimizer=still, data=PAIRED, validation=data, test=data, batch_size=6, **given
    )
    epoch, model, _ = trained(task, tmp_path)
    x, y = PAIRED.tensors
    losses = [float(contrast(model(x[numbers]), y[numbers])) for numbers in batches]
    sizes = [len(numbers) for numbers in batches]
    expected = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
    assert epoch["validation_loss"] == pytest.approx(expected, abs=1e-6)
    assert hotloop.evaluate(tmp_path / "run", task=task, on="test").loss == pytest.approx(expected, abs=1e-6)
    on_data = hotloop.evaluate(tmp_path / "run", task=task, data=data)
    assert on_data.loss == pytest.approx(expected, abs=1e-6)
