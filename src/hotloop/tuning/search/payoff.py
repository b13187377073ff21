"""Whether a compilation pays in this run: by earlier races, and by some eager steps on one batch."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from hotloop.core.format import format_milliseconds
from hotloop.core.number_formats import REDUCED
from hotloop.core.processes import SEARCH_SHARE
from hotloop.core.random.rng import preserve_generators
from hotloop.core.records.race import TRUSTED_CLASSES, Timing, Verdict
from hotloop.data.feeds.feed import BatchTransform, open_feed
from hotloop.data.splits import DataSplits
from hotloop.errors import describe_error
from hotloop.lowering.compile.runtime_checks import recheck_count
from hotloop.lowering.object_state.attributes import preserve_attributes
from hotloop.lowering.program import Program
from hotloop.plan import Plan
from hotloop.tuning.races.runner import Runner
from hotloop.tuning.races.statistics import MIN_PAIRS
from hotloop.tuning.search.budget import PROOF_STEPS, estimate_proof_s, saved_steps
from hotloop.tuning.search.compile_payoff import estimate_compile_gain, estimate_compile_s, estimate_trace_s
from hotloop.tuning.search.program_pool import MAX_COMPILE_S
from hotloop.tuning.search.step_profile import StepProfile, profile_step

_COMPILE_TIME_FACTOR = 1.5
"""Factor on the expected seconds of a compilation, for slow or busy machines."""

_MIN_COMPILE_LIMIT_S = 120.0
"""Seconds that any compilation may take."""

_MIN_PAYOFF_FACTOR = 2
"""Factor of the saving to the cost of compilation, race and proof, since a race may be lost and a proof fail."""

_MAX_FUTURE_RUNS = 10
"""Most expected future runs, so that a short run doesn't wait for the sake of long earlier runs."""

_RACING_STEPS = 2 * MIN_PAIRS
"""Steps of each plan in a race, with baseline and eager plan."""

_ESTIMATE_S, _MEASURE_S = 0.05, 0.2
"""Seconds of a first estimate of a step, enough to exclude most short runs, and of the measurement."""

_COMPARED_BATCHES = 4
"""Batches that are compared: a compiled step needs equal batches, and runs others eagerly."""


@dataclass(frozen=True)
class Payoff:
    """The saving and the cost of compiling.

    Attributes:
        steps: remaining steps of the run; `future_steps` of similar runs that may follow.
        step_s: seconds of an eager step without its batch.
        gain: speedup of a compiled step; None if even an infinite one would not pay.
        load_s, copying_s: seconds of making a batch, and of copying the State out and back in a proof.
        compile_s: seconds of a compilation without any cache.
        limit_s: seconds until the run stops.
        rechecks, recheck_s: number and seconds of checks whether callbacks changed the compiled step.
        normed: whether the step normalises over the batch, which makes a proof longer.
        activity: `compiling`, or `recording` without a compiler.
    """

    steps: int
    step_s: float
    gain: float | None = None
    load_s: float = 0.0
    compile_s: float = estimate_compile_s(0)
    limit_s: float = math.inf
    made: StepProfile | None = None
    rechecks: int = 0
    recheck_s: float = 0.0
    copying_s: float = 0.0
    future_steps: int = 0
    normed: bool = False
    activity: str = "compiling"

    def for_way(self, way: str, *, recorded: bool = False) -> Payoff:
        """Returns the payoff of another value of the plan's axis `compile`, or of a CUDA graph if `recorded`."""
        operations = None if self.made is None else self.made.operations
        gain, look_s = (
            estimate_compile_gain(self.made, self.step_s, way, recorded=recorded),
            estimate_trace_s(operations or 0),
        )
        return replace(
            self, gain=gain, compile_s=estimate_compile_s(operations, way), recheck_s=look_s, activity=_activity(way)
        )

    @property
    def saves_s(self) -> float:
        """Seconds saved in this run and the future runs."""
        share = 1.0 if self.gain is None else 1 - 1 / self.gain
        return max(0.0, (self.steps + self.future_steps) * self.step_s * share - self.rechecks * self.recheck_s)

    def costs_s(self, compilations: int = 1) -> float:
        """Returns the seconds of compilations, their races, and a proof."""
        racing_s = _RACING_STEPS * (compilations + 2) * self.load_s
        proof_s = estimate_proof_s(self.step_s + self.load_s, self.copying_s, self.normed)
        return compilations * _COMPILE_TIME_FACTOR * self.compile_s + racing_s + proof_s

    def is_worthwhile(self, compilations: int = 1) -> bool:
        """Whether compilations save clearly more than they cost, at most double the run, and leave time to train."""
        most_s = min(self.steps * self.step_s, SEARCH_SHARE * self.limit_s)
        return self.costs_s(compilations) < min(self.saves_s / _MIN_PAYOFF_FACTOR, most_s)

    @property
    def compile_limit_s(self) -> float:
        """Seconds after which a compilation is ended: its saving, within limits."""
        return min(MAX_COMPILE_S, max(_MIN_COMPILE_LIMIT_S, self.saves_s), max(1.0, SEARCH_SHARE * self.limit_s))

    @property
    def compilations(self) -> int:
        """The number of compilations that pay, at most two."""
        return 0 if self.gain is None else sum(map(self.is_worthwhile, (1, 2)))

    def __str__(self) -> str:
        most = "can save at most" if self.gain is None else "should save about"
        loading = f", its batch {format_milliseconds(1e3 * self.load_s)}" if self.load_s > self.step_s else ""
        long = self.costs_s() >= SEARCH_SHARE * self.limit_s
        limit = f", more than a third of the {max(0.0, self.limit_s):.0f} s until stop-after" if long else ""
        looking = f" with {self.rechecks:,} checks for what callbacks change" if self.rechecks else ""
        lost = (
            ", which a lost race would waste"
            if self.costs_s() < self.saves_s <= _MIN_PAYOFF_FACTOR * self.costs_s()
            else ""
        )
        runs = f" and of {self.future_steps:,} in runs to come, as there were before" if self.future_steps else ""
        if self.future_steps and self.costs_s() >= self.steps * self.step_s:
            lost = ", longer than the run itself"
        return (
            f"a step takes {format_milliseconds(1e3 * self.step_s)}{loading}, so {self.activity} {most} {self.saves_s:,.0f} s"
            f" of the {self.steps:,} steps left{runs}{looking}, and with a proof it may take {self.costs_s():.0f} s{limit}{lost}"
        )


def _activity(way: str) -> str:
    return "recording" if way == "none" else "compiling"


@dataclass(frozen=True)
class RaceHistory:
    """Results of earlier races of a Task.

    Attributes:
        timings: relative to the baseline of this run.
        steps: trained steps since the last compilation for future runs; `reset_step_count` is called at the next one.
        unprofitable: plans that are faster and proven, and whose startup takes longer than they save.
    """

    timings: Sequence[Timing] = ()
    save_verdict: Callable[[Verdict], None] = lambda verdict: None
    steps: int = 0
    reset_step_count: Callable[[], None] = lambda: None
    unprofitable: Collection[Plan] = ()

    def expected_future_steps(self, steps: int) -> int:
        """Returns the steps of runs that may follow: as many as there were (the ski rental rule)."""
        return min(self.steps, _MAX_FUTURE_RUNS * steps)

    @property
    def _timings_by_plan(self) -> dict[Plan, Timing]:
        return {timing.as_plan: timing for timing in self.timings}

    def why_refused(self, plan: Plan) -> str:
        """Returns why a plan is excluded; empty if it isn't."""
        timing = self._timings_by_plan.get(plan)
        if timing is not None and timing.parity == "broken":
            return "it was found broken"
        return "it was found slower than the baseline" if timing is not None and timing.behind else ""

    def has_failed(self, plan: Plan) -> bool:
        """Whether a plan failed to run."""
        timing = self._timings_by_plan.get(plan)
        return timing is not None and timing.failure is not None

    def has_lost(self, plan: Plan) -> bool:
        """Whether a race found the plan no faster than the baseline."""
        timing = self._timings_by_plan.get(plan)
        return timing is not None and timing.failure is None and (timing.behind or timing.verdict == "no difference")

    def why_not_again(self, plan: Plan, eager: Plan, accepted: Collection[str], steps: int | None) -> str:
        """Returns why a compiled plan isn't tried again in a run of `steps` steps; empty if it may be."""
        found = self._timings_by_plan
        timing = found.get(plan)
        if timing is None:
            return ""
        if plan in self.unprofitable:
            return "it is faster and proven, and takes longer to start than it saves"
        if timing.failure is not None:
            return f"it failed before ({timing.failure})"
        if timing.parity is not None and timing.parity not in accepted:
            return f"it was found {timing.parity}: {timing.parity_reason}"
        ratio, beside = timing.ratio or 0.0, (found[eager].ratio if eager in found else None) or 1.0
        if (timing.decided or timing.left_out) and ratio <= beside:
            return "it was raced before, and isn't faster"
        if timing.verdict == "no difference" and timing.windows >= MIN_PAIRS:
            return "it was raced before for as long as a search races, and isn't clearly faster"
        unproven = timing.verdict == "faster" and timing.parity is None
        if unproven and saved_steps(steps, timing.gain, beside) <= PROOF_STEPS:
            return "it was raced before, and its proof takes longer than it saves"
        return ""


def accepted_parities(asked: Plan) -> tuple[str, ...]:
    """Returns the parity classes that a winner may have; `reduced-precision` if the user's plan reduces it."""
    return (*TRUSTED_CLASSES, "reduced-precision") if asked.precision in REDUCED else TRUSTED_CLASSES


def estimate_payoff(
    program: Program,
    steps: int,
    *,
    way: str,
    rewrites: bool,
    recorded: bool = False,
    limit_s: float = math.inf,
    to_come: int = 0,
    normed: bool = False,
) -> Payoff | str:
    """Estimates the payoff of compiling an eager Program, whose State stays; or returns why none is possible.

    Args:
        way: value of the plan's axis `compile`.
        rewrites, recorded: whether the compiled step has rewrites, and is recorded as a CUDA graph.
        limit_s: seconds until the run stops.
        to_come: steps of runs that may follow.
        normed: whether the step normalises over the batch.
    """
    try:
        with _repeat_first_batch(program):
            often = recheck_count(program.watched, steps + to_come, program.feed.batches)
            step_s, copying_s = Runner(program).quick_estimate(_ESTIMATE_S)
            least_s = estimate_compile_s(0, way)
            hope = Payoff(
                steps,
                step_s,
                compile_s=least_s,
                limit_s=limit_s,
                rechecks=often,
                copying_s=copying_s,
                future_steps=to_come,
                normed=normed,
                activity=_activity(way),
            )
            if not hope.is_worthwhile():
                return hope
        if not _has_equal_batches(program):
            return "its batches differ in keys or shapes, and a compiled step is for batches that are alike"
        with _repeat_first_batch(program):
            step_s = Runner(program).warm_up(_MEASURE_S)[1]
            made = profile_step(program, rewrites=rewrites)
        return replace(hope, step_s=step_s, load_s=_measure_loading_s(program), made=made).for_way(
            way, recorded=recorded
        )
    except Exception as error:  # training explains errors of the Task
        return f"its steps couldn't be timed ({describe_error(error)})"


def _measure_loading_s(program: Program) -> float:
    """Returns the seconds of making a batch from the Task's own data, as the baseline does at each step."""
    parts = program.parts
    with _first_batches(program, parts.task.roles) as batches:
        began = time.perf_counter()
        next(batches)
        return time.perf_counter() - began


def _has_equal_batches(program: Program) -> bool:
    """Whether the first batches have the same keys and shapes; the last one of an epoch may have fewer samples."""
    from hotloop.lowering.steps.compiled_step import (
        batch_signature,  # imports torch's compiler
    )

    batches = program.feed.batches
    most = _COMPARED_BATCHES if batches is None else max(1, min(_COMPARED_BATCHES, batches - 1))
    with _first_batches(program) as found:
        return len({batch_signature(batch) for batch, _ in itertools.islice(found, most)}) == 1


@contextmanager
def _first_batches(program: Program, roles: DataSplits | None = None) -> Iterator[Iterator[tuple[Any, int]]]:
    """Opens a separate feed, and yields its batches; generators stay unchanged."""
    parts, roles = program.parts, roles or program.parts.splits
    treatment = BatchTransform(parts.device, parts.task.seed, roles.prepare, parts.task.augment)
    with preserve_generators(*program.devices), preserve_attributes(parts.task):
        feed = open_feed(roles.train, roles.order, treatment, workers=0)
        try:
            yield feed.epoch(0)
        finally:
            feed.close()


@contextmanager
def _repeat_first_batch(program: Program) -> Iterator[None]:
    """Repeats the Program's first batch, without effect on generators and data."""
    own = program.feed
    with _first_batches(program) as batches:
        batch = next(batches)
    program.feed = _RepeatedBatch(*batch, own.batches)
    try:
        with preserve_generators(*program.devices):
            yield
    finally:
        program.feed = own


class _RepeatedBatch:
    """A feed of one batch, as often as an epoch has batches."""

    reseeds = False

    def __init__(self, batch: Any, samples: int, batches: int | None) -> None:
        self.batch, self.samples, self.batches = batch, samples, batches

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, int]]:
        numbers = itertools.count(start) if self.batches is None else range(start, self.batches)
        for _ in numbers:
            yield self.batch, self.samples

    def close(self) -> None:
        pass
