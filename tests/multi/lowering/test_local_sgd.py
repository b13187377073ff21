"""Ranks that train by themselves and average their weights: what must be equal is, and the rest converges."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hotloop
from hotloop.core.state import differing_paths
from hotloop.distributed.world import World, check_in_step
from hotloop.errors import OutOfStepError
from hotloop.lowering.steps.local_sgd import WeightAverage
from hotloop.plan import Plan
from hotloop.training.checkpoint import Checkpoint, decode, encode
from tests.multi.distributed.test_ddp import come_to, distance
from tests.support.processes.rank_processes import of_ranks
from tests.support.tasks.rank_tasks import tokens

RANKS = 3
EACH_STEP = Plan(parallel="local", ranks=RANKS, sync_every=1)
SELDOM = Plan(parallel="local", ranks=RANKS, sync_every=5)


def tokens_in_fp64() -> hotloop.Task:
    return replace(tokens(torch.float64), average=0.9)


def line(**fields: Any) -> hotloop.Task:
    """A regression that each batch sees a part of; its answer is known."""
    x = torch.randn(120, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    given: dict[str, Any] = dict(
        model=lambda: nn.Linear(3, 1).double(),
        loss=nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05),
        data=(x, x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64) + 3),
        batch_size=12,
        epochs=40,
    )
    return hotloop.Task(**given | fields)


def equal_shares(patch: pytest.MonkeyPatch) -> None:
    """A rank counts the same, whatever its loss was a mean of."""
    patch.setattr(WeightAverage, "_share", lambda self, counted: torch.full((), 1 / RANKS, dtype=torch.float64))


def no_average(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightAverage, "take", lambda self, counted, others=(): None)


FAULTS = {fault.__name__: fault for fault in (equal_shares, no_average)}


def each_step(world: World) -> dict[str, Any]:
    found = {}
    for name, plant in {"none": lambda patch: None, **FAULTS}.items():
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            result = come_to(tokens_in_fp64(), EACH_STEP)
        try:
            said = check_in_step(world, result[0]) or ""
        except OutOfStepError as error:
            said = str(error)
        found[name] = result, said
    return found


def gone_back(plan: Plan, task: hotloop.Task) -> Any:
    """States after 8 steps, once straight, once over the State after 4, and once from its file by a new program."""
    program = hotloop.lower(task, plan)
    program.advance(4)
    then = program.state()
    program.advance(4)
    straight = program.state(), program.read_sums()
    program.restore(then)
    program.advance(4)
    over = program.state(), program.read_sums()
    program = hotloop.lower(task, plan)
    program.restore(decode(b"".join(encode(Checkpoint(then))), Path()).state)
    program.advance(4)
    return straight, over, (program.state(), program.read_sums())


def apart(world: World) -> list[float]:
    """How far the ranks' weights are from each other after each of 6 steps, with a meeting after each third."""
    program = hotloop.lower(line(), Plan(parallel="local", ranks=RANKS, sync_every=3))
    found = []
    for _ in range(6):
        program.advance(1)
        first, *others = world.all_gather([value.detach().clone() for value in program.model.parameters()])
        found.append(max(float((a - b).abs().max()) for other in others for a, b in zip(first, other, strict=True)))
    return found


def learnt(plan: Plan) -> float:
    program, task = hotloop.lower(line(), plan), line()
    for _ in range(task.epochs):
        while not program.advance(7).ended:
            pass
        sums = program.read_sums()
        program.end_epoch()
    return sums["loss"] / sums["weight"]


def in_step(world: World, task: hotloop.Task) -> float:
    program = hotloop.lower(task, Plan(parallel="local", ranks=RANKS, sync_every=2))
    while not program.advance(1).ended:
        pass
    check_in_step(world, program.state())
    sums = program.read_sums()
    return sums["loss"] / sums["weight"]


def normed() -> hotloop.Task:
    """Of its last batch one rank has no row, and the others have one each."""
    x, y = torch.randn(14, 3, generator=torch.Generator().manual_seed(5)), torch.zeros(14, 1)
    model = lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))  # noqa: E731
    return line(data=(x, y), model=model)


def factored() -> hotloop.Task:
    """Whose optimizer keeps what isn't shaped like its parameter."""
    x, y = torch.randn(24, 3, generator=torch.Generator().manual_seed(5)), torch.zeros(24, 2)
    return line(data=(x, y), model=lambda: nn.Linear(3, 2), optimizer=lambda p: torch.optim.Adafactor(p, lr=0.05))


def compute(world: World) -> dict[str, Any]:
    return {
        "normed": in_step(world, normed()),
        "factored": in_step(world, factored()),
        "each step": each_step(world),
        "back": gone_back(SELDOM, replace(tokens_in_fp64(), batch_size=3)),
        "apart": apart(world),
        "learnt": learnt(SELDOM),
    }


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("local")
    return of_ranks(folder, EACH_STEP, compute)


@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_an_average_after_each_step_of_sgd_is_synchronous_training(seen: list[Any], fault: str) -> None:
    result, _ = seen[0]["each step"][fault]
    far = max(distance(result, come_to(tokens_in_fp64(), Plan())).values())
    assert far < 1e-10 if fault == "none" else far > 1e-6


def test_ranks_that_never_average_are_told(seen: list[Any]) -> None:
    assert [bool(seen[0]["each step"][fault][1]) for fault in ("none", "equal_shares", "no_average")] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("case", ["normed", "factored"])
def test_a_rank_with_a_single_row_and_an_optimizer_of_few_numbers_stay_in_step(seen: list[Any], case: str) -> None:
    assert len({rank[case] for rank in seen}) == 1 and 0 < seen[0][case] < 10


def test_between_meetings_ranks_go_their_own_ways(seen: list[Any]) -> None:
    assert [way == 0 for way in seen[0]["apart"]] == [False, False, True] * 2


def test_a_state_is_gone_back_to_bit_by_bit_with_as_many_ranks(seen: list[Any]) -> None:
    for rank in seen:
        straight, over, anew = rank["back"]
        assert differing_paths(straight[0], seen[0]["back"][0][0]) == []
        for other in (over, anew):
            assert differing_paths(straight[0], other[0]) == []
            assert straight[1] == other[1]


def test_ranks_that_seldom_meet_learn_what_one_process_learns(seen: list[Any]) -> None:
    first = hotloop.lower(line(), Plan())
    first.advance(1)
    before = first.read_sums()["loss"] / first.read_sums()["weight"]
    assert seen[0]["learnt"] < 1e-4 * before
