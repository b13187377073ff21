"""Models whose lists hold lists, the same member twice, or a shared weight: spread over ranks, they train as whole ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotloop
from hotloop.core.state import State
from hotloop.distributed.world import World
from hotloop.errors import PlanError
from hotloop.lowering.program import Program
from hotloop.plan import Plan
from tests.multi.distributed.test_ddp import distance
from tests.support.processes.rank_processes import of_ranks

PLAN = Plan(parallel="sharded", ranks=2)
STEPS = 4


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(2):
            self.layers.append(nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 6)]))
        self.layers.append(nn.ModuleDict({"up": nn.Linear(6, 8), "down": nn.Linear(8, 6)}))  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            first, second = layer.values() if isinstance(layer, nn.ModuleDict) else layer  # type: ignore[misc]
            x = x + second(torch.relu(first(x)))
        return x


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.out(x)  # type: ignore[no-any-return]


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Stage(), Stage()])

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.heads = nn.ModuleList([nn.Linear(6, 6)] * 3)

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = torch.tanh(layer(x))
            total = total + head(x)
        return total


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.heads = nn.ModuleList(
            [nn.Linear(6, 6, bias=False), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 6)]
        )
        self.heads[0].weight = self.first.weight
        self.inner = self.heads[1][0]  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(torch.tanh(self.first(x)))
        for head in self.heads:
            x = head(x)
        return x


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.logit_scale


MODELS: dict[str, Callable[[], nn.Module]] = {one.__name__: one for one in (Pairs, Stages, Repeated, Tied)}
BY_THEMSELVES = {
    "Pairs": [*(f"layers.{pair}.{place}" for pair in range(2) for place in range(2)), "layers.2.up", "layers.2.down"],
    "Stages": [f"stages.{stage}{block}" for stage in range(2) for block in ("", ".blocks.0", ".blocks.1")],
    "Repeated": ["layers.0", "layers.1", "layers.2", "heads.0"],
    "Tied": ["heads.2"],
}


def task(model: Callable[[], nn.Module]) -> hotloop.Task:
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return hotloop.Task(
        model=lambda: model().double(),
        loss=F.mse_loss,
        optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
        data=(x, x.roll(1, 1).sin()),
        batch_size=7,
    )


def after(model: Callable[[], nn.Module], plan: Plan) -> tuple[State, Program]:
    program = hotloop.lower(task(model), plan)
    program.advance(STEPS)
    return program.state(), program


def compute(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, model in MODELS.items():
        state, program = after(model, PLAN)
        spread = [path for path, one in program.model.named_modules() if type(one).__name__.startswith("FSDP")]
        found[name] = state, spread
    try:
        after(Scaled, PLAN)
    except PlanError as error:
        found["Scaled"] = str(error)
    return found


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder: Path = tmp_path_factory.mktemp("sharding")
    return of_ranks(folder, PLAN, compute)


@pytest.mark.parametrize("name", MODELS)
def test_it_comes_to_what_one_process_comes_to(seen: list[Any], name: str) -> None:
    alone, _ = after(MODELS[name], Plan())
    for rank in seen:
        assert max(distance((rank[name][0], [], {}), (alone, [], {})).values()) < 1e-10


@pytest.mark.parametrize("name", MODELS)
def test_members_of_lists_come_together_one_by_one(seen: list[Any], name: str) -> None:
    assert sorted(seen[0][name][1]) == sorted(BY_THEMSELVES[name])


def test_a_parameter_without_a_dimension_is_one_line(seen: list[Any]) -> None:
    for rank in seen:
        assert rank["Scaled"].startswith("parallel=sharded, and the parameter 'logit_scale' has no dimension; ")
