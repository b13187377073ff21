"""Checks of each training batch before its step: that its rows can be counted, and that its pieces add up to the batch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotloop.core.random.rng import preserve_generators
from hotloop.data.batch_tree import tree_tensors
from hotloop.data.row_count import SecondDimension, count_rows
from hotloop.errors import HotloopError, PartsDifferError
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


_TIME_SHARE = 0.008
"""Share of a run's time for comparisons: a hundredth, minus a reserve for a comparison longer than the earlier ones."""
_COUNTING_TIME_SHARE = 0.3
"""Share of the comparison time for counting padding."""
_FREE_TIME_S = 0.5
"""Seconds of comparison that any run allows."""
_REQUIRED_BATCHES = 3
"""Number of batches with another share of padding that are compared without a time limit, as is any new kind of padding."""
_COUNTED_BATCHES = 64
"""Batches at the beginning whose padding is counted without a time limit."""


class LaterBatches:
    """Selects the batches to compare: the second, fourth, eighth and so on, and each batch whose share of padding differs from
    all compared batches.

    Padding is zeros, negative numbers, NaN, and numbers that equal their predecessor.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._number = self._padded = 0
        self._spent_s = self._counted_s = self._longest_s = 0.0
        self._known: set[PaddingCounts] = set()
        self._kinds: set[tuple[bool, ...]] = set()
        self._waits = False

    def note_first_comparison(self, batch: Any) -> None:
        """Records the batch that was compared before training."""
        self._note(count_padding(batch))

    def is_due(self, batch: Any) -> bool:
        """Checks whether the run's next batch must be compared; called once for each batch."""
        self._number += 1
        power = self._number > 1 and self._number & (self._number - 1) == 0
        self._waits = self._waits or power
        padding = None
        if self._number <= _COUNTED_BATCHES or self._counted_s <= _COUNTING_TIME_SHARE * self._allowed_s:
            before = self._spent_s
            with self._timed():
                padding = count_padding(batch)
            self._counted_s += self._spent_s - before
        other = padding is not None and padding not in self._known
        required = padding is not None and (
            padding.kinds not in self._kinds or (other and self._padded < _REQUIRED_BATCHES)
        )
        affordable = self._spent_s + self._longest_s <= self._allowed_s
        if not required and not (affordable and (other or self._waits)):
            return False
        self._padded += other
        self._waits = False
        if padding is not None:
            self._note(padding)
        return True

    def _note(self, padding: PaddingCounts) -> None:
        self._known.add(padding)
        self._kinds.add(padding.kinds)

    @contextmanager
    def time_comparison(self) -> Iterator[None]:
        """Measures the duration of a comparison."""
        before = self._spent_s
        with self._timed():
            yield
        self._longest_s = max(self._longest_s, self._spent_s - before)

    @property
    def _allowed_s(self) -> float:
        return max(_FREE_TIME_S, _TIME_SHARE * (time.perf_counter() - self._began))

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._spent_s += time.perf_counter() - began


class PaddingCounts(NamedTuple):
    """The possible padding of a batch.

    Attributes:
        shapes: the shapes of the batch's tensors.
        counts: for each tensor the numbers of zeros, negative numbers, NaN and repetitions.
    """

    shapes: tuple[tuple[int, ...], ...] = ()
    counts: tuple[int, ...] = ()

    @property
    def kinds(self) -> tuple[bool, ...]:
        """Whether each count is above 0."""
        return tuple(count > 0 for count in self.counts)


def count_padding(batch: Any) -> PaddingCounts:
    """Counts the possible padding of a batch; synchronises with the device once."""
    counted = [
        (tuple(value.shape), _value_counts(value.detach()))
        for value in tree_tensors(batch)
        if value.layout == torch.strided
    ]
    if not counted:
        return PaddingCounts()
    counts = torch.cat([counts for _, counts in counted]).tolist()
    return PaddingCounts(tuple(shape for shape, _ in counted), tuple(counts))


def _value_counts(value: Tensor) -> Tensor:
    """Returns the numbers of zeros, negative numbers, NaN and repetitions: int64 (4,)."""
    if not value.numel() or value.is_complex():
        return torch.zeros(4, dtype=torch.int64, device=value.device)
    zeros, nans = (value == 0).sum(), torch.isnan(value).sum()
    negative = (value < 0).sum() if value.dtype != torch.bool else zeros.new_zeros(())
    repeated = (value[..., 1:] == value[..., :-1]).sum() if value.ndim > 1 else zeros.new_zeros(())
    return torch.stack([zeros, negative, nans, repeated])
