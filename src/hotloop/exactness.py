"""Reasons why a resumed run may differ from an uninterrupted run, as far as the Task's parts show them before training."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn
from torch.optim import Optimizer

from hotloop.data.seeded import owners_of
from hotloop.generators import unset_generators
from hotloop.task import Task

Detector = Callable[[Task, nn.Module, Optimizer], Iterator[str]]
"""Yields one line for each part of a Task whose state hotloop can neither save nor derive from the seed."""


def unset_draws(task: Task, model: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    """Random generators that the Task's parts hold and that can't be set from the seed."""
    roles = task.roles
    sources = {"data": roles.train, "validation": roles.validation, "test": roles.raw_test}
    owners = {name: owner for role, source in sources.items() for name, owner in owners_of(source, role).items()}
    functions = {"prepare": roles.prepare, "augment": task.augment, "optimizer": optimizer}
    yield from unset_generators(owners | functions | task.owners(model))


DETECTORS: tuple[Detector, ...] = (unset_draws,)


def inexact_reasons(task: Task, model: nn.Module, optimizer: Optimizer) -> list[str]:
    """One line for each reason; empty if a resumed run equals an uninterrupted run bit by bit.

    Args:
        optimizer: of the Task's class; its parameters may be stand-ins.
    """
    return list(dict.fromkeys(reason for detect in DETECTORS for reason in detect(task, model, optimizer)))
