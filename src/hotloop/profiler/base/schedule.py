"""The order of step kinds: mostly pairs of a clean and an instrumented step, few steps with detailed recording."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any, Literal, Protocol

from hotloop.core.records.profile_terms import Phase

Kind = Literal[
    "early", "warm-up", "clean", "instrumented", "clocked", "habits", "traced", "sampled", "settling", "whole"
]
"""How a step is recorded.

- `early`: before the step is known: between two events that may end a step; with phases.
- `warm-up`: before measuring.
- `clean`: only the boundaries are marked.
- `instrumented`: with phases.
- `clocked`: with module times; each module call has overhead.
- `habits`: with autograd graphs walked; times are invalid.
- `traced`: under torch's profiler.
- `sampled`: another thread samples the stack, which slows the step if cores are scarce.
- `settling`: like a clean step, but after a disturbance; not counted.
- `whole`: a period of training in which no steps were found; with phases, modules and operators.
"""

CLOSE: tuple[Kind, ...] = ("early", "instrumented", "habits", "traced", "sampled", "whole")
"""Kinds with phases."""

DISTURBING: tuple[Kind, ...] = (*CLOSE, "clocked")
"""Kinds for which functions are replaced; Python's caches are cold afterwards."""

DEFAULT_STEPS = 60

_PAIR: list[Kind] = ["clean", "instrumented"]
_PATTERN_STEP: list[Kind] = ["habits"]
_SAMPLED_STEP: list[Kind] = ["sampled"]
_CLOCKED_STEP: list[Kind] = ["clocked"]
_TRACED_STEP: list[Kind] = ["traced", "settling"]

_FIRST_DETAILS: list[Kind] = [*_TRACED_STEP, *_CLOCKED_STEP, *_PATTERN_STEP * 2, *_SAMPLED_STEP]
"""Some of everything, for scripts with few long steps; work done twice with a batch may fall into two steps."""

_SECOND_DETAILS: list[Kind] = [*_PATTERN_STEP * 2, *_TRACED_STEP * 2, *_SAMPLED_STEP, *_CLOCKED_STEP, "settling"]

# Two traced steps never follow each other: a step ends inside torch's profiler range of the update, and a range that is
# open when a profiler stops must not end under the next profiler.


def order(steps: int) -> list[Kind]:
    """Returns the kinds of all steps after warm-up; `steps` of them are clean or instrumented.

    An odd step is instrumented. No clock is used, so that ranks which take the same steps record them alike.
    """
    pairs, odd = divmod(steps, 2)
    measured = [_measured_pair(number) for number in range(pairs)] + [["instrumented"]] * odd
    details = [
        _FIRST_DETAILS,
        _SECOND_DETAILS,
        *((_CLOCKED_STEP, _SAMPLED_STEP)[number % 2] for number in range(2, len(measured))),
    ]
    nothing: list[Kind] = []
    return [kind for both in zip_longest(measured, details, fillvalue=nothing) for kinds in both for kind in kinds]


def _measured_pair(number: int) -> list[Kind]:
    """Thue-Morse order: work that a loop does every second, third or fourth step falls on both kinds alike."""
    return _PAIR[::-1] if number.bit_count() % 2 else _PAIR


class Observer(Protocol):
    """Records steps of some kinds in detail; `begin` and `end` are called at the steps' boundaries."""

    kinds: Sequence[Kind]

    def begin(self) -> None: ...
    def end(self) -> None: ...
    def drop(self) -> None:
        """Ends an unusual step and discards its records."""

    def close(self) -> None: ...
    def records(self) -> dict[str, list[dict[str, Any]]]:
        """Returns fields of `ProfileFacts`."""


class StepHooks(Protocol):
    """Is notified of each step."""

    def begin(self, kind: Kind) -> Phase:
        """A step begins; returns the first phase of the loop."""

    def observers_ready(self) -> None:
        """All observers of the step have begun."""

    def flags(self) -> list[str]:
        """Returns the events of the step that don't happen in every step."""

    def restart_step(self) -> None:
        """The step begins anew: records of the step so far are discarded."""

    def end(self, *, usual: bool = True) -> None:
        """The step has ended; `usual` says whether all its events happen in most steps."""

    def restart(self) -> None:
        """The script trains in another loop: records of the previous loop are discarded."""

    def between_steps(self) -> None:
        """Called between two steps; the time here counts to neither."""


DELAYED = 3.0
"""A step that takes this many times as long as others was delayed by something that isn't part of every step."""

_TRIMMED_SHARE = 0.25


def middle_mean(values: Collection[float]) -> float:
    """Returns the mean of the middle half.

    Like a median, this mean ignores delayed steps; unlike a median, the mean includes work of every second step.
    """
    cut = int(_TRIMMED_SHARE * len(values))
    return fmean(sorted(values)[cut : len(values) - cut])
