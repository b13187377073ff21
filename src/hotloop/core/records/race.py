"""What was proven and measured of plans: frozen, versioned records. They need no torch to be read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from hotloop.core.records.training import Record
from hotloop.plan import Plan

ParityClass = Literal["bitwise", "fp32-equivalent", "reduced-precision", "unproven", "broken"]
"""How true a plan's result is, against the baseline: from the best to the worst."""

TRUSTED_CLASSES = ("bitwise", "fp32-equivalent")
"""Classes of plans that may be chosen without asking."""

STATES = 16
"""From so many states single steps are compared; of a shorter training from all, and then the proof is of that alone."""

MARGIN = 0.02
"""Plans whose times differ by less than this are as good as equal: nobody would change a plan for it."""

FIRST_PAIRS, FAR_BEHIND = 4, 0.05
"""What a search looks at before it leaves a plan out, and by how much that must be behind while pairs are so few."""

FAR_SLOWER = 2
"""Times as long as another, for which a search leaves a plan out after still fewer pairs."""


class TensorError(Record):
    """How far a tensor was off, against the same step in float64.

    Attributes:
        what: `loss`, `gradient`, `update` (a parameter after the step minus before), `optimizer`, `buffer`, `average`.
        name: of the parameter or buffer.
        error: the median over the states, as a share of the tensor's size.
        floor: the worst of the baselines that differ harmlessly, measured the same way.
        ratio: error over floor; at most 1 or so where the plan is as true as the baseline.
    """

    what: str
    name: str
    error: float
    floor: float
    ratio: float


class Convergence(Record):
    """Whether a plan's training ends where the baseline's does, over several seeds.

    Attributes:
        what: the figure, `validation_loss` or `train_loss`, after `epochs`.
        baseline, plan: it for each seed, in the same order; the plan's lacks the last one where it ended in between.
        difference: mean of the plan's minus the baseline's; `low` and `high` are the ends of its 90 % interval. None
            where a training failed, or fewer than three seeds were trained both ways.
        margin: what a difference may be: the spread of the baseline over the seeds, at least 1 % of its figure.
        equivalent: whether the whole interval lies within the margin: two one-sided tests at 5 % (Schuirmann: A
            comparison of the two one-sided tests procedure and the power approach, 1987).
        ended_by: what kept it from training with the other seeds, and `ended` the same in words; None where all were.
    """

    what: str
    epochs: int
    seeds: list[int]
    baseline: list[float]
    plan: list[float]
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    margin: float | None = None
    equivalent: bool
    ended_by: Literal["failure", "SIGINT", "SIGTERM", "SIGHUP"] | None = None
    ended: str | None = None


class Parity(Record):
    """Whether a plan's result is as true as the baseline's.

    Attributes:
        plan: in brief.
        parity: the class; `reason` says why, in one sentence.
        states: from how many states of the baseline's path single steps were compared.
        free_steps: steps of the free run that came after; 0 if it wasn't reached.
        errors: worst first.
        arithmetic: the format of the fewest bits in which each class of operators computes products: `matmul`, `conv`, `rnn`.
        reductions: what of that has fewer bits than the baseline's, in words.
        first: the first tensor that went wrong, and at which step; None where nothing did.
        convergence: where it was asked for.
        seconds: what the proof took.
        short_of_memory: whether it is unproven for lack of memory or of room on the disk, of which there may be enough
            another time, or since a compiler was killed or lacks parts.
    """

    version: int = 1
    plan: str
    parity: ParityClass
    reason: str
    states: int
    free_steps: int = 0
    errors: list[TensorError] = Field(default_factory=list)
    arithmetic: dict[str, str] = Field(default_factory=dict)
    reductions: list[str] = Field(default_factory=list)
    first: str | None = None
    convergence: Convergence | None = None
    seconds: float = 0.0
    short_of_memory: bool = False
    versions: dict[str, str] = Field(default_factory=dict)


class Timing(Record):
    """How fast a plan was, beside the baseline in the same race.

    Attributes:
        name: as it was asked for, such as `baseline`, `auto` or `mine.toml`.
        plan: its axes.
        step_ms: the baseline's is the median over its windows; that of another plan is this over `ratio`, since a plan
            that was left out early had other windows, in which the machine may have been faster or slower.
        samples_per_s: at that time of a step.
        ratio: median of the baseline's time over this plan's, window by window; above 1 is faster. `ratio_low` and
            `ratio_high` are the ends of its 99 % interval.
        windows: pairs of windows that the ratio is from.
        parity: its class against the baseline on its own device, and `parity_reason`; None where it wasn't asked for.
            `states` says from how many states single steps were compared for it.
        startup_s: from the Task to the first step, without compiling; `estimate_compile_s` compiling alone.
        compile_warm_s: compiling once more, with what was kept of the first time; None where nobody asked.
        looking_ms: what each step bears of seeing once in an epoch whether callbacks have changed what was compiled; it's
            neither in `step_ms` nor in `ratio`.
        run_s: time to finish this run of the Task, with all three; None where its number of steps is unknown.
        pays_after: steps after which the plan has won back what it costs to start and compile; None if it never does.
        peak_memory_bytes: the most that one step held at a time, beyond what was there before it.
        feed_ms: what a batch takes to come onto the device, loaded and copied, with no step waiting for it.
        verdict: `faster`, `slower` or `no difference` against the baseline; None with too few pairs to say.
        left_out: whether it was left out before the end, clearly behind the baseline or another plan; a search does that
            after so few pairs that there may be no verdict.
        failure: why it couldn't be run or measured; then figures are None. `short_of_memory` says that it, or its proof,
            lacked memory or room on the disk, of which there may be enough another time, or that a compiler was killed or
            lacks parts.
    """

    name: str
    plan: dict[str, Any] = Field(default_factory=dict)
    step_ms: float | None = None
    samples_per_s: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    windows: int = 0
    parity: ParityClass | None = None
    parity_reason: str | None = None
    states: int = 0
    startup_s: float | None = None
    compile_s: float | None = None
    compile_warm_s: float | None = None
    looking_ms: float = 0.0
    run_s: float | None = None
    pays_after: int | None = None
    peak_memory_bytes: int | None = None
    feed_ms: float | None = None
    verdict: Literal["faster", "slower", "no difference"] | None = None
    left_out: bool = False
    failure: str | None = None
    short_of_memory: bool = False

    @property
    def as_plan(self) -> Plan:
        """Its axes as a plan to train with; a PlanError where they are those of another version of hotloop."""
        return Plan(**self.plan)

    @property
    def decided(self) -> bool:
        """Whether it is known to be faster, slower, or as good as equal; False where more windows could change that."""
        if self.verdict != "no difference" or self.ratio_low is None or self.ratio_high is None:
            return self.verdict is not None
        return self.ratio_low > 1 / (1 + MARGIN) and self.ratio_high < 1 + MARGIN

    @property
    def behind(self) -> bool:
        """Whether it was found slower than the baseline, or left out by as much as it would have been beside that alone."""
        clearly = 1 - FAR_BEHIND if self.windows >= FIRST_PAIRS else 1 / FAR_SLOWER
        return self.verdict == "slower" or (self.left_out and (self.ratio or 1.0) < clearly)

    @property
    def starts_s(self) -> float:
        """Seconds from the Task to the first step, with compiling for the first time."""
        return (self.startup_s or 0.0) + (self.compile_s or 0.0)

    @property
    def training_s(self) -> float:
        """Seconds of a step in training, with what it bears of looking."""
        return ((self.step_ms or 0.0) + self.looking_ms) / 1e3

    @property
    def gain(self) -> float:
        """How many times as fast as with the baseline training goes on, once it has started; 1 where that isn't known."""
        return (self.ratio or 1.0) * (self.step_ms / 1e3 / self.training_s if self.step_ms else 1.0)

    def proven(self, parity: Parity) -> Timing:
        """With what its proof found."""
        found = {"parity": parity.parity, "parity_reason": parity.reason, "states": parity.states}
        return self.model_copy(update=found | {"short_of_memory": parity.short_of_memory})

    def proven_for(self, steps: int | None) -> bool:
        """Whether its proof is of a training as long as that: one of a few steps says nothing of those that come later."""
        return self.states >= STATES or (steps is not None and steps <= self.states)

    def finishes(self, steps: int | None) -> float:
        """Seconds that a run of so many steps takes from now on, what was compiled before being kept; or a step's."""
        if self.step_ms is None:
            return float("inf")
        if steps is None:
            return self.training_s
        compile_s = self.compile_s if self.compile_warm_s is None else self.compile_warm_s
        return (self.startup_s or 0.0) + (compile_s or 0.0) + steps * self.training_s

    def saves_s(self, other: Timing, steps: int | None) -> float:
        """Seconds that such a run finishes before one under another plan."""
        return other.finishes(steps) - self.finishes(steps)


class Verdict(Record):
    """What a race found.

    Attributes:
        task: its name; `fingerprint` tells it from others of that name.
        plans: one for each plan, in the order asked for.
        baseline: name of the plan that the ratios are against.
        winner: name of the trusted plan that finishes this run first; None where too little was measured to say.
        steps: of the whole run; None for a stream of unknown length.
        left_open: of a search that ends with the baseline, whether nothing speaks against the plan of the rules.
        notes: what there is to know, such as that the machine was busy.
        machine, versions: what it was measured on and with.
        ended_by: the signal that stopped the proof, after which nothing wins, and `ended` the same in words; None without.
    """

    version: int = 1
    task: str
    fingerprint: str
    plans: list[Timing]
    baseline: str
    winner: str | None
    steps: int | None
    left_open: bool = False
    notes: list[str] = Field(default_factory=list)
    machine: str
    versions: dict[str, str]
    seconds: float
    ended_by: Literal["SIGINT", "SIGTERM", "SIGHUP"] | None = None
    ended: str | None = None

    def plan(self, name: str) -> Timing:
        return next(timing for timing in self.plans if timing.name == name)


def with_payoff(timing: Timing, baseline: Timing) -> Timing:
    """With the steps that win back what it costs more to start and compile than the baseline, where it is faster."""
    saves_s = baseline.training_s - timing.training_s
    if timing.verdict != "faster" or saves_s <= 0:
        return timing.model_copy(update={"pays_after": None})
    steps = math.ceil((timing.starts_s - baseline.starts_s) / saves_s)
    return timing.model_copy(update={"pays_after": max(0, steps)})


def best_plan_name(plans: Sequence[Timing], baseline: str, *, proven: bool) -> str | None:
    """Name of the plan to choose: of the baseline and those shown to be faster, the one that finishes the run first.

    Args:
        proven: leave out plans whose parity isn't trusted.

    Returns:
        None where too little was measured to say.
    """
    base = next(timing for timing in plans if timing.name == baseline)
    if all(timing.failure for timing in plans if timing is not base):
        return baseline
    if base.ratio_low is None:
        return None
    faster = [timing for timing in plans if timing.verdict == "faster"]
    allowed = [timing for timing in faster if not proven or timing.parity in TRUSTED_CLASSES]
    return min([base, *allowed], key=lambda timing: timing.run_s or timing.training_s).name


class Crossover(Record):
    """Where a plan overtakes the baseline, or falls behind it, as a Task grows.

    Attributes:
        name: of the plan.
        at: the size at which both take the same time, between one where the plan was shown to be faster and one where it
            was shown to be slower; None where no two sizes raced are such.
        low, high: the sizes between which the ratio's interval holds 1.
        faster: on which side of it the plan is.
        reason: what decides it, in words.
    """

    name: str
    at: float | None
    low: float | None = None
    high: float | None = None
    faster: Literal["above", "below"] | None = None
    reason: str


class RaceScaling(Record):
    """Races of the same plans at several sizes of a Task.

    Attributes:
        parameter: of the file's `task(...)` that was changed; `values` are its values, in the order asked for.
        races: one for each value.
        crossings: of each plan but the baseline, in the order of sizes; one without a size where it has none.
        ended_by: what kept it from going on to the other sizes, and `ended` the same in words; None where all were raced.
    """

    version: int = 1
    parameter: str
    values: list[str]
    races: list[Verdict]
    crossings: list[Crossover]
    ended_by: Literal["failure", "SIGINT", "SIGTERM", "SIGHUP"] | None = None
    ended: str | None = None
