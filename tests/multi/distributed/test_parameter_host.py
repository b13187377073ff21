"""Towers: the first rank updates for all, on the CPU; what it must do, and faults in it that are caught."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hotloop
from hotloop.core.state import differing_paths
from hotloop.distributed.world import World, check_in_step
from hotloop.distributed.wrappers.ddp import ParameterHost
from hotloop.errors import OutOfStepError
from hotloop.lowering.steps.gradient_check import LaterGradients
from hotloop.plan import Plan
from tests.multi.distributed.test_ddp import distance
from tests.multi.distributed.test_planted_faults import STEPS, an_unequal_shard, small
from tests.support.processes.rank_processes import of_ranks

PLAN = Plan(parallel="towers", ranks=2)


def gradients_that_stay(patch: pytest.MonkeyPatch) -> None:
    """The first rank updates with its own gradients alone."""
    patch.setattr(torch.distributed, "reduce", lambda total, to: None)


def parameters_that_stay(patch: pytest.MonkeyPatch) -> None:
    """The second rank's replica never changes."""
    spread = ParameterHost.broadcast

    def to_the_first_alone(self: ParameterHost) -> None:
        before = [value.detach().clone() for value in self.module.parameters()]
        spread(self)
        if not self.first:
            with torch.no_grad():
                for value, then in zip(self.module.parameters(), before, strict=True):
                    value.copy_(then)

    patch.setattr(ParameterHost, "broadcast", to_the_first_alone)


FAULTS = {fault.__name__: fault for fault in (an_unequal_shard, gradients_that_stay, parameters_that_stay)}


def planted(world: World) -> dict[str, Any]:
    found = {}
    for name, plant in {"none": lambda patch: None, **FAULTS}.items():
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            patch.setattr(LaterGradients, "check", lambda *_: None)
            program = hotloop.lower(small(), PLAN)
            program.advance(STEPS)
            state = program.state()
        try:
            said = check_in_step(world, state) or ""
        except OutOfStepError as error:
            said = str(error)
        found[name] = state, said
    return found


def gone_back(world: World) -> Any:
    """States after 6 steps, once straight, once over a State after 3; and how much each rank's optimizer keeps."""
    program = hotloop.lower(small(), PLAN)
    program.advance(3)
    then = program.state()
    program.advance(1)
    program.end_epoch()
    program.advance(2)
    straight = program.state()
    program.restore(then)
    program.advance(1)
    program.end_epoch()
    program.advance(2)
    return straight, program.state(), len(program.optimizer.state)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder: Path = tmp_path_factory.mktemp("towers")
    return of_ranks(folder, PLAN, lambda world: (planted(world), gone_back(world)))


@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_the_comparison_with_one_process_sees_a_fault(seen: list[Any], fault: str) -> None:
    alone = hotloop.lower(small(), Plan())
    alone.advance(STEPS)
    far = max(distance((seen[0][0][fault][0], [], {}), (alone.state(), [], {})).values())
    assert far < 1e-10 if fault == "none" else far > 1e-6


def test_ranks_see_replicas_that_differ(seen: list[Any]) -> None:
    told = [fault for fault, (_, said) in seen[0][0].items() if said]
    assert told == ["parameters_that_stay"]
    assert seen[0][0]["parameters_that_stay"][1].startswith("after step 3 rank 1 and rank 0 differ in 'parameters ")


def test_a_state_is_gone_back_to_bit_by_bit_and_is_whole_on_all_ranks(seen: list[Any]) -> None:
    for _, (straight, again, _) in seen:
        assert differing_paths(straight, again) == []
        assert differing_paths(straight, seen[0][1][0]) == []


def test_only_the_first_rank_keeps_optimizer_state(seen: list[Any]) -> None:
    kept = [number for _, (_, _, number) in seen]
    assert kept[0] > 0
    assert kept[1] == 0
