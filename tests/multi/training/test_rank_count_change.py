"""What some ranks wrote, another number of ranks goes on with, to the end of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hotloop
from hotloop.core.state import State, differing_paths
from hotloop.distributed.world import World
from hotloop.plan import Plan
from hotloop.training.checkpoint import Checkpoint, decode, encode
from tests.multi.distributed.test_ddp import distance
from tests.support.processes.rank_processes import of_ranks
from tests.support.tasks.rank_tasks import images

ALL = ("data", "sharded", "towers")
"""Take everything that looks at a batch as a whole; the others come to the result of one process without."""

WAYS: dict[str, dict[str, Any]] = {
    **{way: {} for way in ALL},
    "tensor": {},
    "stages": {"microbatches": 1, "split": "auto"},
    "local": {"sync_every": 1},
}
STEPS = 3
"""Within the first epoch, of 4."""


def task(way: str) -> hotloop.Task:
    """Batches that neither number of ranks divides, and an incomplete one."""
    given: dict[str, Any] = dict(samples=100, batch_size=29, validation=None)
    if way in ALL:
        return images(torch.float64, **given, average=None if way == "sharded" else 0.9)
    sgd = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731
    return images(torch.float64, **given, average=None, clip_norm=None, model=layers, optimizer=sgd)


def layers() -> nn.Module:
    """Of which each of 2 or 3 ranks can have some, or a part of each."""
    linear = [
        nn.Linear(64, 12),
        nn.ReLU(),
        nn.Linear(12, 12),
        nn.ReLU(),
        nn.Linear(12, 12),
        nn.ReLU(),
        nn.Linear(12, 4),
    ]
    return nn.Sequential(nn.Flatten(), *linear).double()


def plan_of(way: str, ranks: int) -> Plan:
    return Plan(parallel=way, ranks=ranks, **WAYS[way])  # type: ignore[arg-type]


def gone_on(plan: Plan, checkpoint: bytes | None) -> bytes:
    """The checkpoint some steps after another one, or after the beginning."""
    program = hotloop.lower(task(plan.parallel), plan)
    if checkpoint is not None:
        program.restore(decode(checkpoint, Path()).state)
    for _ in range(STEPS):
        if program.advance(1).ended:
            program.end_epoch()
    return b"".join(encode(Checkpoint(program.state())))


def by_ranks(folder: Path, ranks: int, begun: dict[str, bytes]) -> list[dict[str, bytes]]:
    def compute(world: World) -> dict[str, bytes]:
        return {way: gone_on(plan_of(way, ranks), begun.get(way)) for way in WAYS}

    return of_ranks(folder, Plan(parallel="data", ranks=ranks), compute)


@pytest.fixture(scope="module", params=[pytest.param((2, 3), marks=pytest.mark.more), (3, 2)], ids=str)
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    """What each rank came to."""
    folder = tmp_path_factory.mktemp("ranks")
    first, second = request.param
    begun = by_ranks(folder / "first", first, {})[0]
    return by_ranks(folder / "second", second, begun)


def state_of(checkpoint: bytes) -> State:
    return decode(checkpoint, Path()).state


@pytest.mark.more
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
        assert differing_paths(state_of(rank[way]), found) == []
