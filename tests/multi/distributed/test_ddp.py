"""Ranks that share each batch come to what one process comes to."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hotloop
from hotloop.core.state import State, differing_paths, tree_leaves
from hotloop.data.sources import Source
from hotloop.lowering.evaluation import evaluate
from hotloop.plan import Plan
from tests.support.processes.rank_processes import STEPS, of_ranks
from tests.support.tasks.rank_tasks import CASES, DTYPES, images


def prepared(case: str, dtype: str, sharded: bool) -> hotloop.Task:
    """The case, without what sharded parameters can't have."""
    task = CASES[case](DTYPES[dtype])
    return replace(task, average=None) if sharded else task


def come_to(task: hotloop.Task, plan: Plan) -> tuple[State, list[dict[str, float]], dict[str, float]]:
    """State, the sums of each epoch, and figures of the validation data, after 20 steps."""
    program, sums, left = hotloop.lower(task, plan), [], STEPS
    while left:
        outcome = program.advance(min(left, 3))
        left -= outcome.steps
        if outcome.ended:
            sums.append(program.read_sums())
            program.end_epoch()
    source: Source | None = task.roles.validation
    return program.state(), sums, {} if source is None else evaluate(program, source).values


@cache
def alone(case: str, dtype: str, sharded: bool) -> Any:
    return come_to(prepared(case, dtype, sharded), Plan())


def everything(plan: Plan) -> dict[tuple[str, str], Any]:
    return {
        (case, dtype): come_to(prepared(case, dtype, plan.parallel == "sharded"), plan)
        for case in CASES
        for dtype in DTYPES
    }


@pytest.fixture(
    scope="module",
    params=[
        ("data", 3),
        *(
            pytest.param(way, marks=pytest.mark.more)
            for way in (("sharded", 3), ("towers", 3), ("data", 2), ("data", 4))
        ),
    ],
    ids=str,
)
def given(request: pytest.FixtureRequest) -> Plan:
    return Plan(parallel=request.param[0], ranks=request.param[1])


@pytest.fixture(scope="module")
def sharded(given: Plan) -> bool:
    return given.parallel == "sharded"


@pytest.fixture(scope="module")
def shared(given: Plan, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    plan = given
    return of_ranks(tmp_path_factory.mktemp("ranks"), plan, lambda world: everything(plan))


def numbers(result: Any) -> dict[str, torch.Tensor]:
    state, sums, figures = result
    tree = [state.parameters, state.buffers, state.optimizer, state.average, sums, figures]
    found = {
        path: torch.as_tensor(value) for path, value in tree_leaves(tree) if isinstance(value, float | torch.Tensor)
    }
    return {path: value.double() for path, value in found.items() if value.numel()}


def distance(one: Any, other: Any) -> dict[str, float]:
    a, b = numbers(one), numbers(other)
    assert a.keys() == b.keys()
    return {path: float((a[path] - b[path]).norm() / b[path].norm().clamp(min=1e-3)) for path in a}


@pytest.mark.parametrize("case", CASES)
def test_in_fp64_all_comes_out_the_same_but_for_the_last_bits(shared: list[Any], sharded: bool, case: str) -> None:
    for rank in shared:
        far = {
            path: value
            for path, value in distance(rank[case, "fp64"], alone(case, "fp64", sharded)).items()
            if value > 1e-10
        }
        assert far == {}


@pytest.mark.parametrize("case", CASES)
def test_in_fp32_it_is_as_true_as_one_process(shared: list[Any], sharded: bool, case: str) -> None:
    truth = alone(case, "fp64", sharded)
    noise, theirs = (
        max(distance(one[case, "fp32"], truth).values())
        for one in ({(case, "fp32"): alone(case, "fp32", sharded)}, shared[0])
    )
    assert theirs <= 4 * noise


def test_all_ranks_hold_the_same_bits(shared: list[Any]) -> None:
    for key, (state, sums, figures) in shared[0].items():
        for rank in shared[1:]:
            assert repr(sums) == repr(rank[key][1])
            assert repr(figures) == repr(rank[key][2])
            assert differing_paths(state, rank[key][0]) == []


class Recomputed(nn.Module):
    """Blocks with dropout, and a batch norm if asked for, whose forward pass is computed once more in backward."""

    def __init__(self, norms: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 8), nn.Linear(8, 4)
        norm = [nn.BatchNorm1d(8)] if norms else []
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 8, bias=False), *norm)
            for width in (6, 12)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.flatten(1))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.last(x)


@pytest.mark.more
@pytest.mark.parametrize(
    ("parallel", "norms"),
    [
        ("sharded", True),
        ("data", False),
        ("towers", False),
        *(
            pytest.param(*given, marks=pytest.mark.more)
            for given in (("sharded", False), ("data", True), ("towers", True))
        ),
    ],
)
def test_what_backward_computes_anew_is_that_of_the_whole_batch(parallel: Any, norms: bool, tmp_path: Path) -> None:
    task = images(torch.float64, samples=110, model=lambda: Recomputed(norms).double(), batch_size=25, average=None)
    plan = Plan(parallel=parallel, ranks=2)
    expected = come_to(task, Plan())
    for rank in of_ranks(tmp_path, plan, lambda world: come_to(task, plan)):
        assert {path: value for path, value in distance(rank, expected).items() if value > 1e-10} == {}
