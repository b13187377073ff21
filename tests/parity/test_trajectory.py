"""The States of a proof: the first ones of the training, then those that follow a later State."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import hotloop
from hotloop.core.records.race import STATES, TRUSTED_CLASSES
from hotloop.core.state import State, differing_paths
from hotloop.lowering.build import lower
from hotloop.lowering.program import Program
from hotloop.parity.proof import prove_programs
from hotloop.parity.trajectory import walk_states
from hotloop.plan import BASELINE, Plan
from tests.support.planted_step_faults import loss_scaled_if
from tests.support.programs import a_task, advance

pytestmark = pytest.mark.usefixtures("one_thread")

FUSED = Plan(optimizer="fused")


def task(epochs: int = 100) -> hotloop.Task:
    return a_task(epochs=epochs)  # 5 steps an epoch, the last one of an incomplete batch


def weight_size(program: Program) -> float:
    return sum(float(value.detach().norm()) for value in program.model.parameters())


def state_and_size(steps: int) -> tuple[State, float]:
    """The State after so many steps, and the size of its weights."""
    program = lower(task(), BASELINE)
    advance(program, steps)
    return program.state(), weight_size(program)


@pytest.mark.parametrize("steps", [1, 202, 494])
def test_the_path_goes_on_from_a_later_state(steps: int) -> None:
    later, _ = state_and_size(steps)
    points = list(walk_states(lower(task(), BASELINE), later=later))
    numbers = [point.state.position.step for point in points]
    assert numbers[:8] == [0, 1, 2, 3, *range(steps, steps + 4)]
    assert all(number < 500 for number in numbers)
    assert differing_paths(points[4].state, later) == []
    if steps < 490:
        assert len(points) == STATES + 1 and len(points[-1].batch[0]) == 4


def test_each_state_has_the_batch_of_its_position() -> None:
    later, _ = state_and_size(202)
    program = lower(task(), BASELINE)
    for point in walk_states(lower(task(), BASELINE), later=later):
        position = point.state.position
        batch, _ = next(program.feed.epoch(position.epoch, position.batch))
        assert all(mine.equal(theirs) for mine, theirs in zip(point.batch, batch, strict=True))


@pytest.mark.parametrize("steps", [2, 202])
def test_an_honest_plan_is_proven_from_a_later_state(steps: int) -> None:
    later, _ = state_and_size(steps)
    program = lower(task(), FUSED)
    before = program.state()
    (found,) = prove_programs(task(), [program], later=later)
    assert found.parity in TRUSTED_CLASSES and found.states == STATES + 1 and found.free_steps == 10, found.reason
    assert differing_paths(program.state(), before) == []


@pytest.mark.parametrize(
    ("is_faulty", "without"),
    [(lambda size, limit: size > limit, "proven"), (lambda size, limit: size < limit, "broken")],
    ids=["large weights", "small weights"],
)
def test_a_fault_on_either_part_of_the_path_is_found(is_faulty: Callable[[float, float], bool], without: str) -> None:
    """The faulty plan is wrong only on weights of a size that one part of the path has."""
    (_, limit), (later, size) = state_and_size(150), state_and_size(300)
    assert size > limit
    program = lower(task(), FUSED)
    loss_scaled_if(program, lambda: is_faulty(weight_size(program), limit))
    (alone,) = prove_programs(task(), [program])
    (found,) = prove_programs(task(), [program], later=later)
    assert ("proven" if alone.parity in TRUSTED_CLASSES else alone.parity) == without
    assert found.parity == "broken"
