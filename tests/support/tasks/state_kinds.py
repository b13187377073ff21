"""Tasks of which each has one kind of state that a resumed run could get wrong; see `bench/kill_kinds.py`.

    hotloop train tests/support/tasks/state_kinds.py:gan --run runs/gan
    hotloop train tests/support/tasks/state_kinds.py:gan -p marks=FOLDER       also notes there, byte by byte, the steps begun

Each is small: 10 steps an epoch, each of about a millisecond.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer

import hotloop

STEPS_PER_EPOCH = 10
_SAMPLES, _BATCH, _FEATURES, _CLASSES = 80, 8, 12, 4
_CALLS = {"module": 0}


def _given(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(samples, _FEATURES, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :_CLASSES].argmax(1)


def _network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(_FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, _CLASSES)
    )


def _classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _task(step: Callable[[nn.Module, Any], Any], marks: str, **fields: Any) -> hotloop.Task:
    """A Task that notes in the folder `marks` the steps and evaluations begun."""

    def noted(model: nn.Module, batch: Any) -> Any:
        if marks:
            _mark(Path(marks), "steps" if model.training else "evaluation")
            _wait(Path(marks))
        return step(model, batch)

    given: dict[str, Any] = dict(
        model=_network,
        step=noted,
        optimizer=lambda parameters: Adam(parameters, lr=5e-3),
        data=_given(_SAMPLES, 1),
        validation=_given(24, 2),
        test=_given(24, 3),
        batch_size=_BATCH,
        seed=3,
    )
    return hotloop.Task(**given | fields)


def _mark(folder: Path, name: str) -> None:
    """Adds a byte to a file, at once and in one piece: what a killed process did stays known."""
    descriptor = os.open(folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, b".")
    os.close(descriptor)


def _wait(folder: Path) -> None:
    """Waits where a file `held` has fewer bytes than steps were begun."""
    with suppress(FileNotFoundError):
        while (folder / "held").stat().st_size < (folder / "steps").stat().st_size:
            time.sleep(0.001)


# --- optimizers with a state_dict of their own


class Lookahead(Optimizer):
    """Zhang et al. 2019: after every few steps of another optimizer, slow weights move towards the fast ones."""

    def __init__(self, base: Optimizer, every: int = 3, share: float = 0.5) -> None:
        super().__init__([value for group in base.param_groups for value in group["params"]], {})
        self.base, self.every, self.share, self.count = base, every, share, 0
        self.param_groups = base.param_groups
        self.slow = [value.detach().clone() for group in self.param_groups for value in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.base.step()
        self.count += 1
        if self.count % self.every == 0:
            fast = [value for group in self.param_groups for value in group["params"]]
            for slow, value in zip(self.slow, fast, strict=True):
                slow.lerp_(value, self.share)
                value.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state_dict: Any) -> None:
        self.base.load_state_dict(state_dict["base"])
        self.param_groups, self.count = self.base.param_groups, state_dict["count"]
        self.slow = [value.clone() for value in state_dict["slow"]]


class ScheduleFree(Optimizer):
    """Defazio et al. 2024: evaluation takes an average of the weights, which `eval()` puts in their place."""

    def __init__(self, parameters: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "steps": 0, "trains": True})

    @torch.no_grad()
    def _move(self, *, trains: bool) -> None:
        for group in self.param_groups:
            if group["trains"] != trains:
                for value in group["params"]:
                    if "z" in self.state[value]:
                        weight = 1 - group["beta"] if trains else 1 - 1 / group["beta"]
                        value.lerp_(self.state[value]["z"], weight)
                group["trains"] = trains

    def train(self) -> None:
        self._move(trains=True)

    def eval(self) -> None:
        self._move(trains=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            assert group["trains"], "a step in evaluation mode"
            share = 1 / (group["steps"] + 1)
            for value in group["params"]:
                z = self.state[value].setdefault("z", value.clone())
                value.lerp_(z, share)
                value.add_(value.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(value.grad, alpha=group["lr"])
            group["steps"] += 1


def lookahead(epochs: int = 6, marks: str = "") -> hotloop.Task:
    return _task(_classify, marks, epochs=epochs, optimizer=lambda p: Lookahead(Adam(p, lr=5e-3)))


def schedule_free(epochs: int = 6, marks: str = "") -> hotloop.Task:
    return _task(_classify, marks, epochs=epochs, optimizer=ScheduleFree)


# --- random generators, counters and frozen layers of the Task's own


class Jittered(torch.utils.data.Dataset):
    """Samples with noise of generators that the data set holds, as of libraries for augmentation."""

    def __init__(self) -> None:
        self.x, self.y = _given(_SAMPLES, 1)
        self.numpy, self.python = np.random.default_rng(1), random.Random(2)
        self.torch = torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(_FEATURES, generator=self.torch) + self.python.gauss(0, 1) + float(self.numpy.normal())
        return self.x[index] + 0.1 * noise, self.y[index]


def generators(epochs: int = 6, marks: str = "") -> hotloop.Task:
    return _task(_classify, marks, epochs=epochs, data=Jittered())


class Warming:
    """A step whose loss grows with the steps that it has counted."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            self.calls += 1
        return _classify(model, batch) * min(1.0, self.calls / 40)


def counters(epochs: int = 6, marks: str = "") -> hotloop.Task:
    return _task(Warming(), marks, epochs=epochs)


def module_counter(epochs: int = 6, marks: str = "") -> hotloop.Task:
    def step(model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            _CALLS["module"] += 1
        return _classify(model, batch) * min(1.0, _CALLS["module"] / 40)

    return _task(step, marks, epochs=epochs)


def thawing(epochs: int = 6, marks: str = "") -> hotloop.Task:
    """The first layer is frozen until a callback thaws it after an epoch."""
    built: list[nn.Module] = []

    def model() -> nn.Module:
        made = _network()
        made[0].requires_grad_(False)
        built[:] = [made]
        return made

    def thaw(view: hotloop.View) -> None:
        if view.event == "epoch" and view.epoch == 1:
            built[0][0].requires_grad_(True)

    optimizer = lambda p: SGD(p.model.parameters(), lr=0.05, momentum=0.9)  # noqa: E731
    return _task(_classify, marks, epochs=epochs, model=model, optimizer=optimizer, callbacks=[thaw])


# --- several optimizers


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, _FEATURES))
        self.d = nn.Sequential(nn.Linear(_FEATURES, 16), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(16, 1))
        self.register_buffer("batches", torch.zeros(()))


def _alternate(model: Any, batch: Any) -> Iterator[Any]:
    """Two steps of the critic with a gradient penalty, and in every other batch one of the generator."""
    real = batch[0]
    for _ in range(2):
        fake = model.g(torch.randn(len(real), 4, device=real.device)).detach()
        between = real.lerp(fake, torch.rand(len(real), 1, device=real.device)).requires_grad_()
        (slope,) = torch.autograd.grad(model.d(between).sum(), between, create_graph=True)
        yield "d", model.d(fake).mean() - model.d(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
    if model.training:
        model.batches += 1
    if model.batches % 2 == 0:
        yield "g", -model.d(model.g(torch.randn(len(real), 4, device=real.device))).mean()


def _schedules(both: dict[str, Optimizer], total: int) -> dict[str, Any]:
    return {
        "d": torch.optim.lr_scheduler.OneCycleLR(both["d"], 5e-3, total_steps=total + 1),
        "g": torch.optim.lr_scheduler.ExponentialLR(both["g"], 0.99),
    }


def gan(epochs: int = 6, marks: str = "") -> hotloop.Task:
    def optimizers(p: Any) -> dict[str, Optimizer]:
        return {
            "d": Adam(p.where(lambda name, value: name.startswith("d.")), lr=5e-3, betas=(0.5, 0.9)),
            "g": torch.optim.RMSprop(p.where(lambda name, value: name.startswith("g.")), lr=1e-3),
        }

    given = dict(model=Pair, optimizer=optimizers, schedule=_schedules, average=0.9, clip_norm=1.0)
    return _task(_alternate, marks, epochs=epochs, monitor="validation_d_loss", **given)
