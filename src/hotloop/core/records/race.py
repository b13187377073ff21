"""Results of proofs and races, also of the parts of a script: frozen, versioned records, readable without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from hotloop.core.records.training import Record
from hotloop.margins import FAR_BEHIND, FAR_SLOWER, FIRST_PAIRS, MARGIN
from hotloop.plan import Plan

ParityClass = Literal["bitwise", "fp32-equivalent", "reduced-precision", "unproven", "broken"]
"""The class of a plan's numerical agreement with the baseline, from best to worst."""

TRUSTED_CLASSES = ("bitwise", "fp32-equivalent")
"""Classes that automatic choices accept."""

STATES = 16
"""Number of states at which a proof compares single steps; a shorter training is compared at all its states."""


class TensorError(Record):
    """A tensor's error against the same step in float64.

    Attributes:
        what: `loss`, `gradient`, `update` (change of a parameter), `optimizer`, `buffer`, `average`.
        name: of the parameter or buffer.
        error: median over the states, relative to the tensor's size.
        floor: the largest such error of the harmless variants of the baseline.
        ratio: error over floor; about 1 or less for a plan as accurate as the baseline.
    """

    what: str
    name: str
    error: float
    floor: float
    ratio: float


class Convergence(Record):
    """A comparison of final figures of a plan and the baseline, over several seeds.

    Attributes:
        what: the compared figure after `epochs`: `validation_loss` or `train_loss`.
        baseline, plan: the figure for each seed; the plan's last one is missing if its training ended early.
        difference: mean of plan minus baseline; `low` and `high` are its 90 % interval. None after a failed training,
            or with fewer than three seeds.
        margin: the allowed difference: the baseline's spread over the seeds, at least 1 % of the figure.
        equivalent: whether the interval lies within the margin: two one-sided tests at 5 % (Schuirmann: A comparison of
            the two one-sided tests procedure and the power approach, 1987).
        ended_by, ended: why seeds are missing, as a code and in words; None for complete results.
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
    """The result of a parity proof.

    Attributes:
        plan: a short description.
        parity, reason: the class, and its reason in one sentence.
        states: number of the baseline's states at which single steps were compared.
        free_steps: steps of the free run; 0 without one.
        errors: worst first.
        arithmetic: format with the fewest bits of each operator class (`matmul`, `conv`, `rnn`).
        reductions: descriptions of formats with fewer bits than the baseline's.
        first: the first wrong tensor and its step; None without one.
        convergence: None if it wasn't requested.
        short_of_memory: whether the proof failed for a passing reason: memory, disk space, or a killed or incomplete
            compiler.
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
    """A plan's speed, measured against the baseline in the same race.

    Attributes:
        name: as the user requested it, such as `baseline`, `auto` or `mine.toml`.
        step_ms: median over the baseline's windows; for other plans the baseline's value over `ratio`, because a
            dropped plan ran in other windows than the baseline's later ones.
        samples_per_s: at `step_ms`.
        ratio: median over pairs of windows of the baseline's time over this plan's time; above 1 is faster. `ratio_low`
            and `ratio_high` are its 99 % interval.
        windows: number of pairs of windows.
        parity, parity_reason: the class against the baseline on the same device; None without a proof.
        states: number of states of the proof.
        startup_s: from the Task to the first step, without compilation.
        compile_s, compile_warm_s: compilation without and with a filled cache; None if unmeasured.
        looking_ms: a step's share of the check for callbacks' changes, once an epoch; excluded from `step_ms` and
            `ratio`.
        run_s: time to finish this run including start and compilation; None for an unknown number of steps.
        pays_after: steps that compensate a longer start; None if no number of steps does.
        peak_memory_bytes: maximum of one step beyond the memory before the step.
        feed_ms: time to load and copy a batch to the device without a step in parallel.
        verdict: against the baseline; None with too few pairs.
        left_out: whether the search dropped the plan early, clearly behind another plan; the verdict may be None then.
        failure: why the plan has no figures.
        short_of_memory: whether the failure may pass: memory, disk space, or a killed or incomplete compiler.
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
        """The axes as a Plan; raises PlanError for axes of another version of hotloop."""
        return Plan(**self.plan)

    @property
    def decided(self) -> bool:
        """Whether the verdict is final: faster, slower, or an interval within `MARGIN`."""
        if self.verdict != "no difference" or self.ratio_low is None or self.ratio_high is None:
            return self.verdict is not None
        return self.ratio_low > 1 / (1 + MARGIN) and self.ratio_high < 1 + MARGIN

    @property
    def behind(self) -> bool:
        """Whether the plan is slower than the baseline, or was dropped far behind the baseline."""
        clearly = 1 - FAR_BEHIND if self.windows >= FIRST_PAIRS else 1 / FAR_SLOWER
        return self.verdict == "slower" or (self.left_out and (self.ratio or 1.0) < clearly)

    @property
    def starts_s(self) -> float:
        """Seconds from the Task to the first step, with a first compilation."""
        return (self.startup_s or 0.0) + (self.compile_s or 0.0)

    @property
    def training_s(self) -> float:
        """Seconds of a training step, with its share of the check for callbacks' changes."""
        return ((self.step_ms or 0.0) + self.looking_ms) / 1e3

    @property
    def gain(self) -> float:
        """Speed of training relative to the baseline after the start; 1 if unknown."""
        return (self.ratio or 1.0) * (self.step_ms / 1e3 / self.training_s if self.step_ms else 1.0)

    def proven(self, parity: Parity) -> Timing:
        found = {"parity": parity.parity, "parity_reason": parity.reason, "states": parity.states}
        return self.model_copy(update=found | {"short_of_memory": parity.short_of_memory})

    def proven_for(self, steps: int | None) -> bool:
        """Returns whether the proof covers a training of so many steps."""
        return self.states >= STATES or (steps is not None and steps <= self.states)

    def finishes(self, steps: int | None) -> float:
        """Returns the seconds of a run of `steps` from now on, with a filled compile cache; for None, of a step."""
        if self.step_ms is None:
            return float("inf")
        if steps is None:
            return self.training_s
        compile_s = self.compile_s if self.compile_warm_s is None else self.compile_warm_s
        return (self.startup_s or 0.0) + (compile_s or 0.0) + steps * self.training_s

    def saves_s(self, other: Timing, steps: int | None) -> float:
        return other.finishes(steps) - self.finishes(steps)


class Verdict(Record):
    """The result of a race.

    Attributes:
        task, fingerprint: the Task's name, and its hash.
        plans: in the requested order.
        baseline: name of the plan that the ratios refer to.
        winner: name of the trusted plan that finishes this run first; None with too few measurements.
        steps: of the whole run; None for a stream of unknown length.
        left_open: whether a search that chose the baseline has no evidence against the plan of the rules.
        busy: a remark on other programs that used the cores meanwhile, which make times unsure; empty if none did.
        machine, versions: where and with which versions the race ran.
        ended_by, ended: the signal that stopped the proof, and a description; then there is no winner.
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
    busy: str = ""
    machine: str
    versions: dict[str, str]
    seconds: float
    ended_by: Literal["SIGINT", "SIGTERM", "SIGHUP"] | None = None
    ended: str | None = None

    @property
    def remarks(self) -> list[str]:
        """The notes, and the remark on a busy machine."""
        return [*self.notes, *filter(None, [self.busy])]

    def plan(self, name: str) -> Timing:
        return next(timing for timing in self.plans if timing.name == name)


def describe_ratio(timing: Timing, busy: str) -> str:
    """Returns a plan's speed in words, no sure ones if the machine was busy."""
    if busy:
        return f"measured {timing.ratio:.2f} times as fast as the baseline (not sure: the machine was busy)"
    return f"{timing.ratio:.2f} times as fast as the baseline"


def with_payoff(timing: Timing, baseline: Timing) -> Timing:
    """Returns the timing with `pays_after`: the steps that compensate a longer start than the baseline's."""
    saves_s = baseline.training_s - timing.training_s
    if timing.verdict != "faster" or saves_s <= 0:
        return timing.model_copy(update={"pays_after": None})
    steps = math.ceil((timing.starts_s - baseline.starts_s) / saves_s)
    return timing.model_copy(update={"pays_after": max(0, steps)})


def best_plan_name(plans: Sequence[Timing], baseline: str, *, proven: bool) -> str | None:
    """Returns the name of the plan that finishes the run first: the baseline or a plan with the verdict `faster`.

    Args:
        proven: exclude plans whose parity isn't trusted.

    Returns:
        None with too few measurements.
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
    """The size of a Task at which a plan overtakes the baseline, or falls behind.

    Attributes:
        at: size with equal times, between a size with verdict `faster` and a size with `slower`; None without such
            sizes.
        low, high: the sizes between which the ratio's interval contains 1.
        faster: the side on which the plan is faster.
        reason: the cause, in words.
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
        parameter, values: the varied argument of the file's `task(...)`, and its values in the requested order.
        races: one per value.
        crossings: of each plan except the baseline, by size; an entry without a size for plans without a crossover.
        ended_by, ended: why sizes are missing, as a code and in words; None for complete results.
    """

    version: int = 1
    parameter: str
    values: list[str]
    races: list[Verdict]
    crossings: list[Crossover]
    ended_by: Literal["failure", "SIGINT", "SIGTERM", "SIGHUP"] | None = None
    ended: str | None = None


class SpeedRatio(Record):
    """A ratio of times: original over exchange, with its 99 % interval.

    Attributes:
        median: over the pairs; above 1 if the exchange is faster.
        low, high: ends of the interval; None with fewer than 8 pairs.
        pairs: number of compared pairs.
    """

    median: float
    low: float | None = None
    high: float | None = None
    pairs: int


class ExchangedPart(Record):
    """A part of the script that hotloop could exchange.

    Attributes:
        kind: `optimizer`, `data loader`, `workers` (processes that load data), `module`, or `process` for an option of the whole process.
        name: the part in the script's words, such as `TensorDataset, 4,096 samples`.
        exchange: the form that was tried last, such as `fused`.
        used: whether the exchange was in use at the script's end.
        proof: `bitwise`, `fp32-equivalent` or `reduced-precision`; empty without a proof.
        proven: number of calls at which original and exchange were compared; 0 for `process`, whose options change no operation.
        pairs: number of pairs of calls or of windows in which original and exchange were raced.
        ratio: time of the original over time of the exchange, for this part alone, of a module for a whole step; None
            without a race.
        was_busy: whether other programs took a tenth of the time of the race, so that `ratio` has no interval and isn't stored.
        reason: why the exchange is not used; empty if it is.
    """

    kind: Literal["optimizer", "data loader", "workers", "module", "process"]
    name: str
    exchange: str
    used: bool
    proof: str = ""
    proven: int = 0
    pairs: int = 0
    ratio: SpeedRatio | None = None
    was_busy: bool = False
    reason: str = ""


class ScriptRun(Record):
    """A script's run with exchanges.

    Attributes:
        source: the script's file, or its module.
        exit_code: of the script's process; negative for a signal.
        seconds: from start to end.
        steps: updates of the optimizer that ends a step.
        exact: whether only bitwise exchanges were allowed.
        dry_run: whether the exchanges were only tried.
        parts: the parts that hotloop could exchange.
        ratio: step time without the exchanges over step time with them; None if too few steps were compared.
        own_work_s: seconds of `seconds` that hotloop's start, comparisons, forks, compiling and lost races took.
        gained_s: seconds that the exchanges saved, by `ratio`.
        is_stored: whether the next run of the script begins with what this run found.
        notes: what else the user must know.
    """

    version: int = 1
    source: str
    exit_code: int
    seconds: float
    own_work_s: float = 0.0
    gained_s: float = 0.0
    is_stored: bool = False
    steps: int = 0
    exact: bool = False
    dry_run: bool = False
    parts: list[ExchangedPart] = Field(default_factory=list)
    ratio: SpeedRatio | None = None
    notes: list[str] = Field(default_factory=list)
