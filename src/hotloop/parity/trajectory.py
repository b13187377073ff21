"""Where plans are compared: States along the baseline's path, each with the batch that comes next."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from hotloop.core.records.race import STATES
from hotloop.core.state import Position, State
from hotloop.errors import out_of_memory
from hotloop.lowering.failures.explanation import explained
from hotloop.lowering.program import Program

_FIRST = 4
"""States at the beginning, where an optimizer's own state is made, stand side by side."""

_APART, _SLOW_S = 4, 0.1
"""Steps from one State to the next; none are left out where a step takes longer than this."""


@dataclass(frozen=True)
class Stop:
    """A State on the path, and the batch that comes next."""

    state: State
    batch: Any


@contextmanager
def of_the_baseline(program: Program) -> Iterator[None]:
    """What its own step raises ends the training too, and is told as it is there; a lack of memory is the proof's."""
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise
        raise explained(error, program, None) from error


def stops(program: Program, count: int = STATES) -> Iterator[Stop]:
    """Walks the Program along its path and yields so many States; of a shorter training or schedule all.

    The epoch's last batch is among them if it is smaller than the others, though the path may not come that far.
    """
    taken, wanted, most = 0, 0, _apart(program, count)
    apart = most
    while taken < count:
        for batch, _ in program.feed.epoch(program.position.epoch):
            if program.position.step == wanted:
                yield Stop(program.state(), batch)
                taken += 1
                wanted += apart if taken >= _FIRST else 1
            if taken == count or program.steps_left() == 0:
                break
            began = time.perf_counter()
            with of_the_baseline(program):
                program.step(batch)
            apart = 1 if time.perf_counter() - began > _SLOW_S else most
        if program.position.epoch + 1 >= program.parts.task.epochs or program.steps_left() == 0 or taken == count:
            break
        program.end_epoch(1.0)
    last = _last(program) if taken == count else None  # a path through all of the training has met it
    if last is not None:
        yield last


def _apart(program: Program, count: int) -> int:
    """So far from State to State that all fit into the training, and few stand at the epoch's last batch, if it has one."""
    parts = program.parts
    lengths = (
        None if parts.roles.batches is None else parts.roles.batches * parts.task.epochs,
        program.steps_left(),
    )
    steps = min((length for length in lengths if length is not None), default=None)
    most = _APART if steps is None else min(_APART, max(1, (steps - _FIRST) // (count - _FIRST + 1)))
    batches = parts.roles.batches

    def last_ones(apart: int) -> int:
        return (
            sum((_FIRST + apart * number) % batches == 0 for number in range(1, count - _FIRST + 1)) if batches else 0
        )

    return min(range(most, 0, -1), key=last_ones)


def _last(program: Program) -> Stop | None:
    """The epoch's last batch, with the State that the path came to."""
    order = program.parts.roles.order
    if order is None or not order.batches or program.steps_left() == 0:
        return None
    epoch = program.position.epoch
    batch, size = next(program.feed.epoch(epoch, order.batches - 1))
    if size == order.batch_size:
        return None
    position = Position(program.position.step, epoch, order.batches - 1)
    return Stop(replace(program.state(), position=position), batch)


def before_the_end(state: State, batches: int | None, steps: int) -> State:
    """The same State so many steps before the end of its epoch, or at its beginning if that is nearer."""
    if batches is None:
        return state
    place = max(0, batches - steps)
    return replace(state, position=Position(state.position.step, state.position.epoch, place), sums={})
