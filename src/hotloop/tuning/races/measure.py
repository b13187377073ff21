"""A race of plans: lowers and warms up each, runs windows in turn, and returns a Timing for each."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hotloop.core.format import format_milliseconds
from hotloop.core.hardware.machine_load import LoadMeter, wait_until_quiet
from hotloop.core.processes import Deadline
from hotloop.core.random.rng import preserve_generators
from hotloop.core.records.race import Timing, with_payoff
from hotloop.core.reporter import Progress
from hotloop.errors import HotloopError, TimeOverError, describe_error, error_summary
from hotloop.lowering.failures.explanation import explain_error
from hotloop.lowering.program import Program
from hotloop.plan import Plan
from hotloop.tuning.races.rounds import ContenderTimes, RaceLimits, ratio_to_baseline, run_rounds
from hotloop.tuning.races.runner import (
    WARM_UP_S,
    Clock,
    Runner,
    loading_workers,
    mean_feed_time,
    measure_feed_times,
    measure_peak_memory,
)
from hotloop.tuning.races.statistics import MIN_PAIRS, Ratio, spans_margin, verdict_of

_BRIEF_WARM_UP_S = 0.05
"""Seconds of warm-up in a search, where earlier plans have warmed up the machine."""

_TIME_SHARE = 0.5
"""Share of the time until the deadline for one part of the race; in a search `_SEARCH_TIME_SHARE`."""

_SEARCH_TIME_SHARE = 0.8

_LEAST_RACE_S = 0.01

_WAIT_SHARE = 0.5
"""Longest wait for a quiet machine, as a share of the time for the windows."""

_LOADING_BOUND_SHARE = 0.9
"""Share of a step's time from which loading the batch determines the step."""


@dataclass(frozen=True)
class Contender:
    """A plan of a race.

    Attributes:
        name: unique in the race.
        plan: the requested plan; None if lowering chooses.
        group: see `ContenderTimes`.
    """

    name: str
    lower: Callable[[], Program]
    plan: Plan | None = None
    group: str = ""


@dataclass
class _ContenderState:
    name: str
    group: str = ""
    program: Program | None = None
    runner: Runner | None = None
    window_times: ContenderTimes | None = None
    device: str = ""
    startup_s: float = 0.0
    step_s: float = math.inf
    feed_s: Sequence[float] = ()
    figures: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None
    short_of_memory: bool = False


@dataclass(frozen=True)
class RaceMeasurement:
    """Timings in the order of the contenders, notes on uncertain results, and a remark on a busy machine, else empty."""

    plans: list[Timing]
    notes: list[str]
    busy: str = ""


def measure(
    entrants: Sequence[Contender],
    baseline: str,
    *,
    steps: int | None,
    time_limit_s: float,
    brief: bool = False,
    clock: Clock = time.perf_counter,
    progress: Progress = lambda doing, share: None,
    deadline: Deadline | None = None,
) -> RaceMeasurement:
    """Races plans against the plan named `baseline`; at the end each Program has its first State, and is closed.

    A plan that can't be lowered or run has a `failure` in place of times.

    Args:
        steps: of the whole run, for `run_s`; None if unknown.
        time_limit_s: for the windows, without lowering, compiling and warming up.
        brief: measure only which plan is the fastest, see `RaceLimits`: no memory, and the feed only with workers.
        deadline: for everything; each plan may take half of the remaining time.

    Raises:
        HotloopError: the baseline can't be lowered or run, or not before the deadline.
    """
    deadline = deadline or Deadline()
    racers = [
        _ContenderState(entrant.name, entrant.group, figures=_requested_settings(entrant)) for entrant in entrants
    ]
    with preserve_generators():
        try:
            with deadline.fraction(_TIME_SHARE).enforce(f"preparing {baseline}"):
                _warm_up_process(entrants[[racer.name for racer in racers].index(baseline)])
            for racer, entrant in zip(racers, entrants, strict=True):
                progress(f"preparing {racer.name}", 0.0)
                _attempt(racer, baseline, partial(_prepare_in_time, deadline, racer, entrant, clock, brief))
            with deadline.fraction(_TIME_SHARE).enforce("timing the workers"):
                _time_loading(racers, baseline)
            limits = RaceLimits(min(time_limit_s, max(_LEAST_RACE_S, deadline.left_s)), clock, brief)
            wait_until_quiet(_WAIT_SHARE * limits.seconds)
            load = LoadMeter()
            _run(racers, baseline, limits, progress, deadline)
            busy = load.busy()
            if not brief:
                _measure_memory_and_feed(racers, baseline, deadline)
        finally:
            for racer in racers:
                if racer.program is not None:
                    racer.program.close()
    return replace(_summarize(racers, baseline, steps), busy=busy)


def _requested_settings(entrant: Contender) -> dict[str, Any]:
    return {} if entrant.plan is None else {"plan": entrant.plan.model_dump()}


def _warm_up_process(entrant: Contender) -> None:
    """Runs a step of the baseline, so that one-time costs of the process, such as imports, count for no plan."""
    program = entrant.lower()
    before = program.state()
    try:
        program.advance(1)
        program.restore(before)
    except Exception as error:
        raise explain_error(error, program, None) from error
    finally:
        program.close()


def _attempt(racer: _ContenderState, baseline: str, act: Callable[[], None]) -> None:
    """Calls `act`; an error is the plan's failure, and ends the race for the baseline."""
    try:
        act()
    except Exception as error:
        _record_failure(racer, baseline, error)


def _record_failure(racer: _ContenderState, baseline: str, error: Exception) -> None:
    known = error if racer.program is None else explain_error(error, racer.program, None)
    if racer.name == baseline:
        raise known from error
    racer.failure = str(known) if isinstance(known, HotloopError) else describe_error(known)
    racer.short_of_memory = error_summary(known)[1] or error_summary(error)[1]
    if racer.program is not None:
        racer.program.close()
    racer.program = racer.runner = racer.window_times = None


def _prepare_in_time(deadline: Deadline, racer: _ContenderState, entrant: Contender, clock: Clock, brief: bool) -> None:
    with deadline.fraction(_SEARCH_TIME_SHARE if brief else _TIME_SHARE).enforce(f"preparing {racer.name}"):
        _prepare(racer, entrant, clock, _BRIEF_WARM_UP_S if brief else WARM_UP_S)


def _prepare(racer: _ContenderState, entrant: Contender, clock: Clock, warm_s: float) -> None:
    began = clock()
    program = racer.program = entrant.lower()
    racer.startup_s = clock() - began - program.compile_s + _cached_read_s(program, began)
    racer.device = program.device.type
    racer.figures["plan"] = program.parts.plan.model_dump()
    with preserve_generators(*program.devices):
        racer.runner = Runner(program, clock)
        first_s, racer.step_s = racer.runner.warm_up(warm_s)
    racer.startup_s += first_s


def _cached_read_s(program: Program, began: float) -> float:
    """Returns the seconds of reading the data into memory, if an earlier plan did that."""
    if program.parts.plan.residency == "stream":
        return 0.0
    return sum(took for took, at in program.parts.splits.reading_s.values() if at < began)


def _time_loading(racers: Sequence[_ContenderState], baseline: str) -> None:
    """Times the workers of each plan alone; once for plans that load alike."""
    ahead = [racer for racer in racers if racer.program is not None and loading_workers(racer.program)]
    for racer in ahead:
        assert racer.program is not None
        racer.program.close()  # loaders start again on demand
    known: dict[tuple[Any, ...], Sequence[float]] = {}
    for racer in ahead:
        _attempt(racer, baseline, partial(_measure_workers, racer, known))
    for racer in ahead:
        if racer.runner is not None and racer.program is not None:
            with preserve_generators(*racer.program.devices):  # starting workers takes longer than a window
                _attempt(racer, baseline, partial(racer.runner.run_untimed, 0))


def _measure_workers(racer: _ContenderState, known: dict[tuple[Any, ...], Sequence[float]]) -> None:
    runner, program = racer.runner, racer.program
    assert runner is not None and program is not None
    alike = (loading_workers(program), program.device)
    if alike not in known:
        with preserve_generators(*program.devices):
            known[alike] = measure_feed_times(program)
        program.close()
        runner.restore_state()
    racer.feed_s = known[alike]
    if racer.feed_s:
        racer.figures["feed_ms"] = 1e3 * statistics.fmean(racer.feed_s)


def _run(
    racers: Sequence[_ContenderState], baseline: str, limits: RaceLimits, progress: Progress, deadline: Deadline
) -> None:
    runners = [racer for racer in racers if racer.runner is not None]
    base = next(racer for racer in runners if racer.name == baseline)
    for racer in runners:
        assert racer.runner is not None
        racer.window_times = ContenderTimes(racer.name, racer.runner, group=racer.group, feed_s=racer.feed_s)
        racer.window_times.set_layout(racer.device, racer.step_s, base.step_s, limits.brief)
    # Plans that keep memory run one after another, since this returns the least memory to the system.
    together = sorted(runners, key=_keeps_memory)
    lanes = {racer.name: racer.window_times for racer in together if racer.window_times is not None}
    programs = [racer.program for racer in runners if racer.program is not None]
    try:
        with (
            preserve_generators(*{device for program in programs for device in program.devices}),
            deadline.enforce(f"racing {baseline}"),
        ):
            run_rounds(list(lanes.values()), lanes[baseline], limits, lambda share: progress("racing", share))
    except TimeOverError:
        if not all(lane.times or lane.error for lane in lanes.values()):
            raise
    except Exception as error:
        _record_failure(base, baseline, error)
    for racer in runners:
        assert racer.window_times is not None
        if racer.window_times.error is not None:
            _record_failure(racer, baseline, racer.window_times.error)
        elif racer.runner is not None:
            _attempt(racer, baseline, racer.runner.restore_state)


def _keeps_memory(racer: _ContenderState) -> bool:
    return racer.program is not None and racer.program.parts.plan.allocator == "keep"


def _measure_memory_and_feed(racers: Sequence[_ContenderState], baseline: str, deadline: Deadline) -> None:
    """Measures memory and feed of each plan outside of the windows, if there is time."""
    for racer in racers:
        if racer.runner is not None and deadline.left_s > 0:
            with (
                suppress(TimeOverError),
                deadline.fraction(_TIME_SHARE).enforce(f"measuring the memory of {racer.name}"),
            ):
                _attempt(racer, baseline, partial(_measure_details, racer))


def _measure_details(racer: _ContenderState) -> None:
    """Measures the memory of a step and the time of loading a batch, and restores the State."""
    runner, program = racer.runner, racer.program
    assert runner is not None and program is not None
    with preserve_generators(*program.devices):
        runner.run_untimed(1)
        runner.ensure_step()
        racer.figures["peak_memory_bytes"] = measure_peak_memory(program)
        feed_s = None if racer.feed_s else mean_feed_time(program)
    if feed_s is not None:
        racer.figures["feed_ms"] = 1e3 * feed_s
    runner.restore_state()


def _summarize(racers: Sequence[_ContenderState], baseline: str, steps: int | None) -> RaceMeasurement:
    base = next(racer for racer in racers if racer.name == baseline)
    notes: list[str] = []
    plans = []
    for racer in racers:
        if racer.failure is not None:
            asked, short = racer.figures.get("plan", {}), racer.short_of_memory
            plans.append(Timing(name=racer.name, plan=asked, failure=racer.failure, short_of_memory=short))
            continue
        assert racer.window_times is not None and base.window_times is not None
        found = ratio_to_baseline(racer.window_times, base.window_times)
        notes += _loading_notes(racer.window_times)
        plans.append(_timing(racer, base.window_times, found, steps))
        if not racer.window_times.is_running:
            notes.append(f"{racer.name} was left out after {found.pairs} pairs of windows: it can't be the fastest")
        elif racer is not base and (note := _uncertainty_note(racer.name, found)):
            notes.append(note)
    beside = plans[racers.index(base)]
    return RaceMeasurement([with_payoff(timing, beside) for timing in plans], notes)


def _timing(racer: _ContenderState, base: ContenderTimes, found: Ratio, steps: int | None) -> Timing:
    """Computes the step's time from the baseline's time and the ratio of the pairs, since windows may differ."""
    assert racer.window_times is not None and racer.runner is not None and racer.program is not None
    compile_s, batches = racer.program.compile_s, racer.program.feed.batches
    looking_s = racer.program.recheck_s / batches if batches else 0.0
    step_s = statistics.median(base.times) / found.median
    start_s = racer.startup_s + compile_s
    return Timing(
        name=racer.name,
        step_ms=1e3 * step_s,
        samples_per_s=racer.runner.samples / racer.runner.steps / step_s,
        ratio=found.median,
        ratio_low=found.low,
        ratio_high=found.high,
        windows=found.pairs,
        startup_s=racer.startup_s,
        compile_s=compile_s,
        looking_ms=1e3 * looking_s,
        run_s=None if steps is None else start_s + steps * (step_s + looking_s),
        verdict=verdict_of(found),
        left_out=not racer.window_times.is_running,
        **racer.figures,
    )


def _loading_notes(lane: ContenderTimes) -> list[str]:
    if not lane.feed_s or (fed_s := statistics.median(lane.feed_s)) < _LOADING_BOUND_SHARE * statistics.median(
        lane.times
    ):
        return []
    return [
        f"{lane.name} waits for its data: workers load a batch in {format_milliseconds(1e3 * fed_s)}, so no step counts as shorter"
    ]


def _uncertainty_note(name: str, found: Ratio) -> str:
    if found.low is None or found.high is None:
        return (
            f"the time limit was too short to measure {name}: its windows make {found.pairs} of the "
            f"{MIN_PAIRS} pairs that are needed; give it more time"
        )
    if verdict_of(found) == "no difference" and spans_margin(found):
        return (
            f"the time limit was too short to compare {name} with the baseline: the interval of its ratio, "
            f"{found.low:.3f} to {found.high:.3f}, contains a difference and none; give it more time"
        )
    return ""
