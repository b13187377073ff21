"""What was seen of everyone who took the steps that are compared."""

from __future__ import annotations

from dataclasses import dataclass, field

from hotloop.core.number_formats import Arithmetic, describe_reductions
from hotloop.core.state import State
from hotloop.parity.comparison import Key

TensorErrors = dict[Key, float]


@dataclass
class StepErrors:
    """What was seen of a baseline or a candidate.

    Attributes:
        errors: of each tensor, at each state.
        eagerly: states, from 0, at which a compiled plan took its step eagerly, as with a smaller batch.
        differs: where the State first wasn't bitwise the baseline's after a step.
        unequal: what once wasn't bitwise the eager step's at a state where that is further from float64 than can be told.
        failed: what a step raised, and which; nothing is asked of it from then on.
        drawn: whether its random numbers were looked at in themselves, and `draws` what is wrong with them.
        unproven: why it can't be compared, though others can; `short_of_memory` says that it lacked memory.
        arithmetic: the products of its step, as seen in the first one; None where they couldn't be seen.
        looked_in_vain: at how many states more nudges were asked for because of it, and didn't explain it.
    """

    name: str
    errors: list[TensorErrors] = field(default_factory=list)
    is_eager: set[int] = field(default_factory=set)
    differs: str | None = None
    unequal: set[Key] = field(default_factory=set)
    failed: str | None = None
    draw_notes: bool = False
    draws: str | None = None
    unproven: str | None = None
    short_of_memory: bool = False
    arithmetic: Arithmetic | None = None
    has_unseen_draws: int = 0

    @property
    def is_able(self) -> bool:
        """Whether more is asked of it."""
        return self.failed is None and self.unproven is None

    @property
    def has_own_draws(self) -> list[TensorErrors]:
        """The errors at each state, but where a compiled plan ran eagerly only what it never shows of its program."""
        shown = {key for state, one in enumerate(self.errors) if state not in self.is_eager for key in one}
        return [
            {key: error for key, error in one.items() if state not in self.is_eager or key not in shown}
            for state, one in enumerate(self.errors)
        ]


@dataclass
class Evidence:
    """Of all single steps.

    Attributes:
        baselines: those that differ harmlessly.
        peers: the eager step in the candidates' reduced precision, and variants of it; empty where they reduce nothing.
        asked: whether the candidates' plan asks for that precision.
        steps: the number of the step at each state, from 0.
        rounding: the worst error at each state of those that candidates are judged by.
        closer: the same, with more nudges where a candidate was far off.
        last: the State that the path came to while the schedule allowed all steps that are to follow; or the first.
        followed: whether everybody got the random numbers that candidates draw, and where these come from.
        unproven: why nothing can be said, where that is so.
    """

    baselines: list[StepErrors]
    peers: list[StepErrors]
    candidates: list[StepErrors]
    last: State
    steps: list[int] = field(default_factory=list)
    rounding: list[TensorErrors] = field(default_factory=list)
    shared_draws: str = ""
    unproven: str | None = None
    has_closer_look: list[TensorErrors] = field(default_factory=list)
    requested: bool = False

    def reductions(self, account: StepErrors) -> list[str]:
        """What a candidate computes in fewer bits than the baseline, one line for each class of operators."""
        baseline = self.baselines[0].arithmetic if self.baselines else None
        if account.arithmetic is None or baseline is None:
            return []
        return describe_reductions(account.arithmetic, baseline)

    @property
    def judges(self) -> list[StepErrors]:
        """Those whose errors tell what rounding comes to in the candidates' precision."""
        return self.peers or self.baselines
