"""Ranks that share each batch come to what one process comes to."""

from __future__ import annotations

from collections.abc import Callable
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


def everything(plan: Plan, dtype: str) -> dict[str, Any]:
    return {case: come_to(prepared(case, dtype, plan.parallel == "sharded"), plan) for case in CASES}


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
def shared(given: Plan, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """What the ranks come to with a dtype."""
    plan = given
    return cache(lambda dtype: of_ranks(tmp_path_factory.mktemp("ranks"), plan, lambda world: everything(plan, dtype)))


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
def test_in_fp64_all_comes_out_the_same_but_for_the_last_bits(
    shared: Callable[[str], list[Any]], sharded: bool, case: str
) -> None:
    for rank in shared("fp64"):
        far = {
            path: value for path, value in distance(rank[case], alone(case, "fp64", sharded)).items() if value > 1e-10
        }
        assert far == {}


@pytest.mark.more
@pytest.mark.parametrize("case", CASES)
def test_in_fp32_it_is_as_true_as_one_process(shared: Callable[[str], list[Any]], sharded: bool, case: str) -> None:
    truth = alone(case, "fp64", sharded)
    noise, theirs = (
        max(distance(one, truth).values()) for one in (alone(case, "fp32", sharded), shared("fp32")[0][case])
    )
    assert theirs <= 4 * noise


def test_all_ranks_hold_the_same_bits(shared: Callable[[str], list[Any]]) -> None:
    first, *others = shared("fp64")
    for key, (state, sums, figures) in first.items():
        for rank in others:
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
