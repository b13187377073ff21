"""Losses that can't be meant: refused or said on the first batch; and an accuracy only where there certainly is one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotloop
from hotloop.errors import HotloopError, TaskError
from hotloop.lowering import eager_step
from hotloop.lowering.build import lower
from hotloop.lowering.evaluation import evaluate
from hotloop.plan import BASELINE, Plan

DRAWS = torch.Generator().manual_seed(0)
X = torch.randn(24, 4, generator=DRAWS)
LABELS = torch.randint(0, 3, (24,), generator=DRAWS)
VALUES = torch.rand(24, generator=DRAWS)


def a_task(loss: Any, data: Any, width: int = 1, *after: nn.Module, **fields: Any) -> hotloop.Task:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, width), *after)

    given = dict(optimizer=lambda p: torch.optim.SGD(p, lr=0.01), batch_size=6, shuffle=False)
    return hotloop.Task(model=model, loss=loss, data=data, **given | fields)


def said(task: hotloop.Task, plan: Plan = BASELINE, steps: int = 1) -> list[str]:
    lines: list[str] = []
    lower(task, plan, lines.append).advance(steps)
    return lines


# --- shapes


def gaussian(output: Tensor, target: Tensor) -> Tensor:
    return F.gaussian_nll_loss(output, target, torch.ones_like(output))


BROADCAST: dict[str, Any] = {
    "MSELoss": nn.MSELoss(),
    "L1Loss": nn.L1Loss(),
    "SmoothL1Loss": nn.SmoothL1Loss(),
    "HuberLoss": nn.HuberLoss(),
    "PoissonNLLLoss": nn.PoissonNLLLoss(),
    "gaussian_nll_loss": gaussian,
    "HingeEmbeddingLoss": nn.HingeEmbeddingLoss(),
    "SoftMarginLoss": nn.SoftMarginLoss(),
    "KLDivLoss": nn.KLDivLoss(),
    "BCEWithLogitsLoss": nn.BCEWithLogitsLoss(),
    "MultiLabelSoftMarginLoss": nn.MultiLabelSoftMarginLoss(),
    "lambda": lambda output, target: F.poisson_nll_loss(output, target + 1),
    "each squared": lambda output, target: F.mse_loss(output, target, reduction="none").mean(),
}


@pytest.mark.parametrize("name", BROADCAST)
@pytest.mark.parametrize("plan", [BASELINE, Plan(accumulation=2)], ids=["whole", "pieces"])
def test_outputs_that_are_compared_with_all_targets_are_refused(name: str, plan: Plan) -> None:
    with pytest.raises(
        TaskError, match=r"the loss got outputs of shape \(6, 1\) and targets of shape \(6\); expected equal"
    ):
        said(a_task(BROADCAST[name], (X, VALUES)), plan)


def test_targets_of_another_axis_are_refused_where_the_sizes_fit_by_chance() -> None:
    with pytest.raises(TaskError, match=r"outputs of shape \(6, 6\) and targets of shape \(6\)"):
        said(a_task(lambda output, target: F.huber_loss(output, target.double()), (X, VALUES), 6))


MEANT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a number": lambda output, target: F.huber_loss(output, torch.tensor(0.5)),
    "a number in a list": lambda output, target: F.huber_loss(output, torch.full((1,), 0.5)),
    "one target for all columns": lambda output, target: F.l1_loss(output, (target + 0)[:, None]),
    "a distribution for all rows": lambda output, target: F.kl_div(output.log_softmax(1), torch.full((5,), 0.2)),
    "pairs": lambda output, target: (output[:, :1] - target[None] * 2).square().mean(),
}


@pytest.mark.parametrize("name", MEANT)
@pytest.mark.filterwarnings("ignore:Using a target size", "ignore:reduction")
def test_what_is_broadcast_on_purpose_is_trained(name: str) -> None:
    assert not said(a_task(MEANT[name], (X, VALUES), 5))


# --- values


DOUBTFUL: dict[str, tuple[hotloop.Task, str]] = {
    "no logarithms": (a_task(nn.NLLLoss(), (X, LABELS), 3), "the logarithm of a probability is at most 0"),
    "softmax": (a_task(nn.CrossEntropyLoss(), (X, LABELS), 3, nn.Softmax(1)), "takes their softmax once more"),
    "softmax, in a step": (
        a_task(None, (X, LABELS), 3, step=lambda m, b: F.cross_entropy(m(b[0]).softmax(-1), b[1])),
        "takes their softmax once more",
    ),
    "sigmoid": (
        a_task(nn.BCEWithLogitsLoss(), (X, VALUES.round()[:, None]), 1, nn.Sigmoid()),
        "the result of a sigmoid: leave that out",
    ),
    "sigmoid, squeezed": (
        a_task(
            lambda o, t: F.binary_cross_entropy_with_logits(o.squeeze(1), t), (X, VALUES.round()), 1, nn.Sigmoid()
        ),
        "the result of a sigmoid: leave that out",
    ),
    "numbers of classes": (
        a_task(nn.MSELoss(), (X, LABELS), 1, nn.Flatten(0), classes=("cat", "dog", "fox")),
        "mse_loss compares the numbers of classes",
    ),
    "a difference by hand": (
        a_task(lambda output, target: (output - target).square().mean(), (X, VALUES)),
        "compares each output with the targets of all samples",
    ),
    "a sum": (a_task(lambda o, t: F.mse_loss(o, t, reduction="sum"), (X, VALUES[:, None])), "is a sum over the batch"),
    "a sum by hand": (a_task(lambda o, t: ((o - t) ** 2).sum(), (X, VALUES[:, None])), "is a sum over the batch"),
    "a sum over rows": (
        a_task(lambda o, t: ((o - t) ** 2).sum(0).mean(), (X, VALUES[:, None].expand(-1, 2)), 2),
        "is a sum over the batch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DOUBTFUL)
def test_a_loss_that_cannot_be_meant_is_said_once(name: str) -> None:
    task, says = DOUBTFUL[name]
    lines = said(task, steps=3)
    assert len(lines) == 1 and says in lines[0]


class Margins(nn.Module):
    """A loss that counts its calls, as one that is warmed up."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return (output - target).abs().mean() * self.calls


HARMLESS: dict[str, hotloop.Task] = {
    "cross entropy": a_task(nn.CrossEntropyLoss(), (X, LABELS), 3),
    "log_softmax before a cross entropy": a_task(nn.CrossEntropyLoss(), (X, LABELS), 3, nn.LogSoftmax(1)),
    "log_softmax": a_task(nn.NLLLoss(), (X, LABELS), 3, nn.LogSoftmax(1)),
    "logits": a_task(nn.BCEWithLogitsLoss(), (X, VALUES.round()[:, None])),
    "probabilities": a_task(nn.BCELoss(), (X, VALUES.round()[:, None]), 1, nn.Sigmoid()),
    "an order of labels": a_task(nn.MSELoss(), (X, LABELS), 1, nn.Flatten(0)),
    "Brier": a_task(lambda o, t: F.mse_loss(o.softmax(1), F.one_hot(t, 3).float()), (X, LABELS), 3),
    "a mean by hand": a_task(lambda o, t: ((o - t) ** 2).sum() / len(t), (X, VALUES[:, None])),
    "contrast": a_task(lambda o, t: F.cross_entropy(o @ o.T, torch.arange(len(o))), (X, VALUES), 3),
    "counting": a_task(Margins(), (X, VALUES[:, None])),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_loss_that_is_meant_is_trained_without_a_word(name: str) -> None:
    assert not said(HARMLESS[name], steps=2)


def test_logits_for_a_loss_of_probabilities_are_refused() -> None:
    with pytest.raises(TaskError, match=r"binary_cross_entropy got outputs from .* Use BCEWithLogitsLoss"):
        said(a_task(nn.BCELoss(), (X, VALUES.round()[:, None])))


# --- trying a loss changes nothing


def test_a_loss_is_tried_on_a_copy_with_the_draws_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def after_a_step() -> tuple[list[float], Tensor]:
        seen: list[float] = []

        def loss(output: Tensor, target: Tensor) -> Tensor:
            seen.append(float(torch.rand(())))
            return (output - target).square().mean() * seen[-1]

        program = lower(a_task(loss, (X, VALUES[:, None])))
        program.advance(1)
        return seen, torch.get_rng_state()

    def untried(*_: Any) -> str:
        tried.append(1)
        return ""

    seen, draws = after_a_step()
    monkeypatch.setattr(eager_step, "check_loss_sum", untried)
    without, as_before = after_a_step()
    assert tried == [1]
    assert seen == without and len(seen) == 1
    assert torch.equal(draws, as_before)


def test_a_loss_that_cannot_be_copied_is_not_tried_and_said() -> None:
    held = iter([1.0])  # an iterator is copied; a generator is not
    generator = (value for value in held)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        assert generator is not None
        return (output - target).square().mean()

    (line,) = said(a_task(loss, (X, VALUES[:, None])))
    assert line.startswith("the test for a loss that is a sum over the batch is left out: generator can't be copied")


@pytest.mark.parametrize("plan", [Plan(accumulation=2)], ids=["pieces"])
def test_a_sum_over_the_batch_is_not_learnt_in_pieces(plan: Plan) -> None:
    with pytest.raises(HotloopError, match=r"accumulation=2 changes the gradient .*weight\(batch\)"):
        said(a_task(lambda o, t: ((o - t) ** 2).sum(), (X, VALUES[:, None])), plan)


# --- an accuracy only of a classification


def accuracy(task: hotloop.Task) -> float | None:
    program = lower(task)
    source = task.roles.validation
    assert source is not None
    return evaluate(program, source).values.get("accuracy")


TOKENS = torch.randint(0, 6, (24, 6), generator=DRAWS)


def tokens(loss: Any) -> hotloop.Task:
    return hotloop.Task(
        model=lambda: nn.Embedding(6, 6),
        loss=loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        data=(TOKENS, (TOKENS + 1) % 6),
        validation=(TOKENS, (TOKENS + 1) % 6),
        batch_size=6,
    )


def flat(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def turned(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.transpose(1, 2), target)


def focal(output: Tensor, target: Tensor) -> Tensor:
    chosen = output.log_softmax(1).gather(1, target[:, None])
    return -((1 - chosen.exp()) ** 2 * chosen).mean()


def quantiles(output: Tensor, target: Tensor) -> Tensor:
    return (output - target[:, None]).abs().mean()


@pytest.mark.parametrize("loss", [flat, turned])
def test_as_many_classes_as_time_steps_are_not_guessed_at(loss: Any) -> None:
    assert accuracy(tokens(loss)) is None


@pytest.mark.parametrize(
    ("loss", "width", "known"),
    [
        (nn.CrossEntropyLoss(), 3, True),
        (lambda o, t: F.cross_entropy(o, t, label_smoothing=0.1), 3, True),
        (lambda o, t: F.cross_entropy(o.double(), t), 3, True),
        (nn.MultiMarginLoss(), 3, True),
        (focal, 3, True),
        (quantiles, 3, False),
        (lambda o, t: F.binary_cross_entropy_with_logits(o[:, 0], (t > 0).float()), 1, False),
    ],
)
def test_an_accuracy_is_that_of_the_classes_which_the_loss_compares(loss: Any, width: int, known: bool) -> None:
    task = a_task(loss, (X, LABELS), width, validation=(X, LABELS))
    with torch.no_grad():
        expected = float((task.build_model()(X).argmax(1) == LABELS).float().mean())
    assert accuracy(task) == (pytest.approx(expected) if known else None)


def test_no_confusions_are_counted_where_there_are_no_classes(tmp_path: Path) -> None:
    task = tokens(flat)
    run = hotloop.fit(task, run=tmp_path / "run", plan="baseline", progress=False)
    found = hotloop.evaluate(run, task=task, on="validation")
    assert not found.metrics and not found.confusion
