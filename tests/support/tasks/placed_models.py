"""Models whose modules are on devices of their own, and what becomes of them: what tests of placement share."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import hotloop
from hotloop.core.state import State, tree_leaves
from hotloop.lowering.evaluation import evaluate
from hotloop.plan import Plan
from tests.support.programs import a_task, advance, labelled

STEPS = 20
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Encoder(nn.Module):
    """Takes tensors by name and within containers, and gives a dict of some; a batch norm, dropout, and a part inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.hidden, self.drop = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.3)
        self.inside = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor, others: Any, *, how: dict[str, Any]) -> dict[str, Any]:
        assert others[0] is x and others[1][0] is x
        x = self.drop(torch.relu(self.hidden(self.norm(x)))) * how["scale"]
        return {"deep": x + self.inside(x), "all": [x, (x, how["name"])]}


class Both(nn.Module):
    """Skips over placed modules and branches beside them, joined afterwards; a parameter that belongs to no other module."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.encoder = nn.Linear(6, 8), Encoder()
        # A bias before a norm would have no gradient but noise.
        self.blocks = nn.ModuleList(
            [nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU())]
        )
        self.branch = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.2))
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        found = self.encoder(x, (x, [x]), how={"scale": self.scale, "name": "encoder"})
        assert found["all"][0] is found["all"][1][0] and found["all"][1][1] == "encoder"
        x = x + found["deep"] + found["all"][0]
        for block in self.blocks:
            x = x + block(x)
        return self.head(torch.cat([x, self.branch(x)], 1))


def both(dtype: str = "fp64", **fields: Any) -> hotloop.Task:
    """Adam, clipping, an average of the weights; four batches of 5 and an incomplete one, and data to validate."""
    x, y = labelled()
    given: dict[str, Any] = dict(
        model=lambda: Both().to(DTYPES[dtype]),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        data=(x.to(DTYPES[dtype]), y),
        validation=4,
        clip_norm=0.5,
        average=0.9,
    )
    return a_task(**given | fields)


def on(placement: dict[str, str]) -> Plan:
    return Plan(placement=placement)


def come_to(task: hotloop.Task, plan: Plan) -> tuple[State, dict[str, float]]:
    """The State after 20 steps, and figures of the validation data."""
    program = hotloop.lower(task, plan)
    advance(program, STEPS)
    assert task.roles.validation is not None
    return program.state(), evaluate(program, task.roles.validation).values


@cache
def alone(dtype: str) -> tuple[State, dict[str, float]]:
    return come_to(both(dtype), Plan())


def distance(one: tuple[State, dict[str, float]], other: tuple[State, dict[str, float]]) -> float:
    """How far the tensor is off that is farthest, as a share of its size."""
    a, b = (
        {
            path: torch.as_tensor(value).double()
            for path, value in tree_leaves([s.parameters, s.buffers, s.optimizer["state"], s.average, s.sums, figures])
        }
        for s, figures in (one, other)
    )
    if a.keys() != b.keys():
        return float("inf")
    return max(float((a[path] - b[path]).norm() / b[path].norm().clamp(min=1e-3)) for path in a)


def chain() -> nn.Module:
    """Without sums of several gradients, whose order copies may change."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))


def a_chain(**fields: Any) -> hotloop.Task:
    adam = dict(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True))
    return a_task(**adam | dict(model=chain, validation=4, average=0.9, epochs=3) | fields)
