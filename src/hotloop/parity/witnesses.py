"""Who takes the steps that are compared: float64, the baseline, and baselines that differ harmlessly."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hotloop.data.tree import batch_length, map_tensors, tensors
from hotloop.feasible import violations
from hotloop.lowering import Program, lower
from hotloop.lowering.exact import ExactStep, in_float64, lower_exactly
from hotloop.lowering.facts import facts_of
from hotloop.parity.seen import UNIT, Seen, one_step
from hotloop.plan import Plan
from hotloop.probe import here
from hotloop.rng import generator_for
from hotloop.state import State
from hotloop.task import Task


@dataclass(frozen=True)
class Witness:
    """Takes a step its own way.

    Attributes:
        around: a context that it runs in.
        state, batch: what it makes of those that it is given, with a number that differs from step to step.
    """

    name: str
    program: Program
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    state: Callable[[State, int], State] = lambda state, number: state
    batch: Callable[[Any, int], Any] = lambda batch, number: batch

    def step(self, state: State, batch: Any, number: int) -> tuple[Seen, State]:
        with self.around():
            return one_step(self.program, self.state(state, number), self.batch(batch, number))


class Truth:
    """The step in float64, and whether it is one."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.program = lower_exactly(task, device)
        step = self.program._step
        assert isinstance(step, ExactStep)
        self.watch = step.watch

    def step(self, state: State, batch: Any) -> Seen:
        return one_step(self.program, in_float64(state), batch)[0]


def baselines(task: Task, plan: Plan) -> list[Witness]:
    """The baseline in the plan's precision on its device, then others that differ from it harmlessly.

    Without random draws, the samples of a batch may also come in another order; see `in_another_order`.
    """
    plain = Plan(device=plan.device, precision=plan.precision, workers=0)
    program = lower(task, plain)
    found = [Witness("baseline", program)]
    found += [Witness("nudged", program, state=nudged)]
    if plan.device == "cpu":
        others = 1 if torch.get_num_threads() > 1 else 2
        found += [
            Witness("threads", program, around=lambda: _threads(others)),
            Witness("without oneDNN", program, around=_without_onednn),
        ]
    elif plan.device.startswith("cuda"):
        found += [Witness("without cuDNN", program, around=lambda: torch.backends.cudnn.flags(enabled=False))]
    turned = plain.with_axes(layout="channels_last")
    if not violations(turned, facts_of(program.parts), here(plan.device)):
        found += [Witness("channels last", lower(task, turned))]
    return found


def in_another_order(program: Program) -> Witness:
    """The baseline with the samples of each batch in another order, which changes sums in their last bits alone."""
    return Witness("permuted", program, batch=_permuted)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _without_onednn() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch speaks of other hardware when the switch is used
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def nudged(state: State, number: int) -> State:
    """A State whose parameters are off by at most one rounding, up or down at random."""
    generator = generator_for(number, "nudge")
    return replace(state, parameters={name: _nudge(value, generator) for name, value in state.parameters.items()})


def _nudge(value: Tensor, generator: torch.Generator) -> Tensor:
    if not (value.is_floating_point() or value.is_complex()):
        return value
    draws = torch.randint(-1, 2, value.shape, generator=generator)
    return value + value * draws.to(value.dtype) * (2 * UNIT)


def _permuted(batch: Any, number: int) -> Any:
    samples = batch_length(batch)
    order = torch.randperm(samples, generator=generator_for(number, "permuted"))
    if any(not value.ndim or len(value) != samples for value in tensors(batch)):
        return batch
    return map_tensors(lambda value: value[order.to(value.device)], batch)
