"""States along the baseline's path at which plans are compared, each with the next batch."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from hotloop.core.records.race import STATES
from hotloop.core.state import Position, State
from hotloop.errors import is_out_of_memory
from hotloop.lowering.failures.explanation import explain_error
from hotloop.lowering.program import Program

_FIRST_STEPS = 4
"""The first States are consecutive: the optimizer makes its state there."""

_APART, _SLOW_S = 4, 0.1
"""Steps between States; 1 where a step takes longer than `_SLOW_S` seconds."""


@dataclass(frozen=True)
class PathState:
    """A State on the path, and the batch that comes next."""

    state: State
    batch: Any


@contextmanager
def translate_baseline_errors(program: Program) -> Iterator[None]:
    """Raises an error of the baseline's step as in training, except a lack of memory."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise explain_error(error, program, None) from error


def walk_states(program: Program, count: int = STATES, later: State | None = None) -> Iterator[PathState]:
    """Runs the Program along its path and yields `count` States; all States of a shorter training or schedule.

    The epoch's last batch is among them if it is smaller than the others, even if the path ends before it.

    Args:
        later: a State of the training, at which the path goes on after its first States.
    """
    taken = 0
    if later is not None:
        taken = yield from _walk(program, _FIRST_STEPS)
        program.restore(later)
    taken += yield from _walk(program, count - taken)
    if taken == count and (last := _last_state(program)) is not None:  # else the path includes the last batch
        yield last


def _walk(program: Program, count: int) -> Generator[PathState, None, int]:
    """Yields up to `count` States from the Program's position on; returns their number."""
    taken, wanted, most = 0, program.position.step, _steps_between(program, count)
    apart = most
    while taken < count:
        for batch, _ in program.feed.epoch(program.position.epoch, program.position.batch):
            if program.position.step == wanted:
                yield PathState(program.state(), batch)
                taken += 1
                wanted += apart if taken >= _FIRST_STEPS else 1
            if taken == count or program.steps_left() == 0:
                break
            began = time.perf_counter()
            with translate_baseline_errors(program):
                program.step(batch)
            apart = 1 if time.perf_counter() - began > _SLOW_S else most
        if program.position.epoch + 1 >= program.parts.task.epochs or program.steps_left() == 0 or taken == count:
            break
        program.end_epoch(1.0)
    return taken


def _steps_between(program: Program, count: int) -> int:
    """Returns the steps between States so that all fit into the training and few are at the epoch's last batch."""
    parts, position = program.parts, program.position
    batches = parts.splits.batches
    lengths = (None if batches is None else batches * parts.task.epochs - position.step, program.steps_left())
    steps = min((length for length in lengths if length is not None), default=None)
    most = _APART if steps is None else min(_APART, max(1, (steps - _FIRST_STEPS) // (count - _FIRST_STEPS + 1)))

    def count_last_batches(apart: int) -> int:
        numbers = range(1, count - _FIRST_STEPS + 1)
        places = (position.batch + _FIRST_STEPS + apart * number for number in numbers)
        return sum(place % batches == 0 for place in places) if batches else 0

    return min(range(most, 0, -1), key=count_last_batches)


def _last_state(program: Program) -> PathState | None:
    order = program.parts.splits.order
    if order is None or not order.batches or program.steps_left() == 0:
        return None
    epoch = program.position.epoch
    batch, size = next(program.feed.epoch(epoch, order.batches - 1))
    if size == order.batch_size:
        return None
    position = Position(program.position.step, epoch, order.batches - 1)
    return PathState(replace(program.state(), position=position), batch)


def state_before_end(state: State, batches: int | None, steps: int) -> State:
    """Returns the State moved to `steps` steps before the end of its epoch, or to the epoch's beginning."""
    if batches is None:
        return state
    place = max(0, batches - steps)
    return replace(state, position=Position(state.position.step, state.position.epoch, place), sums={})
