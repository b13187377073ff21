"""Pieces of later batches add up to the batch, as those of the first one do, or training ends with the State saved."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotloop
from hotloop.errors import PartsDifferError
from hotloop.lowering.build import lower
from hotloop.lowering.checks import batch_rows
from hotloop.lowering.checks.batch_rows import LaterBatches, count_padding
from hotloop.parity.float64 import lower_in_float64
from hotloop.plan import BASELINE, Plan

DRAWS = torch.Generator().manual_seed(1)
X, Y = torch.randn(24, 6, 4, generator=DRAWS), torch.randint(0, 3, (24, 6), generator=DRAWS)
PADDED = Y.clone()
for row in range(8, 24):
    PADDED[row, 1 + row % 5 :] = -100
"""The first two batches of 4 have no padding."""


def scores() -> nn.Module:
    return nn.Linear(4, 3)


def flat(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def mean_of_real(model: nn.Module, batch: Any) -> Tensor:
    """The mean over time steps that a mask marks."""
    x, mask = batch
    return ((model(x) - 1).square().mean(-1) * mask).sum() / mask.sum()


def masks(real: Tensor = PADDED != -100) -> Tensor:
    return real.float()


def a_task(loss: Any = flat, data: Any = (X, PADDED), **fields: Any) -> hotloop.Task:
    given: dict[str, Any] = dict(model=scores, optimizer=lambda p: torch.optim.SGD(p, lr=0.5), batch_size=4, epochs=2)
    return hotloop.Task(loss=loss, data=data, shuffle=False, **given | fields)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([value.detach().flatten() for value in model.parameters()])


def by_hand(steps: int, loss: Callable[[nn.Module, Any], Tensor], data: Any) -> Tensor:
    model = a_task().build_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        rows = slice(step % 6 * 4, step % 6 * 4 + 4)
        sgd.zero_grad()
        loss(model, tuple(column[rows] for column in data)).backward()
        sgd.step()
    return weights(model)


MISCOUNTED: dict[str, hotloop.Task] = {
    "ignored targets": a_task(),
    "a mask in a step": a_task(None, (X, masks()), step=mean_of_real),
    "padding of zeros": a_task(
        lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten(), ignore_index=0), (X, torch.where(PADDED < 0, 0, Y + 1)),
        model=lambda: nn.Linear(4, 4),
    ),
    "padding of another number": a_task(
        lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten(), ignore_index=9), (X, torch.where(PADDED < 0, 9, Y)),
    ),
    "a batch by a mapping": a_task(
        None, {"x": X, "mask": masks()}, step=lambda model, batch: mean_of_real(model, (batch["x"], batch["mask"]))
    ),
}  # fmt: skip


@pytest.mark.parametrize("pieces", [2, 4])
@pytest.mark.parametrize("case", MISCOUNTED)
def test_the_first_batch_of_which_pieces_count_otherwise_ends_training_before_its_step(case: str, pieces: int) -> None:
    program = lower(MISCOUNTED[case], Plan(accumulation=pieces))
    with pytest.raises(
        PartsDifferError, match=rf"step 3: accumulation={pieces} changes the gradient .*weight\(batch\)"
    ):
        program.advance(6)
    assert program.position.step == 2
    plain = lower(MISCOUNTED[case])
    plain.advance(2)
    assert torch.allclose(weights(program.model), weights(plain.model), atol=1e-6)


@pytest.mark.parametrize(
    "task",
    [
        a_task(weight=lambda batch: (batch[1] != -100).sum()),
        a_task(nn.CrossEntropyLoss(), (X.permute(0, 2, 1).contiguous(), PADDED), model=lambda: nn.Conv1d(4, 3, 1)),
        a_task(None, (X, masks()), step=mean_of_real, weight=lambda batch: batch[1].sum()),
        a_task(lambda o, t: (o[..., 0] - t).square().mean(), (X, Y.float())),
    ],
    ids=["a weight", "known", "a mask with a weight", "no padding"],
)
def test_what_counts_as_the_loss_divides_is_trained_as_one_process_does(task: hotloop.Task) -> None:
    plain, cut = lower(task), lower(task, Plan(accumulation=2))
    for program in (plain, cut):
        while program.position.epoch < 2:
            program.advance(6)
            program.end_epoch()
    assert torch.allclose(weights(cut.model), weights(plain.model), atol=1e-6)


def test_the_state_before_that_batch_is_saved_and_a_weight_mends_the_run(tmp_path: Path) -> None:
    with pytest.raises(PartsDifferError, match="the State before that step is saved"):
        hotloop.fit(a_task(), run=tmp_path / "run", plan=Plan(accumulation=2), progress=False)
    with pytest.raises(PartsDifferError, match="step 3"):  # not mended yet
        hotloop.fit(a_task(), run=tmp_path / "run", resume=True, progress=False)
    mended = a_task(weight=lambda batch: (batch[1] != -100).sum())
    run = hotloop.fit(mended, run=tmp_path / "run", resume=True, progress=False)
    (resumed, *_) = [event for event in reversed(run.journal()) if event["event"] == "resume"]
    assert resumed["step"] == 2
    expected = by_hand(12, lambda model, batch: flat(model(batch[0]), batch[1]), (X, PADDED))
    assert torch.allclose(weights(hotloop.load_model(run, task=mended, weights="last")), expected, atol=1e-6)


def test_a_loop_of_ones_own_is_checked_too() -> None:
    program = lower(a_task(), Plan(accumulation=2))
    program.step((X[:4], PADDED[:4]))
    with pytest.raises(PartsDifferError, match="step 2"):
        program.step((X[8:12], PADDED[8:12]))


def test_checking_later_batches_draws_nothing_and_trains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    def after() -> tuple[Tensor, Tensor]:
        program = lower(a_task(lambda o, t: o.square().mean(), (X, Y), model=model), Plan(accumulation=2))
        program.advance(6)
        return weights(program.model), torch.get_rng_state()

    compared: list[int] = []
    real = batch_rows.check_accumulation
    monkeypatch.setattr(batch_rows, "check_accumulation", lambda *given: (compared.append(1), real(*given)))
    checked = after()
    assert len(compared) >= 2
    monkeypatch.setattr(LaterBatches, "is_due", lambda *_: False)
    unchecked = after()
    assert all(map(torch.equal, checked, unchecked))


# --- which batches


class Clock:
    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(batch_rows, "time", clock)
    return clock


def compared(later: LaterBatches, clock: Clock, batches: list[Any], step_s: float, check_s: float) -> list[int]:
    found = []
    for number, batch in enumerate(batches, 1):
        if later.is_due(batch):
            found.append(number)
            with later.time_comparison():
                clock.now_s += check_s
        clock.now_s += step_s
    return found


def test_batches_are_compared_at_powers_of_two_and_at_new_padding(clock: Clock) -> None:
    full, padded = torch.ones(4, 3), torch.tensor([[1.0, 1, 0]] * 4)
    later = LaterBatches()
    later.note_first_comparison(full)
    batches = [full] * 5 + [padded] * 2 + [full] * 10
    assert compared(later, clock, batches, step_s=0.01, check_s=0.0) == [2, 4, 6, 8, 16]


def test_comparing_takes_a_hundredth_of_the_time(clock: Clock) -> None:
    later = LaterBatches()
    batches = [torch.randn(4, 3, generator=DRAWS).relu() for _ in range(4000)]
    found = compared(later, clock, batches, step_s=0.01, check_s=0.05)
    assert 0.05 * len(found) <= 0.01 * clock.now_s + batch_rows._FREE_TIME_S
    assert found[:2] == [1, 2]


def test_what_takes_long_is_still_compared_at_the_first_padding(clock: Clock) -> None:
    later = LaterBatches()
    full, padded = torch.ones(4, 3), torch.tensor([[1.0, 1, 0]] * 4)
    later.note_first_comparison(full)
    assert compared(later, clock, [full] * 20 + [padded] * 20, step_s=0.01, check_s=60.0)[:2] == [2, 21]


@pytest.mark.parametrize(
    "padded",
    [
        torch.tensor([[1.0, 2, 0], [1, 2, 3]]),
        torch.tensor([[1.0, 2, -100], [1, 2, 3]]),
        torch.tensor([[1.0, 2, torch.nan], [1, 2, 3]]),
        torch.tensor([[1.0, 7, 7], [1, 2, 3]]),
        torch.tensor([[1.0, 2], [1, 2]]),
    ],
)
def test_padding_of_each_kind_is_seen(padded: Tensor) -> None:
    assert count_padding((padded, 1)) != count_padding((torch.tensor([[1.0, 2, 4], [1, 2, 3]]), 1))


# --- what a loss holds is as wide as the model


WEIGHT = torch.tensor([1.0, 2.0, 5.0])
LABELS = Y[:, 0]


class Own:
    def __init__(self) -> None:
        self.weight = WEIGHT

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, self.weight)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = WEIGHT  # no buffer
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.seen += 1
        return ((output - F.one_hot(target, 3)) @ self.scale).square().mean()


def closed(weight: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: F.cross_entropy(output, target, weight)


def counted(batch: Any) -> Tensor:
    return WEIGHT[batch[1]].sum()


HOLDING: dict[str, dict[str, Any]] = {
    "a cross entropy": dict(loss=nn.CrossEntropyLoss(weight=WEIGHT)),
    "label smoothing": dict(loss=nn.CrossEntropyLoss(label_smoothing=0.1)),
    "a negative log likelihood": dict(loss=nn.NLLLoss(weight=WEIGHT), model=lambda: nn.Sequential(scores(), nn.LogSoftmax(1))),
    "a partial": dict(loss=partial(F.cross_entropy, weight=WEIGHT)),
    "an attribute": dict(loss=Own(), weight=counted),
    "a closure": dict(loss=closed(WEIGHT), weight=counted),
    "a global": dict(loss=lambda o, t: F.cross_entropy(o, t, WEIGHT), weight=counted),
    "a module": dict(loss=Buffered()),
    "pos_weight": dict(
        loss=nn.BCEWithLogitsLoss(pos_weight=WEIGHT), data=(X[:, 0], F.one_hot(LABELS, 3).float())
    ),
    "a cast": dict(loss=lambda o, t: F.cross_entropy(o.float(), t)),
    "a step": dict(loss=None, step=lambda m, b: F.cross_entropy(m(b[0]), b[1], WEIGHT), weight=counted),
}  # fmt: skip


@pytest.mark.parametrize("case", HOLDING)
def test_a_loss_with_tensors_of_its_own_is_trained_in_pieces(case: str) -> None:
    task = a_task(**{"data": (X[:, 0], LABELS)} | HOLDING[case])
    found = []
    for plan in (BASELINE, Plan(accumulation=2)):
        program = lower(task, plan)
        program.advance(6)
        found.append(weights(program.model))
    assert torch.allclose(*found, atol=1e-6)
    exact = lower_in_float64(task, torch.device("cpu"))
    exact.step((X[:4, 0], task.data[1][:4]))
    assert not exact._step.watch.narrowed


def test_trying_pieces_leaves_what_a_loss_counts_as_it_was() -> None:
    task = a_task(Buffered(), (X[:, 0], LABELS))
    program = lower(task, Plan(accumulation=2))
    program.advance(4)
    assert float(program.parts.task.loss.seen) == 8  # type: ignore[union-attr, operator]


def test_a_loss_that_cannot_be_copied_is_trained_in_pieces_and_said() -> None:
    held = (number for number in [1])

    def loss(output: Tensor, target: Tensor) -> Tensor:
        assert held is not None
        return F.cross_entropy(output, target)

    lines: list[str] = []
    program = lower(a_task(loss, (X[:, 0], LABELS)), Plan(accumulation=2), lines.append)
    program.advance(4)
    (line,) = lines
    assert line.startswith("pieces of a batch are no longer compared with the whole batch: held can't be copied")
