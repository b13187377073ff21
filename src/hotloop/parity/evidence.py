"""Errors and other evidence of the compared steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from hotloop.core.number_formats import Arithmetic, describe_reductions
from hotloop.core.state import State
from hotloop.parity.comparison import Key

TensorErrors = dict[Key, float]


@dataclass
class StepErrors:
    """Evidence of the steps of a baseline or a candidate.

    Attributes:
        errors: relative error of each tensor, by state.
        eager_states: numbers of the states, from 0, at which a compiled plan ran eagerly, such as for a smaller batch.
        differs: path and step at which the State first wasn't bitwise the baseline's.
        unequal: tensors not bitwise the eager step's at a state where that step's distance from float64 is infinite.
        failed: the first step that raised, and its error; later steps are left out.
        has_tested_draws: whether the random numbers were tested; `draws` is their fault.
        unproven: why the steps can't be compared; `short_of_memory` if memory was missing.
        arithmetic: the products of the first step; None if unknown.
        unexplained_states: states at which larger nudges were tried for this candidate without explaining its error.
    """

    name: str
    errors: list[TensorErrors] = field(default_factory=list)
    eager_states: set[int] = field(default_factory=set)
    differs: str | None = None
    unequal: set[Key] = field(default_factory=set)
    failed: str | None = None
    has_tested_draws: bool = False
    draws: str | None = None
    unproven: str | None = None
    short_of_memory: bool = False
    arithmetic: Arithmetic | None = None
    unexplained_states: int = 0

    @property
    def is_able(self) -> bool:
        return self.failed is None and self.unproven is None

    @property
    def visible_errors(self) -> list[TensorErrors]:
        """Errors by state; where a compiled plan ran eagerly, only of tensors that its compiled program never shows."""
        shown = {key for state, errors in enumerate(self.errors) if state not in self.eager_states for key in errors}
        return [
            {key: error for key, error in errors.items() if state not in self.eager_states or key not in shown}
            for state, errors in enumerate(self.errors)
        ]


@dataclass
class Evidence:
    """Evidence of all single steps.

    Attributes:
        baselines: the baseline and harmless changes of it.
        peers: the eager step in the candidates' reduced precision, and changes of it; empty without reduced precision.
        last: the last State from which the schedule allows a free run; or the first.
        steps: the number of the step at each state, from 0.
        rounding: the largest error of each tensor among the judges, by state.
        shared_draws: origin of the candidates' random numbers, if all other Programs get them.
        unproven: why nothing can be proven.
        nudged_rounding: as `rounding`, with more nudges where a candidate had large errors.
        requested: whether the candidates' plan asks for the reduced precision.
    """

    baselines: list[StepErrors]
    peers: list[StepErrors]
    candidates: list[StepErrors]
    last: State
    steps: list[int] = field(default_factory=list)
    rounding: list[TensorErrors] = field(default_factory=list)
    shared_draws: str = ""
    unproven: str | None = None
    nudged_rounding: list[TensorErrors] = field(default_factory=list)
    requested: bool = False

    def reductions(self, candidate: StepErrors) -> list[str]:
        """Returns the operators that a candidate computes in fewer bits than the baseline, one line per class."""
        baseline = self.baselines[0].arithmetic if self.baselines else None
        if candidate.arithmetic is None or baseline is None:
            return []
        return describe_reductions(candidate.arithmetic, baseline)

    @property
    def judges(self) -> list[StepErrors]:
        """The steps whose errors show the size of rounding errors in the candidates' precision."""
        return self.peers or self.baselines
