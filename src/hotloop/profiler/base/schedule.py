"""Which steps are watched how: most in pairs of a clean and an instrumented one, a few closer, and then no more."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any, Literal, Protocol

from hotloop.core.records.profile_terms import Phase

Kind = Literal[
    "early", "warm-up", "clean", "instrumented", "clocked", "habits", "traced", "sampled", "settling", "whole"
]
"""How a step is watched.

- `early`: before the step is known: what lies between two things that may end one; with phases.
- `warm-up`: before measuring.
- `clean`: its boundaries alone are marked.
- `instrumented`: with phases.
- `clocked`: with modules, each of whose calls takes a little more time then.
- `habits`: with graphs walked, so its times are worth nothing.
- `traced`: under torch's profiler.
- `sampled`: another thread looks at the stack, which holds the step up where cores are scarce.
- `settling`: like a clean one, but after a disturbance, so it doesn't count.
- `whole`: no step but a while of training, where steps couldn't be told apart; with phases, modules and operators.
"""

CLOSE: tuple[Kind, ...] = ("early", "instrumented", "habits", "traced", "sampled", "whole")
"""Those with phases."""

DISTURBING: tuple[Kind, ...] = (*CLOSE, "clocked")
"""Those for which functions are replaced, so that Python's caches are cold after them."""

DEFAULT_STEPS = 60

_PAIR: list[Kind] = ["clean", "instrumented"]

_PATTERN_STEP: list[Kind] = ["habits"]

_SAMPLED_STEP: list[Kind] = ["sampled"]

_CLOCKED_STEP: list[Kind] = ["clocked"]

_TRACED_STEP: list[Kind] = ["traced", "settling"]

_FIRST_DETAILS: list[Kind] = [*_TRACED_STEP, *_CLOCKED_STEP, *_PATTERN_STEP * 2, *_SAMPLED_STEP]
"""So that a few long steps have some of everything; what is done twice with a batch may fall into two steps."""

_SECOND_DETAILS: list[Kind] = [*_PATTERN_STEP * 2, *_TRACED_STEP * 2, *_SAMPLED_STEP, *_CLOCKED_STEP, "settling"]

# Two traced steps never follow each other: a step ends inside of the range by which torch's profiler sees the update, and
# a range that is still open when a profiler stops must not end under the next one.


def order(steps: int) -> list[Kind]:
    """The kinds of all steps to come after the warm-up, `steps` of them clean or instrumented; an odd one is instrumented.

    It goes by no clock, so that ranks which take the same steps watch them alike.
    """
    pairs, odd = divmod(steps, 2)
    measured = [_measured_pair(number) for number in range(pairs)] + [["instrumented"]] * odd
    looks = [
        _FIRST_DETAILS,
        _SECOND_DETAILS,
        *((_CLOCKED_STEP, _SAMPLED_STEP)[number % 2] for number in range(2, len(measured))),
    ]
    nothing: list[Kind] = []
    return [kind for both in zip_longest(measured, looks, fillvalue=nothing) for kinds in both for kind in kinds]


def _measured_pair(number: int) -> list[Kind]:
    """In the order of Thue and Morse, so that what a loop does every second, third or fourth step falls on both alike."""
    return _PAIR[::-1] if number.bit_count() % 2 else _PAIR


class Observer(Protocol):
    """Watches steps of some kinds more closely; `begin` and `end` are called at their boundaries."""

    kinds: Sequence[Kind]

    def begin(self) -> None: ...
    def end(self) -> None: ...
    def drop(self) -> None:
        """Ends a step that was not like the others, and forgets it."""

    def close(self) -> None: ...
    def records(self) -> dict[str, list[dict[str, Any]]]:
        """Fields of `ProfileFacts`."""


class StepHooks(Protocol):
    """Is told of each step."""

    def begin(self, kind: Kind) -> Phase:
        """A step begins; says what the loop does first."""

    def observers_ready(self) -> None:
        """All that watch it closely have begun."""

    def flags(self) -> list[str]:
        """What has happened in the step that doesn't in every one."""

    def restart_step(self) -> None:
        """The step begins anew: what has happened in it so far is forgotten."""

    def end(self, *, usual: bool = True) -> None:
        """It has ended; whether nothing happened in it but what happens in most."""

    def restart(self) -> None:
        """The script trains in another loop: what was seen of the one before is forgotten."""

    def between_steps(self) -> None:
        """One has ended and the next hasn't begun: what is done here is in neither."""


DELAYED = 3.0
"""A step that takes so many times what others do was held up by something that isn't of every step."""

_TRIMMED_SHARE = 0.25


def middle_mean(values: Collection[float]) -> float:
    """The mean of the middle half.

    Like a median it isn't moved by steps that were held up, and unlike it sees what is done in every second step.
    """
    cut = int(_TRIMMED_SHARE * len(values))
    return fmean(sorted(values)[cut : len(values) - cut])
