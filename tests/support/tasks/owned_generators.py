"""Tasks whose parts hold random generators of their own, one of each kind."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import hotloop
from hotloop.core.state import State
from hotloop.lowering.program import Program
from hotloop.plan import Plan
from tests.support.programs import advance

SAMPLES, FEATURES = 24, 4
X = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))
Y = torch.randn(SAMPLES, 1, generator=torch.Generator().manual_seed(2))

KINDS: dict[str, Callable[[], Any]] = {
    "PCG64": lambda: np.random.default_rng(0),
    "PCG64DXSM": lambda: np.random.Generator(np.random.PCG64DXSM(0)),
    "MT19937": lambda: np.random.Generator(np.random.MT19937(0)),
    "Philox": lambda: np.random.Generator(np.random.Philox(0)),
    "SFC64": lambda: np.random.Generator(np.random.SFC64(0)),
    "RandomState": lambda: np.random.RandomState(0),
    "RandomState of PCG64": lambda: np.random.RandomState(np.random.PCG64(0)),
    "random.Random": lambda: random.Random(0),
    "torch.Generator": lambda: torch.Generator().manual_seed(0),
}


def noise(rng: Any, count: int = FEATURES) -> Tensor:
    """Standard normal numbers (count,) of a generator of any kind."""
    if isinstance(rng, torch.Generator):
        return torch.randn(count, generator=rng)
    if isinstance(rng, random.Random):
        return torch.tensor([rng.gauss(0.0, 1.0) for _ in range(count)])
    return torch.as_tensor(rng.normal(size=count), dtype=torch.float32)


class Noisy(Dataset):
    """Adds noise to its inputs."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index] + noise(self.rng), Y[index]


class Plain(Noisy):
    """Draws nothing."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index], Y[index]


class Transformed(Plain):
    def __init__(self, transform: Callable[[Tensor], Tensor]) -> None:
        self.transform = transform

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(X[index]), Y[index]


class Slotted:
    __slots__ = ("rng",)

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __call__(self, x: Tensor) -> Tensor:
        return x + noise(self.rng)


class Jitter:
    """A transform that is applied with probability p."""

    def __init__(self, rng: Any, p: float = 1.0) -> None:
        self.rng, self.p = rng, p

    def __call__(self, x: Tensor) -> Tensor:
        return x + noise(self.rng) if float(noise(self.rng, 1)) ** 2 < 0.45 or self.p == 1.0 else x


class Compose:
    def __init__(self, *steps: Callable[[Tensor], Tensor]) -> None:
        self.steps = list(steps)

    def __call__(self, x: Tensor) -> Tensor:
        return functools.reduce(lambda value, step: step(value), self.steps, x)


def with_noise(x: Tensor, rng: Any) -> Tensor:
    return x + noise(rng)


def of_closure(rng: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: x + noise(rng)


def of_default(rng: Any) -> Callable[[Tensor], Tensor]:
    def apply(x: Tensor, rng: Any = rng) -> Tensor:
        return x + noise(rng)

    return apply


def of_dict(rngs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    return lambda x: x + noise(rngs["a"]) + noise(rngs["b"])


def of_draw(draw: Callable[[], float]) -> Callable[[Tensor], Tensor]:
    return lambda x: x + draw()


class Method:
    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def apply(self, x: Tensor) -> Tensor:
        return x + noise(self.rng)


class OfClass:
    """Holds its generator as an attribute of the class, as MONAI's transforms do until they are seeded."""

    R = np.random.RandomState(0)

    def __call__(self, x: Tensor) -> Tensor:
        return x + noise(self.R)


class Reseedable(OfClass):
    def set_random_state(self, seed: int) -> Reseedable:
        self.R = np.random.RandomState(seed)
        return self


class Albumentation:
    """A transform with two generators, which its pipeline gives it."""

    def __init__(self) -> None:
        self.set_random_state(np.random.default_rng(), random.Random())

    def set_random_state(self, random_generator: np.random.Generator, py_random: random.Random) -> None:
        self.random_generator, self.py_random = random_generator, py_random

    def __call__(self, x: Tensor) -> Tensor:
        return x + noise(self.random_generator) if self.py_random.random() < 0.5 else x


class Pipeline:
    """Gives all of its transforms the generators that it has itself."""

    def __init__(self, transforms: list[Albumentation], seed: int | None = None) -> None:
        self.transforms = transforms
        self.set_random_seed(seed)

    def set_random_seed(self, seed: int | None) -> None:
        self.random_generator, self.py_random = np.random.default_rng(seed), random.Random(seed)
        for transform in self.transforms:
            transform.set_random_state(self.random_generator, self.py_random)

    def __call__(self, x: Tensor) -> Tensor:
        return functools.reduce(lambda value, transform: transform(value), self.transforms, x)


GLOBAL = np.random.default_rng(0)


def of_global(x: Tensor) -> Tensor:
    return x + _jittered(x)


def _jittered(x: Tensor) -> Tensor:
    return noise(GLOBAL)


class Late:
    """Makes its generator when it is called first."""

    rng: Any = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.rng is None:
            self.rng = np.random.default_rng()
        return x + noise(self.rng)


class Spread:
    """Has a place for one generator more, which it fills in a rare case."""

    def __init__(self) -> None:
        self.rng, self.other = np.random.default_rng(0), None

    def __call__(self, x: Tensor) -> Tensor:
        if self.rng.random() < 0.3:
            self.other = self.other or np.random.default_rng()
            x = x + noise(self.other)
        return x


HOLDERS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "slots": lambda: Slotted(np.random.default_rng(0)),
    "nested": lambda: Compose(
        Compose(Jitter(np.random.default_rng(0), p=0.5), Jitter(random.Random(0), p=0.5)), Slotted(torch.Generator())
    ),
    "closure": lambda: of_closure(np.random.default_rng(0)),
    "default argument": lambda: of_default(np.random.RandomState(0)),
    "partial": lambda: functools.partial(with_noise, rng=np.random.default_rng(0)),
    "bound method": lambda: Method(random.Random(0)).apply,
    "class attribute": OfClass,
    "set_random_state": lambda: Reseedable().set_random_state(3),
    "pipeline": lambda: Pipeline([Albumentation(), Albumentation()]),
    "seeded pipeline": lambda: Pipeline([Albumentation(), Albumentation()], seed=7),
    "global": lambda: of_global,
    "late": Late,
    "late and rare": Spread,
    "dict": lambda: of_dict({"a": np.random.default_rng(0), "b": random.Random(0)}),
    "builtin method": lambda: of_draw(np.random.default_rng(0).normal),
    "several of one bit generator": lambda: _alike(np.random.PCG64(0)),
}


def _alike(source: np.random.BitGenerator) -> Callable[[Tensor], Tensor]:
    one, other = np.random.Generator(source), np.random.Generator(source)
    return lambda x: x + noise(one) - noise(other)


class Rows(IterableDataset):
    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __iter__(self) -> Any:
        for index in range(SAMPLES):
            yield X[index] + noise(self.rng), Y[index]


class NoisyModel(nn.Module):
    def __init__(self, rng: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)
        self.rng = rng

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + noise(self.rng, x.numel()).view(x.shape))


def task_of(**fields: Any) -> hotloop.Task:
    """A small regression, with some of Task's fields changed."""
    given: dict[str, Any] = dict(
        model=lambda: nn.Linear(FEATURES, 1),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        data=(X, Y),
        batch_size=7,
        epochs=10,
    )
    if "step" in fields:
        del given["loss"]
    return hotloop.Task(**given | fields)


def after(task: hotloop.Task, steps: int, start: State | None = None, **plan: Any) -> State:
    """The State after so many steps of a Program of its own, from the start or from another State."""
    program = lowered(task, **plan)
    if start is not None:
        program.restore(start)
    try:
        advance(program, steps)
        return program.state()
    finally:
        program.close()


def lowered(task: hotloop.Task, **plan: Any) -> Program:
    return hotloop.lower(task, Plan(**plan))
