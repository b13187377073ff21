"""Reasons, known before training, why a resumed run may differ from an uninterrupted run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hotloop.core.random.generators import unset_generators
from hotloop.data.seeded_dataset import generator_owners
from hotloop.task import Task

Detector = Callable[[Task, nn.Module, Optimizer], Iterator[str]]
"""Yields one line for each part of a Task whose state hotloop can neither save nor derive from the seed."""


def unseeded_generators(task: Task, model: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    """Yields the random generators of the Task's parts that can't be seeded."""
    roles = task.roles
    sources = {"data": roles.train, "validation": roles.validation, "test": roles.raw_test}
    owners = {name: owner for role, source in sources.items() for name, owner in generator_owners(source, role).items()}
    functions = {"prepare": roles.prepare, "augment": task.augment, "optimizer": optimizer}
    yield from unset_generators(owners | functions | task.owners(model))


def optimizers_in_hooks(task: Task, model: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    """Yields a line if a hook on a parameter's gradient calls an optimizer, as with one optimizer per layer."""
    updated = [value for group in optimizer.param_groups for value in group["params"]]
    for value in [*model.parameters(), *updated]:
        for hook in [*(value._backward_hooks or {}).values(), *(value._post_accumulate_grad_hooks or {}).values()]:
            if (other := next(_captured_optimizers(hook, {id(optimizer)}), None)) is not None:
                yield f"a hook on a parameter's gradient has an optimizer ({type(other).__name__}), whose state is not saved"
                return


def _captured_optimizers(value: Any, seen: set[int]) -> Iterator[Optimizer]:
    if id(value) in seen:
        return
    seen.add(id(value))
    inner: list[Any] = []
    if isinstance(value, Optimizer):
        yield value
    elif isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, list | tuple):
        inner = list(value)
    elif isinstance(value, partial):
        inner = [value.func, value.args, value.keywords]
    elif isinstance(value, MethodType):
        inner = [vars(value.__self__) if hasattr(value.__self__, "__dict__") else None]
    elif isinstance(value, FunctionType):
        variables = inspect.getclosurevars(value)
        inner = [variables.nonlocals, value.__defaults__, value.__kwdefaults__]
        inner += [one for one in variables.globals.values() if isinstance(one, Optimizer | dict | list)]
    elif hasattr(value, "__call__") and not isinstance(value, type | nn.Module):  # noqa: B004
        inner = [getattr(value, "__dict__", None)]
    for one in inner:
        yield from _captured_optimizers(one, seen)


DETECTORS: tuple[Detector, ...] = (unseeded_generators, optimizers_in_hooks)


def inexact_reasons(task: Task, model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Returns one line for each reason; empty if a resumed run equals an uninterrupted run bit by bit.

    Args:
        optimizer: an optimizer of the Task's class; its parameters may be placeholders.
    """
    return list(dict.fromkeys(reason for detect in DETECTORS for reason in detect(task, model, optimizer)))
