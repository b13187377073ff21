"""The step of a packed trial: the pack computes loss and gradients, and the trial's own optimizer updates its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hotloop.hyperparameters.packs.model_stack import ModelStack
from hotloop.lowering.batch_cursor import BatchCursor
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.eager_step import EagerStep
from hotloop.lowering.program import Program
from hotloop.task import StepResult


class PackedStep(EagerStep):
    """A trial's step. Gradients are clipped, and parameters, schedule and averages updated, as in a step alone.

    Attributes:
        company: computes a step of all trials on a batch, and trains the others as well; set by the pack.
        compute: computes a step of this trial on a batch, while the others rest; set by the pack.
    """

    company: Callable[[Any, int, int], StepResult]
    compute: Callable[[Any, int, int], StepResult]

    def __init__(self, parts: LoweringContext) -> None:
        super().__init__(parts)
        self._checked = True  # the proof's step alone has the checks of the first step
        self._ready: StepResult | None = None
        self._ahead: list[tuple[int, int]] = []

    def __call__(self, batch: Any, samples: int, step: int) -> torch.Tensor:
        self._ready = self.company(batch, samples, step)
        return super().__call__(batch, samples, step)

    def train(self, computed: StepResult, batch: Any, samples: int, step: int) -> None:
        """Updates this trial by the gradients that the pack has computed; a later `run` reports the step."""
        self._ready = computed
        super().__call__(batch, samples, step)
        self._ahead.append((1, samples))

    def run(self, batches: Iterator[tuple[Any, int]], step: int) -> Iterator[tuple[int, int]]:
        """Reports the steps that the pack has trained; without such steps, trains this trial while the others rest."""
        if self._ahead:
            ahead, self._ahead = self._ahead, []
            yield from ahead
            return
        for batch, samples in batches:
            self._ready = self.compute(batch, samples, step)
            super().__call__(batch, samples, step)
            step += 1
            yield 1, samples

    def _backward(self, batch: Any, samples: int, step: int) -> StepResult:
        computed, self._ready = self._ready, None
        assert computed is not None
        self._clip_unscaled()
        return computed


class Pack:
    """Programs of trials of one shape, which train in lockstep.

    Args:
        programs: each with a `PackedStep`, in the order of the stack's rows.
    """

    def __init__(self, programs: Sequence[Program], stack: ModelStack) -> None:
        self.programs, self.stack = list(programs), stack
        self.steps = [packed_step(program) for program in programs]
        self._cursors = [BatchCursor(step, program.checks) for step, program in zip(self.steps, programs, strict=True)]
        for slot, step in enumerate(self.steps):
            step.company = self._company_of(slot)
            step.compute = self._compute_of(slot)

    def advance(self, active: Sequence[int], steps: int) -> None:
        """Trains the active trials, which are at one position, for up to `steps` steps of the epoch.

        Each Program's `advance` then reports the steps.
        """
        leader = self.programs[active[0]]
        sources = active[:1] if self.stack.shares_batch else active
        for slot in active:
            self.programs[slot].begin_span()
        taken = [self._take(slot, steps) for slot in sources]
        number = leader.position.step
        with leader.around():
            for items in zip(*taken, strict=True):
                found = dict(zip(sources, items, strict=True))
                samples = items[0][1]
                batches = [found.get(slot, items[0])[0] for slot in range(len(self.programs))]
                results = self._compute(batches, active, samples, number)
                for slot in active:
                    own = batches[0] if self.stack.shares_batch else batches[slot]
                    self.steps[slot].train(results[slot], own, samples, number)
                number += 1

    def reset(self) -> None:
        """Forgets the open batches after a State was restored."""
        for cursor in self._cursors:
            cursor.reset()

    def _take(self, slot: int, steps: int) -> Iterator[tuple[Any, int]]:
        program = self.programs[slot]
        is_new_epoch = program.position.batch == 0  # the open feed is that of the epoch before
        for other, cursor in enumerate(self._cursors):
            if (other == slot and is_new_epoch) or (other != slot and self.stack.shares_batch):
                cursor.reset()
        return self._cursors[slot].take(program.feed, program.position, steps)

    def _compute(self, batches: Sequence[Any], active: Sequence[int], samples: int, step: int) -> list[StepResult]:
        self.steps[active[0]].draws.seed(step)
        return self.stack.compute(batches, active)

    def _compute_of(self, slot: int) -> Callable[[Any, int, int], StepResult]:
        def compute(batch: Any, samples: int, step: int) -> StepResult:
            return self._compute([batch] * len(self.programs), [slot], samples, step)[slot]

        return compute

    def _company_of(self, slot: int) -> Callable[[Any, int, int], StepResult]:
        def compute(batch: Any, samples: int, step: int) -> StepResult:
            results = self._compute([batch] * len(self.programs), range(len(self.programs)), samples, step)
            for other, program in enumerate(self.programs):
                if other != slot:
                    program.begin_span()
                    self.steps[other].train(results[other], batch, samples, step)
                    self.steps[other]._ahead.clear()
            return results[slot]

        return compute


def packed_step(program: Program) -> PackedStep:
    assert isinstance(program._step, PackedStep)
    return program._step
