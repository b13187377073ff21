"""Mistakes in Tasks with several optimizers: each is reported in one line."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

import hotloop
from hotloop.errors import HotloopError, TaskError
from tests.lowering.steps.test_alternating_step import NOISE, REAL, Pair, adams, alternate, of, task
from tests.support.programs import assert_resumes, state_after, trained


def yielding(*turns: Any) -> Callable[[Any, Any], Iterator[Any]]:
    def step(model: Any, batch: Any) -> Iterator[Any]:
        for turn in turns:
            yield turn(model, batch) if callable(turn) else turn

    return step


def d_loss(model: Any, batch: Any) -> Any:
    return "d", model.d(batch[0]).mean()


def by_hand(model: Any, batch: Any) -> Any:
    model.d(batch[0]).mean().backward()
    return "d", model.d(batch[0]).mean()


def overlapping(p: Any) -> dict[str, Any]:
    return {"d": Adam(p), "g": SGD(p.where(of("g")), lr=0.1)}


def frozen(model: Any, batch: Any) -> Any:
    model.g.requires_grad_(False)
    return "g", model.d(batch[0]).mean()


MISTAKES: dict[str, tuple[Any, Any, str]] = {
    "another name": (yielding(lambda m, b: ("q", m.d(b[0]).mean())), adams, r"for 'q'; expected one of .* 'd', 'g'"),
    "no generator": (lambda m, b: m.d(b[0]).mean(), adams, r"step returned a Tensor, and .* the optimizers 'd', 'g'"),
    "a mapping": (lambda m, b: {"loss": m.d(b[0]).mean()}, adams, r"step returned a dict"),
    "one optimizer": (alternate, Adam, r"step is a generator, and the Task has one optimizer"),
    "one optimizer, wrapped": (
        lambda m, b: alternate(m, b),
        Adam,
        r"step is a generator, and the Task has one optimizer",
    ),
    "overlap": (alternate, overlapping, r"'d' and 'g' both hold a parameter of shape"),
    "independent": (yielding(d_loss, lambda m, b: ("g", m.d(b[0]).mean())), adams, r"'g' depends on no parameter"),
    "detached": (yielding(lambda m, b: ("d", m.d(b[0]).mean().detach())), adams, r"'d' depends on no parameter"),
    "nothing": (yielding(), adams, r"step yielded no loss"),
    "a loss alone": (yielding(lambda m, b: m.d(b[0]).mean()), adams, r"step yielded a Tensor; expected \(name, loss\)"),
    "a shape": (yielding(lambda m, b: ("d", m.d(b[0]))), adams, r"yielded for 'd' is a tensor of shape \(8, 1\)"),
    "a float": (yielding(("d", 1.0)), adams, r"yielded for 'd' is a float"),
    "a figure's shape": (yielding(lambda m, b: (*d_loss(m, b), {"x": b[0]})), adams, r"'x' of shape \(8, 6\)"),
    "a figure's name": (yielding(lambda m, b: (*d_loss(m, b), {"d_loss": 1})), adams, r"'d_loss', which hotloop"),
    "weight": (yielding(lambda m, b: (*d_loss(m, b), {"weight": 1})), adams, r"'weight', which hotloop counts"),
    "figures": (yielding(lambda m, b: (*d_loss(m, b), 3)), adams, r"an int beside the losses"),
    "backward": (yielding(by_hand), adams, r"step called backward\(\) itself"),
    "frozen": (yielding(frozen), adams, r"whose parameters are all frozen"),
    "a closure": (alternate, lambda p: {**adams(p), "d": torch.optim.LBFGS(p.where(of("d")))}, r"'d' \(LBFGS\)"),
    "empty": (alternate, lambda p: {}, r"an empty dict"),
    "no optimizer": (alternate, lambda p: {"d": 3}, r"a dict with 'd': an int"),
    "a list": (alternate, lambda p: [Adam(p)], r"a list; expected a torch.optim.Optimizer, or a dict"),
    "no parameters": (alternate, lambda p: {"d": Adam(p.where(of("disc")))}, r"empty parameter list"),
    "a broadcast": (
        yielding(lambda m, b: ("d", F.mse_loss(m.d(b[0]), torch.zeros(8)))),
        adams,
        r"outputs of shape \(8, 1\) and targets of shape \(8\)",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(name: str, tmp_path: Path) -> None:
    step, optimizer, said = MISTAKES[name]
    with pytest.raises(HotloopError, match=said) as caught:
        trained(task(step, optimizer), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_several_optimizers_with_a_loss_are_refused(tmp_path: Path) -> None:
    given = dict(model=lambda: nn.Linear(6, 4), loss=nn.MSELoss(), data=(REAL, NOISE[:, 0]))
    a_task = hotloop.Task(**given, optimizer=lambda p: {"a": SGD(p[:1], lr=0.1), "b": SGD(p[1:], lr=0.1)})
    with pytest.raises(TaskError, match=r"several optimizers and a loss\(output, target\)"):
        trained(a_task, tmp_path / "run")


def test_an_error_after_an_update_closes_what_the_step_had_open(tmp_path: Path) -> None:
    closed = []

    def step(model: Any, batch: Any) -> Iterator[Any]:
        try:
            with torch.autocast("cpu", torch.bfloat16):
                yield "d", model.d(batch[0]).float().mean()
                yield "g", model.d(batch[0]).float().mean()
        finally:
            closed.append(torch.is_autocast_enabled("cpu"))

    with pytest.raises(TaskError, match="'g' depends on no parameter"):
        trained(task(step), tmp_path / "run")
    assert closed == [False]
    assert not torch.is_autocast_enabled("cpu")


def test_a_lazy_model_is_built(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = Pair()
        model.d[0] = nn.LazyLinear(8)
        return model

    assert_resumes(task(model=build))


def test_an_optimizer_over_no_part_leaves_it_as_it_is() -> None:
    a_task = task(yielding(d_loss), lambda p: {"d": adams(p)["d"]})
    before, after = state_after(a_task, 0), state_after(a_task, 3)
    moved = {name for name, value in after.parameters.items() if not value.equal(before.parameters[name])}
    assert {name.partition(".")[0] for name in moved} == {"d"}


def test_a_nan_names_the_optimizer_that_made_it(tmp_path: Path) -> None:
    class Broken(SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["params"][0].fill_(torch.nan)

    a_task = task(optimizer=lambda p: {**adams(p), "g": Broken(p.where(of("g")), lr=0.5)}, epochs=2)
    with pytest.raises(HotloopError, match=r"the update by Broken made parameter 'g\.0\.weight' NaN.*now 0\.5"):
        trained(a_task, tmp_path / "run")


def test_the_step_form_of_before_still_returns_a_loss() -> None:
    one = task(lambda model, batch: {"loss": model.d(batch[0]).mean(), "x": 1}, lambda p: Adam(p.where(of("d"))))
    assert "members" not in state_after(copy.deepcopy(one), 2).optimizer
