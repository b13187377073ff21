"""The alternatives of docs/reference/limits.md for what a Task cannot express resume exactly, or report why not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import hotloop
from hotloop.errors import TrainingError
from tests.support.programs import a_task, assert_resumes, trained


class Recurrent(nn.Module):
    """Carries its state from batch to batch in a buffer."""

    def __init__(self, detaches: bool) -> None:
        super().__init__()
        self.rnn, self.out, self.detaches = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 1), detaches
        self.register_buffer("hidden", torch.zeros(1, 4, 8))

    def forward(self, x: Tensor) -> Tensor:
        y, hidden = self.rnn(x, self.hidden)
        self.hidden = hidden.detach() if self.detaches else hidden
        return self.out(y[:, -1])


def carrying(detaches: bool) -> hotloop.Task:
    x = torch.randn(20, 5, 3, generator=torch.Generator().manual_seed(0))
    given: dict[str, Any] = dict(data=(x, x.sum((1, 2))[:, None]), batch_size=4, shuffle=False, loss=nn.MSELoss())
    return a_task(model=lambda: Recurrent(detaches), optimizer=Adam, **given)


def test_a_state_that_is_carried_in_a_buffer_resumes_exactly() -> None:
    assert_resumes(carrying(detaches=True))


def test_a_state_with_its_graph_is_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"step 2 .*backward through the graph a second time"):
        trained(carrying(detaches=False), tmp_path / "run")


def test_an_optimizer_that_requires_a_closure_gets_one() -> None:
    class Sharp(SGD):
        @torch.no_grad()
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            with torch.enable_grad():
                loss = closure()
            values = self.param_groups[0]["params"]
            before = [value.clone() for value in values]
            for value in values:
                value.add_(value.grad, alpha=0.01)
            with torch.enable_grad():
                closure()
            for value, kept in zip(values, before, strict=True):
                value.copy_(kept)
            super().step()
            return loss

    assert_resumes(a_task(optimizer=lambda p: Sharp(p, lr=0.1, momentum=0.9)))


def in_a_closure(p: Any) -> torch.optim.Optimizer:
    """An optimizer for each layer, as in torch's tutorial."""
    own = {value: Adam([value], lr=1e-2) for value in p}

    def hook(value: Tensor) -> None:
        own[value].step()
        own[value].zero_grad()

    for value in p:
        value.register_post_accumulate_grad_hook(hook)
    return SGD(p, lr=0.0)


def in_defaults(p: Any) -> torch.optim.Optimizer:
    for value in p:
        own = Adam([value], lr=1e-2)
        value.register_post_accumulate_grad_hook(lambda value, own=own: own.step())
    return SGD(p, lr=0.0)


def in_a_method(p: Any) -> torch.optim.Optimizer:
    class Updates:
        def __init__(self, value: Tensor) -> None:
            self.own = [Adam([value])]

        def take(self, value: Tensor) -> None:
            self.own[0].step()

    for value in p:
        value.register_post_accumulate_grad_hook(Updates(value).take)
    return SGD(p, lr=0.0)


def in_a_partial(p: Any) -> torch.optim.Optimizer:
    def take(own: Any, value: Tensor) -> None:
        own.step()

    for value in p:
        value.register_post_accumulate_grad_hook(partial(take, Adam([value])))
    return SGD(p, lr=0.0)


def without_one(p: Any) -> torch.optim.Optimizer:
    for value in p:
        value.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return SGD(p, lr=0.1)


@pytest.mark.parametrize("optimizer", [in_a_closure, in_defaults, in_a_method, in_a_partial])
def test_an_optimizer_for_each_layer_is_told_not_to_be_saved(optimizer: Any, tmp_path: Path) -> None:
    facts = trained(a_task(optimizer=optimizer), tmp_path / "run").record.facts
    assert not facts.exact
    assert facts.inexact == ["a hook on a parameter's gradient has an optimizer (Adam), whose state is not saved"]


def test_a_hook_without_one_is_exact(tmp_path: Path) -> None:
    assert trained(a_task(optimizer=without_one), tmp_path / "run").record.facts.exact
