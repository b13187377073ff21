"""Lowering: the transforms of a Plan in their one visible order, then one step, one feed, one Program."""

from __future__ import annotations

from collections.abc import Callable

from hotloop.data.feed import Feed, Treatment, open_feed
from hotloop.errors import MemoryExhausted, blame, out_of_memory
from hotloop.lowering.ingredients import Ingredients, placed
from hotloop.lowering.program import Program
from hotloop.lowering.step import EagerStep
from hotloop.plan import BASELINE, Plan
from hotloop.probe import check_device
from hotloop.rng import preserved
from hotloop.task import Task


def on_device(parts: Ingredients) -> Ingredients:
    """The device axis."""
    return placed(parts, check_device(parts.plan.device))


TRANSFORMS: tuple[Callable[[Ingredients], Ingredients], ...] = (on_device,)
"""Each turns ingredients into ingredients; they apply from first to last."""


def lower(task: Task, plan: Plan = BASELINE) -> Program:
    """Makes a Task runnable under a Plan; the caller's random generators stay as they are.

    Raises:
        DeviceError: the plan's device isn't on this machine.
        TaskError, DataError: the Task's parts can't be built, or don't fit together.
        MemoryExhausted: model and data alone are too large.
    """
    check_device(plan.device)
    try:
        with preserved():
            parts = Ingredients.of(task, plan)
            for transform in TRANSFORMS:
                parts = transform(parts)
            return Program(parts, EagerStep(parts), _feed(parts))
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise MemoryExhausted(
            f"making model and data ready on {plan.device} ran out of memory: {blame(error)}",
            fix="use a smaller model, less data at once, or a device with more memory",
        ) from error


def _feed(parts: Ingredients) -> Feed:
    roles, task = parts.roles, parts.task
    treatment = Treatment(parts.device, task.seed, roles.prepare, task.augment)
    return open_feed(roles.train, roles.order, treatment, workers=parts.plan.workers)
