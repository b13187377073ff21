"""What some ranks wrote, another number of ranks goes on with, to the end of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hotloop
from hotloop.checkpoint import Checkpoint, decode, encode
from hotloop.parallel.world import World
from hotloop.plan import Plan
from hotloop.state import State, differences
from tests.multi.cases import images
from tests.multi.ranks import of_ranks
from tests.multi.test_equal import distance

WAYS = ("data", "sharded", "towers")
STEPS = 3
"""Within the first epoch, of 4."""


def task(way: str) -> hotloop.Task:
    """Batches that neither number of ranks divides, and an incomplete one."""
    average = None if way == "sharded" else 0.9
    return images(torch.float64, samples=100, batch_size=29, validation=None, average=average)


def gone_on(plan: Plan, checkpoint: bytes | None) -> bytes:
    """The checkpoint some steps after another one, or after the beginning."""
    program = hotloop.lower(task(plan.parallel), plan)
    if checkpoint is not None:
        program.restore(decode(checkpoint, Path()).state)
    for _ in range(STEPS):
        if program.advance(1).ended:
            program.end_epoch()
    return encode(Checkpoint(program.state()))


def by_ranks(folder: Path, ranks: int, begun: dict[str, bytes]) -> list[dict[str, bytes]]:
    def compute(world: World) -> dict[str, bytes]:
        return {way: gone_on(Plan(parallel=way, ranks=ranks), begun.get(way)) for way in WAYS}  # type: ignore[arg-type]

    return of_ranks(folder, Plan(parallel="data", ranks=ranks), compute)


@pytest.fixture(scope="module", params=[(2, 3), (3, 2)], ids=str)
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    """What each rank came to."""
    folder = tmp_path_factory.mktemp("ranks")
    first, second = request.param
    begun = by_ranks(folder / "first", first, {})[0]
    return by_ranks(folder / "second", second, begun)


def state_of(checkpoint: bytes) -> State:
    return decode(checkpoint, Path()).state


@pytest.mark.parametrize("way", WAYS)
def test_another_number_of_ranks_comes_to_what_one_process_comes_to(ended: list[dict[str, bytes]], way: str) -> None:
    alone = Plan()
    program = hotloop.lower(task(way), alone)
    for _ in range(2 * STEPS):
        if program.advance(1).ended:
            program.end_epoch()
    whole, found = program.state(), state_of(ended[0][way])
    assert (found.position, found.position.epoch) == (whole.position, 1)
    assert max(distance((found, [], {}), (whole, [], {})).values()) < 1e-10
    for rank in ended[1:]:
        assert differences(state_of(rank[way]), found) == []
