"""Work that no gradient comes back to, in loops as people write them: told from what a step needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hotloop.profiler.detectors import wasted_work
from hotloop.profiler.detectors.step import ProfiledStep
from hotloop.profiler.session import make_observers
from tests.support.profiler.profiled_steps import watched

WIDTH, ROWS = 8, 16


class Layer(nn.Module):
    """A layer that does something with what it gives."""

    def __init__(self, work: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.work = nn.Linear(WIDTH, WIDTH), work

    def forward(self, x: Tensor) -> Tensor:
        return self.work(self.linear(x))


def checked(x: Tensor) -> Tensor:
    if torch.isnan(x).any():  # an assertion, pytest would write anew
        raise FloatingPointError
    return x


def masked(x: Tensor) -> Tensor:
    mask = torch.ones(WIDTH, WIDTH).tril()
    return x @ mask


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.scale = x.abs().mean() + 1
        return x / ctx.scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / ctx.scale


def centred(x: Tensor) -> Tensor:
    middle = x.mean(1, keepdim=True)
    return x - middle


def steadied(x: Tensor) -> Tensor:
    middle = x.mean(1, keepdim=True).detach()
    width = x.var(1, keepdim=True).sqrt().detach()
    return (x - middle) / width


LABELS = torch.arange(ROWS) % WIDTH


def labelled(x: Tensor) -> Tensor:
    label = F.one_hot(LABELS, WIDTH).float()
    return x + label


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.aside = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        self.aside(x)
        return self.head(x)


def watched_layers() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
        module.spread = output.std()

    for layer in model:
        layer.register_forward_hook(hook)
    return model


def half_frozen() -> nn.Module:
    frozen = Layer(centred).requires_grad_(False)
    return nn.Sequential(frozen, nn.Linear(WIDTH, WIDTH))


def layers(work: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(Layer(work), Layer(work))


def trained(model: nn.Module, beside: Callable[[Tensor, Tensor], Tensor] | None = None) -> list[str]:
    """What is said of a loop, whose loss may be more than how wrong the answers are."""
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.01, fused=True)

    def loop() -> None:
        for _ in range(40):
            inputs = torch.randn(ROWS, WIDTH)
            outputs = model(inputs)
            loss = F.mse_loss(outputs, inputs)
            if beside is not None:
                loss = loss + beside(inputs, outputs)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    profile = watched(loop, observers=lambda watch: make_observers(watch, None))
    assert profile.step_ms is not None
    return [one.cause.partition(": ")[2] for one in wasted_work.no_grad_work(ProfiledStep(profile, profile.step_ms))]


NAMED = {
    "hooks": (watched_layers, "statistics or checks"),
    "checks": (layers(checked), "statistics or checks"),
    "masks": (layers(masked), "masks, positions"),
    "a head": (Headed, "a part of the network whose graph is discarded"),
}
NEEDED = {
    "a function of one's own": layers(Scaled.apply),
    "what is worked out again": layers(lambda x: checkpoint(centred, x, use_reentrant=False)),
    "a frozen part": half_frozen,
    "what is normalised": layers(steadied),
    "labels": layers(labelled),
}


def most_more(cases: dict[str, object]) -> list[object]:
    """The first in each run of the tests."""
    return [pytest.param(case, marks=[pytest.mark.more] * bool(n)) for n, case in enumerate(cases)]


@pytest.mark.parametrize("case", most_more(dict(NAMED)))
def test_what_no_gradient_comes_back_to_is_named(case: str) -> None:
    model, cause = NAMED[case]
    (found,) = trained(model())
    assert found.startswith(cause)


@pytest.mark.parametrize("case", most_more(dict(NEEDED)))
def test_what_the_gradient_needs_is_not_named(case: str) -> None:
    assert trained(NEEDED[case]()) == []


def test_what_is_kept_is_told_from_what_a_teacher_says() -> None:
    model, teacher = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    bank = torch.zeros(64, WIDTH)

    def beside(inputs: Tensor, outputs: Tensor) -> Tensor:
        nonlocal bank
        bank = torch.cat([bank, outputs.detach()])[-64:]
        with torch.no_grad():
            wanted = teacher(inputs)
        return (outputs - wanted).square().mean() + (outputs @ bank.T).square().mean()

    (found,) = trained(model, beside)
    assert found.startswith("stored tensors are copied at each step")
