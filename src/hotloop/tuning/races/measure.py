"""A race of plans: lowers them all, warms them up, runs windows of them in turn, and says what was found of each."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hotloop.core.format import milliseconds
from hotloop.core.processes.deadline import Deadline
from hotloop.core.random.rng import preserved
from hotloop.core.records.race import Timing, paying
from hotloop.errors import HotloopError, TimeOverError, blame, told
from hotloop.lowering.failures.explanation import explained
from hotloop.lowering.program import Program
from hotloop.plan import Plan
from hotloop.tuning.races.rounds import Lane, Limits, ratio, run_rounds
from hotloop.tuning.races.runner import WARM_S, Clock, Runner, feed_time, feed_times, loading_workers, peak_of_step
from hotloop.tuning.races.statistics import LEAST_PAIRS, Ratio, answer, undecided

Progress = Callable[[str, float], None]
"""Called with what goes on, and which share of it is done."""

_BRIEF_S = 0.05
"""Of warming up, where the machine is warm from the plans before."""


_PART = 0.5
"""Of the time until the deadline, which a piece of the race may take; in a search, whose races end sooner, `_PART_OF_SEARCH`."""

_PART_OF_SEARCH = 0.8

_LEAST_RACE_S = 0.01

_STARVED = 0.9
"""Share of a step from which on loading its batch is what it takes."""


@dataclass(frozen=True)
class Entrant:
    """A plan that takes part.

    Attributes:
        name: as it was asked for; no two are the same.
        lower: makes its Program.
        plan: what was asked for; None where lowering chooses.
        group: see `Lane`.
    """

    name: str
    lower: Callable[[], Program]
    plan: Plan | None = None
    group: str = ""


@dataclass
class _Racer:
    name: str
    group: str = ""
    program: Program | None = None
    runner: Runner | None = None
    lane: Lane | None = None
    device: str = ""
    startup_s: float = 0.0
    step_s: float = math.inf
    feed_s: Sequence[float] = ()
    figures: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None
    short_of_memory: bool = False


@dataclass(frozen=True)
class Measured:
    """What a race measured.

    Attributes:
        plans: in the order of the entrants.
        notes: where too little was measured to say.
    """

    plans: list[Timing]
    notes: list[str]


def measure(
    entrants: Sequence[Entrant],
    baseline: str,
    *,
    steps: int | None,
    time_limit_s: float,
    brief: bool = False,
    clock: Clock = time.perf_counter,
    progress: Progress = lambda doing, share: None,
    deadline: Deadline | None = None,
) -> Measured:
    """Races plans against the one named `baseline`; each Program has its first State again at the end, and is closed.

    A plan that can't be lowered or run has a `failure` in place of figures, and the others go on.

    Args:
        steps: of the whole run, which `run_s` is for; None if unknown.
        time_limit_s: for the windows; lowering, compiling and warming up come on top.
        brief: whether it is enough to know which is the fastest, as a search wants it, see `Limits`; memory is not looked
            at then, and the feed only where workers load.
        deadline: when all is to be over, preparing included, of which each plan may take half of what is left.

    Raises:
        HotloopError: the baseline can't be lowered or run, or not before the deadline.
    """
    deadline = deadline or Deadline()
    racers = [_Racer(entrant.name, entrant.group, figures=_asked(entrant)) for entrant in entrants]
    with preserved():
        try:
            with deadline.part(_PART).enforced(f"preparing {baseline}"):
                _rehearse(entrants[[racer.name for racer in racers].index(baseline)])
            for racer, entrant in zip(racers, entrants, strict=True):
                progress(f"preparing {racer.name}", 0.0)
                _attempt(racer, baseline, partial(_in_time, deadline, racer, entrant, clock, brief))
            with deadline.part(_PART).enforced("timing the workers"):
                _time_loading(racers, baseline)
            limits = Limits(min(time_limit_s, max(_LEAST_RACE_S, deadline.left_s)), clock, brief)
            _run(racers, baseline, limits, progress, deadline)
            if not brief:
                _look_closer(racers, baseline, deadline)
        finally:
            for racer in racers:
                if racer.program is not None:
                    racer.program.close()
    return _summed_up(racers, baseline, steps)


def _asked(entrant: Entrant) -> dict[str, Any]:
    return {} if entrant.plan is None else {"plan": entrant.plan.model_dump()}


def _rehearse(entrant: Entrant) -> None:
    """One step of the baseline: what a process pays once, whatever the plan, such as imports, is no plan's own."""
    program = entrant.lower()
    before = program.state()
    try:
        program.advance(1)
        program.restore(before)
    except Exception as error:
        raise explained(error, program, None) from error
    finally:
        program.close()


def _attempt(racer: _Racer, baseline: str, act: Callable[[], None]) -> None:
    """Does something for a plan; what goes wrong is its failure, or ends the race if it is the baseline."""
    try:
        act()
    except Exception as error:
        _failed(racer, baseline, error)


def _failed(racer: _Racer, baseline: str, error: Exception) -> None:
    known = error if racer.program is None else explained(error, racer.program, None)
    if racer.name == baseline:
        raise known from error
    racer.failure = str(known) if isinstance(known, HotloopError) else blame(known)
    racer.short_of_memory = told(known)[1] or told(error)[1]
    if racer.program is not None:
        racer.program.close()
    racer.program = racer.runner = racer.lane = None


def _in_time(deadline: Deadline, racer: _Racer, entrant: Entrant, clock: Clock, brief: bool) -> None:
    with deadline.part(_PART_OF_SEARCH if brief else _PART).enforced(f"preparing {racer.name}"):
        _prepare(racer, entrant, clock, _BRIEF_S if brief else WARM_S)


def _prepare(racer: _Racer, entrant: Entrant, clock: Clock, warm_s: float) -> None:
    """From the Task to a Program that is warm, with its State as it was."""
    began = clock()
    program = racer.program = entrant.lower()
    racer.startup_s = clock() - began - program.compile_s + _read_before(program, began)
    racer.device = program.device.type
    racer.figures["plan"] = program.parts.plan.model_dump()
    with preserved(*program.devices):
        racer.runner = Runner(program, clock)
        first_s, racer.step_s = racer.runner.warm_up(warm_s)
    racer.startup_s += first_s


def _read_before(program: Program, began: float) -> float:
    """Seconds that reading data into memory took for a plan before this one, which found it there."""
    if program.parts.plan.residency == "stream":
        return 0.0
    return sum(took for took, at in program.parts.roles.reading_s.values() if at < began)


def _time_loading(racers: Sequence[_Racer], baseline: str) -> None:
    """How fast the workers of a plan load, while those of all others rest; once for plans that load alike."""
    ahead = [racer for racer in racers if racer.program is not None and loading_workers(racer.program)]
    for racer in ahead:
        assert racer.program is not None
        racer.program.close()  # loaders start again where they are needed
    known: dict[tuple[Any, ...], Sequence[float]] = {}
    for racer in ahead:
        _attempt(racer, baseline, partial(_listen_to_workers, racer, known))
    for racer in ahead:
        if racer.runner is not None and racer.program is not None:
            with preserved(*racer.program.devices):  # starting takes longer than windows
                _attempt(racer, baseline, partial(racer.runner.settle, 0))


def _listen_to_workers(racer: _Racer, known: dict[tuple[Any, ...], Sequence[float]]) -> None:
    runner, program = racer.runner, racer.program
    assert runner is not None and program is not None
    alike = (loading_workers(program), program.device)
    if alike not in known:
        with preserved(*program.devices):
            known[alike] = feed_times(program)
        program.close()
        runner.put_back()
    racer.feed_s = known[alike]
    if racer.feed_s:
        racer.figures["feed_ms"] = 1e3 * statistics.fmean(racer.feed_s)


def _run(racers: Sequence[_Racer], baseline: str, limits: Limits, progress: Progress, deadline: Deadline) -> None:
    runners = [racer for racer in racers if racer.runner is not None]
    base = next(racer for racer in runners if racer.name == baseline)
    for racer in runners:
        assert racer.runner is not None
        racer.lane = Lane(racer.name, racer.runner, group=racer.group, feed_s=racer.feed_s)
        racer.lane.lay_out(racer.device, racer.step_s, base.step_s, limits.brief)
    together = sorted(runners, key=_memory_of)  # plans that keep memory one after the other: the least is given back
    lanes = {racer.name: racer.lane for racer in together if racer.lane is not None}
    programs = [racer.program for racer in runners if racer.program is not None]
    try:
        with (
            preserved(*{device for program in programs for device in program.devices}),
            deadline.enforced(f"racing {baseline}"),
        ):
            run_rounds(list(lanes.values()), lanes[baseline], limits, lambda share: progress("racing", share))
    except TimeOverError:
        if not all(lane.times or lane.error for lane in lanes.values()):
            raise
    except Exception as error:
        _failed(base, baseline, error)
    for racer in runners:
        assert racer.lane is not None
        if racer.lane.error is not None:
            _failed(racer, baseline, racer.lane.error)
        elif racer.runner is not None:
            _attempt(racer, baseline, racer.runner.put_back)


def _memory_of(racer: _Racer) -> bool:
    return racer.program is not None and racer.program.parts.plan.allocator == "keep"


def _look_closer(racers: Sequence[_Racer], baseline: str, deadline: Deadline) -> None:
    """Measures memory and feed of each, outside of the windows, where there is time for it."""
    for racer in racers:
        if racer.runner is not None and deadline.left_s > 0:
            with suppress(TimeOverError), deadline.part(_PART).enforced(f"measuring the memory of {racer.name}"):
                _attempt(racer, baseline, partial(_weigh, racer))


def _weigh(racer: _Racer) -> None:
    """What a step allocates, and how fast batches come; then the State is as it was."""
    runner, program = racer.runner, racer.program
    assert runner is not None and program is not None
    with preserved(*program.devices):
        runner.settle(1)
        runner.ready()
        racer.figures["peak_memory_bytes"] = peak_of_step(program)
        feed_s = None if racer.feed_s else feed_time(program)
    if feed_s is not None:
        racer.figures["feed_ms"] = 1e3 * feed_s
    runner.put_back()


def _summed_up(racers: Sequence[_Racer], baseline: str, steps: int | None) -> Measured:
    base = next(racer for racer in racers if racer.name == baseline)
    notes: list[str] = []
    plans = []
    for racer in racers:
        if racer.failure is not None:
            asked, short = racer.figures.get("plan", {}), racer.short_of_memory
            plans.append(Timing(name=racer.name, plan=asked, failure=racer.failure, short_of_memory=short))
            continue
        assert racer.lane is not None and base.lane is not None
        found = ratio(racer.lane, base.lane)
        notes += _waits(racer.lane)
        plans.append(_timing(racer, base.lane, found, steps))
        if not racer.lane.running:
            notes.append(f"{racer.name} was left out after {found.pairs} pairs of windows: it can't be the fastest")
        elif racer is not base and (note := _doubt(racer.name, found)):
            notes.append(note)
    beside = plans[racers.index(base)]
    return Measured([paying(timing, beside) for timing in plans], notes)


def _timing(racer: _Racer, base: Lane, found: Ratio, steps: int | None) -> Timing:
    """Its step takes the baseline's time over the ratio of the pairs: its own windows may have been others."""
    assert racer.lane is not None and racer.runner is not None and racer.program is not None
    compile_s, batches = racer.program.compile_s, racer.program.feed.batches
    looking_s = racer.program.looking_s / batches if batches else 0.0
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
        verdict=answer(found),
        left_out=not racer.lane.running,
        **racer.figures,
    )


def _waits(lane: Lane) -> list[str]:
    """What to say where a step takes hardly longer than loading."""
    if not lane.feed_s or (fed_s := statistics.median(lane.feed_s)) < _STARVED * statistics.median(lane.times):
        return []
    return [
        f"{lane.name} waits for its data: workers load a batch in {milliseconds(1e3 * fed_s)}, so no step counts as shorter"
    ]


def _doubt(name: str, found: Ratio) -> str:
    """What to say where the time was too short."""
    if found.low is None or found.high is None:
        return (
            f"the time limit was too short to say anything of {name}: its windows make {found.pairs} of the "
            f"{LEAST_PAIRS} pairs that are needed; give it more time"
        )
    if answer(found) == "no difference" and undecided(found):
        return (
            f"the time limit was too short to tell {name} from the baseline: the interval of its ratio, {found.low:.3f} "
            f"to {found.high:.3f}, reaches across what would be a difference; give it more time"
        )
    return ""
