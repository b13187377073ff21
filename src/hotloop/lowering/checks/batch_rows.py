"""Checks of each training batch before its step: that its rows can be counted, and that its pieces add up to the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hotloop.core.random.rng import preserve_generators
from hotloop.data.row_count import SecondDimension, count_rows
from hotloop.errors import HotloopError, PartsDifferError
from hotloop.lowering.checks.later_batches import LaterBatches
from hotloop.lowering.context import LoweringContext, counts_samples
from hotloop.lowering.losses.loss_copy import LossNotCopied
from hotloop.lowering.object_state.attributes import preserve_attributes
from hotloop.lowering.transforms.accumulation import ComparisonError, check_accumulation


class BatchChecks:
    """Checks each batch before its step.

    Attributes:
        needed: whether the Task and the plan require checks.
    """

    def __init__(self, parts: LoweringContext) -> None:
        self._parts = parts
        self._said: set[str] = set()
        self._counts = parts.task.weight is None and not counts_samples(parts) and parts.plan.parallel != "async"
        self._second = SecondDimension() if self._counts and parts.splits.order is None else None
        cut = parts.plan.accumulation > 1 and parts.plan.parallel == "none"
        self._later = LaterBatches() if cut else None
        self._is_paused = False

    @property
    def is_needed(self) -> bool:
        return self._counts or self._later is not None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Lets batches pass unchecked, for a step whose random draws are recorded: a comparison would draw as well."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def compare_first(self, batch: Any, samples: int) -> None:
        """Compares the first batch before training.

        Raises:
            PlanError: its pieces don't add up to the batch, or can't be compared.
        """
        if self._later is None:  # the workers of a parameter server have pieces as well
            check_accumulation(self._parts, batch, samples)
            return
        try:
            check_accumulation(self._parts, batch, samples)
            self._later.note_first_comparison(batch)
        except LossNotCopied as error:
            self._give_up(str(error))

    def check_while_passing(self, batches: Iterator[tuple[Any, int]], step: int) -> Iterator[tuple[Any, int]]:
        """Yields the batches, each after its check.

        Args:
            step: the number of the first batch's step.

        Raises:
            PartsDifferError: the pieces of a batch don't add up to the batch.
        """
        for number, (batch, samples) in enumerate(batches, step):
            self.check(batch, samples, number)
            yield batch, samples

    def check(self, batch: Any, samples: int, step: int) -> None:
        """Checks one batch; see `check_while_passing`."""
        if self._is_paused:
            return
        if self._counts:
            doubt = count_rows(batch, None if self._second else samples).doubt
            doubt = doubt or (self._second.doubt(batch) if self._second else "")
            if doubt:
                self.say_uncounted(doubt)
        if self._later is not None and self._later.is_due(batch):
            with self._later.time_comparison():
                self._compare(batch, samples, step)

    def _compare(self, batch: Any, samples: int, step: int) -> None:
        try:
            with preserve_generators(*self._parts.devices), preserve_attributes(self._parts.task):
                check_accumulation(self._parts, batch, samples)
        except (ComparisonError, LossNotCopied) as error:
            self._give_up(str(error))
        except HotloopError as error:
            raise later_difference_error(error, step) from error

    def _give_up(self, why: str) -> None:
        self._later = None
        self._say(f"pieces of a batch are no longer compared with the whole batch: {why}")

    def say_uncounted(self, doubt: str) -> None:
        """Reports once that the rows of a batch can't be counted."""
        self._say(
            f"the rows of a batch can't be counted with certainty ({doubt}): figures weight batches by the "
            "requested number of samples, if known; give the Task a weight(batch), the number that its loss "
            "is a mean over",
            "rows",
        )

    def _say(self, line: str, kind: str = "") -> None:
        if (kind or line) not in self._said:
            self._said.add(kind or line)
            self._parts.say(line)


def later_difference_error(error: HotloopError, step: int) -> PartsDifferError:
    """Returns a comparison's error with the number of the batch's step; `step` counts from 0."""
    return PartsDifferError(
        f"step {step + 1}: {error.given}",
        expected=error.expected,
        fix=f"{error.fix}; the State before that step is saved, go on with --resume",
    )
