"""Schedulers that have others inside: torch's resume exactly, one whose state would be lost is refused before training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import SWALR

from hotloop.errors import TaskError
from tests.support.programs import a_task, assert_resumes, trained


class Warmup(LRScheduler):
    """As in warm-up packages: another scheduler takes over, and torch's state_dict() has the object itself."""

    def __init__(self, optimizer: Any, after_scheduler: Any, steps: int = 2) -> None:
        self.after_scheduler, self.steps = after_scheduler, steps
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        if self.last_epoch <= self.steps:
            return [base * (self.last_epoch + 1) / (self.steps + 1) for base in self.base_lrs]
        return self.after_scheduler.get_last_lr()

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch > self.steps and self.after_scheduler is not None:
            self.after_scheduler.step()
        super().step()


class Forgetful(Warmup):
    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "after_scheduler"}


class Thorough(Forgetful):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"after": self.after_scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)
        self.after_scheduler.load_state_dict(state_dict.pop("after"))
        super().load_state_dict(state_dict)


class Wrapper:
    """No scheduler of torch's, with others in a list in a dict."""

    def __init__(self, optimizer: Any, *inner: Any) -> None:
        self.optimizer, self.inner = optimizer, {"of": list(inner)}

    def step(self) -> None:
        for one in self.inner["of"]:
            one.step()

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "wrapper"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class Settings:
    rate = 0.5


class Configured(ExponentialLR):
    def __init__(self, optimizer: Any) -> None:
        self.settings = Settings()
        super().__init__(optimizer, 0.9)


class Halving:
    """A factor with a state of its own, which torch saves."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 0.5**self.calls


EXACT: dict[str, Callable[[Any], Any]] = {
    "sequential": lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=2), CosineAnnealingLR(o, 9)], milestones=[2]),
    "chained": lambda o: ChainedScheduler([ConstantLR(o, 0.1, total_iters=4), ExponentialLR(o, 0.9)], optimizer=o),
    "a sequence in a chain": lambda o: ChainedScheduler(
        [SequentialLR(o, [LinearLR(o, 0.1, total_iters=2), StepLR(o, 2)], milestones=[2]), ExponentialLR(o, 0.9)]
    ),
    "functions in a sequence": lambda o: SequentialLR(
        o, [LambdaLR(o, lambda step: 0.5**step), MultiplicativeLR(o, lambda step: 0.9)], milestones=[4]
    ),
    "averaging at the end": lambda o: SequentialLR(o, [ExponentialLR(o, 0.9), SWALR(o, 0.01, anneal_epochs=3)], [4]),
    "one cycle in a chain": lambda o: ChainedScheduler([OneCycleLR(o, 0.1, total_steps=20), ExponentialLR(o, 0.99)]),
    "an object with a state": lambda o: LambdaLR(o, Halving()),
    "saved by the user": lambda o: Thorough(o, CosineAnnealingLR(o, 9)),
    "nothing inside": lambda o: Warmup(o, None, steps=50),
}

LOST: dict[str, tuple[Callable[[Any], Any], str]] = {
    "as an attribute": (lambda o: Warmup(o, CosineAnnealingLR(o, 9)), r"CosineAnnealingLR in Warmup\.after_scheduler"),
    "left out": (lambda o: Forgetful(o, StepLR(o, 3)), r"StepLR in Forgetful\.after_scheduler"),
    "a plateau": (lambda o: Forgetful(o, ReduceLROnPlateau(o)), r"ReduceLROnPlateau in Forgetful"),
    "in a list": (lambda o: Wrapper(o, StepLR(o, 3)), r"StepLR in Wrapper\.inner\['of'\]\[0\]"),
    "two deep": (
        lambda o: SequentialLR(o, [LinearLR(o), Forgetful(o, StepLR(o, 3))], milestones=[2]),
        r"StepLR in SequentialLR\._schedulers\[1\]\.after_scheduler",
    ),
    "by name": (lambda o: {"a": ExponentialLR(o, 0.9), "b": Forgetful(o, StepLR(o, 3))}, r"StepLR in Forgetful"),
    "another object": (Configured, r"Configured\) has a Settings in it, which no checkpoint can hold"),
}


@pytest.mark.parametrize("name", EXACT)
def test_the_schedule_goes_on_exactly(name: str) -> None:
    assert_resumes(a_task(schedule=EXACT[name], epochs=4))


@pytest.mark.parametrize("name", LOST)
def test_what_would_be_lost_is_refused_before_training(name: str, tmp_path: Path) -> None:
    schedule, said = LOST[name]
    with pytest.raises(TaskError, match=said) as caught:
        trained(a_task(schedule=schedule), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_the_look_at_it_leaves_it_as_it_was() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    made = EXACT["a sequence in a chain"](optimizer)
    before = made.state_dict()
    a_task(schedule=lambda o: made).build_schedule(optimizer, 5)
    assert made.state_dict() == before


def test_a_schedule_without_a_state_is_refused() -> None:
    class Bare:
        def step(self) -> None: ...

    with pytest.raises(TaskError, match=r"returned a Bare; expected a torch\.optim\.lr_scheduler"):
        a_task(schedule=lambda o: Bare()).build_schedule(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]), 5)
