"""Real ranks for tests: forks of the test's own process, which join, compute, and leave what they came to in a file."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from hotloop.distributed.join import join_ranks
from hotloop.distributed.launch import launch
from hotloop.distributed.world import World
from hotloop.plan import Plan

# What a training comes to import, so that each fork needn't.
LATE = ("torch._dynamo", "torch.utils.tensorboard", "plotly.subplots", "torch.distributed.fsdp", "torch.export._trace")
for name in LATE:
    with suppress(ImportError):
        import_module(name)

STEPS = 20


def of_ranks(folder: Path, plan: Plan, compute: Callable[[World], Any]) -> list[Any]:
    """What `compute` returns on each rank."""
    assert plan.ranks is not None

    def entry() -> None:
        torch.set_num_threads(1)
        with join_ranks(plan, print, plan.ranks) as joined:
            torch.save(compute(joined.world), folder / f"rank-{joined.world.rank}.pt")

    folder.mkdir(parents=True, exist_ok=True)
    launch(plan.ranks, entry, print)
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(plan.ranks)]
