"""Random generators that a Task's parts hold, with several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hotloop
from hotloop.distributed.world import World
from hotloop.errors import PlanError
from hotloop.plan import Plan
from tests.support.processes.rank_processes import of_ranks
from tests.support.tasks.owned_generators import FEATURES, KINDS, Noisy, NoisyModel, after, task_of

pytestmark = pytest.mark.more


class Watched(NoisyModel):
    def __init__(self, rng: Any) -> None:
        super().__init__(rng)
        self.drop, self.seen = nn.Dropout(0.5), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (
            x + torch.randn(x.shape, generator=self.rng)
            if isinstance(self.rng, torch.Generator)
            else x + self.rng.normal()
        )
        self.seen.append(float((y - x).sum()))
        return self.layer(self.drop(y))


def drawn(kind: str, steps: int, **plan: Any) -> list[float]:
    program = hotloop.lower(task_of(model=lambda: Watched(KINDS[kind]()), batch_size=8), Plan(**plan))
    program.model.seen.clear()  # type: ignore[union-attr, operator]
    program.advance(steps)
    return list(program.model.seen)  # type: ignore[arg-type]


@pytest.mark.parametrize("parallel", ["data", "local"])
def test_samples_draw_as_in_one_process(tmp_path: Path, parallel: str) -> None:
    def task() -> hotloop.Task:
        return task_of(data=Noisy(np.random.default_rng(0)), batch_size=8)

    plan = Plan(parallel=parallel, ranks=2, sync_every=1 if parallel == "local" else None)
    one = after(task(), 5)
    for state in of_ranks(tmp_path, plan, lambda world: after(task(), 5, **vars_of(plan))):
        for name, value in one.parameters.items():
            assert torch.allclose(state.parameters[name], value, rtol=1e-5, atol=1e-6)


def vars_of(plan: Plan) -> dict[str, Any]:
    return {"parallel": plan.parallel, "ranks": plan.ranks, "sync_every": plan.sync_every}


@pytest.mark.parametrize("kind", ["torch.Generator", "PCG64"])
def test_each_rank_draws_numbers_of_its_own_in_a_step(tmp_path: Path, kind: str) -> None:
    plan = Plan(parallel="data", ranks=2)

    def compute(world: World) -> list[list[float]]:
        return [drawn(kind, 3, parallel="data", ranks=2) for _ in range(2)]

    (first, again), (other, _) = of_ranks(tmp_path, plan, compute)
    assert first == again and len(set(first)) == 3
    assert not set(first) & set(other)


def test_noise_of_an_optimizer_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    class Langevin(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.05)
            self.rng = torch.Generator()

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            for value in self.param_groups[0]["params"]:
                value += torch.randn(value.shape, generator=self.rng)

    def compute(world: World) -> Any:
        return after(task_of(optimizer=Langevin, batch_size=8), 4, parallel="data", ranks=2)

    one, other = of_ranks(tmp_path, Plan(parallel="data", ranks=2), compute)
    assert all(torch.equal(value, other.parameters[name]) for name, value in one.parameters.items())


@pytest.mark.parametrize("kind", ["torch.Generator", "PCG64"])
def test_stages_refuse_what_would_be_drawn_once(tmp_path: Path, kind: str) -> None:
    class Deep(nn.Module):
        def __init__(self, rng: Any) -> None:
            super().__init__()
            self.layers, self.rng = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 1)), rng

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            drawn = torch.randn(x.shape, generator=self.rng) if kind == "torch.Generator" else self.rng.normal()
            return self.layers(x + drawn)

    plan = Plan(parallel="stages", ranks=2, microbatches=1)

    def compute(world: World) -> str:
        try:
            hotloop.lower(task_of(model=lambda: Deep(KINDS[kind]()), batch_size=8), plan)
        except PlanError as error:
            return str(error)
        return ""

    lines = of_ranks(tmp_path, plan, compute)
    assert all("one of its own" in line for line in lines), lines
