"""Races and checks of plans: measures their speed, and proves that they give the baseline's result."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hotloop.core.hardware.devices import check_device, resolve_device
from hotloop.core.hardware.machine import machine_name, speed_versions
from hotloop.core.plan_request import AUTO, PlanRequest
from hotloop.core.plan_request import BASELINE as BY_NAME
from hotloop.core.processes import Deadline, Terminated, end_reason
from hotloop.core.records.race import Crossover, Parity, RaceScaling, Timing, Verdict, best_plan_name
from hotloop.core.reporter import Progress, Reporter, Say
from hotloop.core.terminal import Terminal
from hotloop.errors import DeviceError, HotloopError, TaskError, error_summary
from hotloop.lowering.failures.explanation import explain_error
from hotloop.parity.convergence import check_convergence, check_seeds
from hotloop.parity.proof import prove_plans, prove_programs
from hotloop.plan import BASELINE, Plan
from hotloop.report.race import race_progress_bar
from hotloop.task import Task, override_fields
from hotloop.task_file import LoadedTask, load_task
from hotloop.tuning.auto import facts_with_fingerprint, lower_cached_or_auto
from hotloop.tuning.contenders import PlanReference, RaceSpec, check_comparable
from hotloop.tuning.race_cache import save_races
from hotloop.tuning.races.crossover import Point, crossovers
from hotloop.tuning.races.measure import Contender, measure
from hotloop.tuning.run_context import RunContext

DEFAULT_RACE_S = 60.0
"""Seconds of the measured windows without a time limit."""

_MEASURING_SHARE = 2 / 3
"""Share of a time limit for preparing and measuring, if a proof follows."""

Prove = Callable[[Task, Sequence[Plan], Callable[[int, int], None]], list[Parity]]


def prove_all(task: Task, plans: Sequence[Plan], progress: Callable[[int, int], None]) -> list[Parity]:
    gc.collect()  # frees raced Programs, whose models and optimizers refer to each other
    return prove_plans(task, plans, progress=progress)


PROVE: Prove | None = prove_all
"""Proves that a plan gives the baseline's result; None for no proof."""


def race(
    task: Task,
    plans: Sequence[PlanReference] = (BY_NAME, AUTO),
    *,
    baseline: PlanReference = BY_NAME,
    devices: Sequence[str] | None = None,
    time_limit: str | None = None,
    prove: Prove | None = PROVE,
    progress: bool = True,
) -> Verdict:
    """Measures plans side by side on this machine, and returns which finishes this run first.

    Args:
        plans: `baseline`, `auto`, TOML files or `Plan` values; the same one twice is raced against itself.
        baseline: the plan that the others are compared with; it always takes part.
        devices: race each plan on each device, such as `["cpu", "cuda"]`; default the device of each plan.
        time_limit: for preparing, measuring and proving, such as `60s`; default 60 s for measuring alone.
        prove: returns the parity of plans; without it any plan may win.
        progress: show a progress bar.

    Returns:
        A Timing for each plan, and the winner. A plan that can't be run has a `failure` in place of times.

    Raises:
        PlanError: a single plan, or a plan that doesn't exist.
        DeviceError: a device isn't on this machine.
        HotloopError: the baseline can't be run.
    """
    console = Terminal() if progress else Terminal(quiet=True)
    asked = RaceSpec(plans, baseline, devices, time_limit=time_limit)
    with race_progress_bar(console) as moved:
        verdict = race_loaded(LoadedTask(task, None, {}), asked, prove=prove, progress=moved)
    if verdict.ended is not None:
        if verdict.ended_by == "SIGINT":
            raise KeyboardInterrupt(verdict.ended)
        raise Terminated(verdict.ended, number=signal.Signals[verdict.ended_by or "SIGTERM"])
    return verdict


def race_loaded(
    loaded: LoadedTask,
    contest: RaceSpec,
    *,
    overrides: Mapping[str, Any] | None = None,
    prove: Prove | None = PROVE,
    say: Say = lambda line: None,
    progress: Progress = lambda doing, share: None,
    deadline: Deadline | None = None,
    racing_s: float = DEFAULT_RACE_S,
) -> Verdict:
    """Races plans of a loaded Task, see `race`; a signal during the proof ends it, and the times remain.

    Args:
        deadline: of the race; default from the contest's time limit.
        racing_s: for the measured windows, within the deadline.
    """
    began = time.monotonic()
    deadline = deadline or contest.deadline(began)
    entries, baseline = contest.requested_plans()
    for device in contest.devices or ():
        check_device(device, "--devices")
    task = override_fields(loaded.task, overrides)
    known_task = replace(loaded, task=task)
    facts = facts_with_fingerprint(known_task)
    entrants = [
        Contender(
            name,
            partial(lower_cached_or_auto, RunContext(known_task, wanted=wanted, reporter=Reporter(say), facts=facts)),
            None if wanted.is_auto else _resolved_plan(wanted.plan),
        )
        for name, wanted in entries.items()
    ]
    part = deadline if prove is None else deadline.fraction(_MEASURING_SHARE)
    measured = measure(entrants, baseline, steps=facts.steps, time_limit_s=racing_s, progress=progress, deadline=part)
    verdict = Verdict(
        task=task.name,
        fingerprint=facts.fingerprint,
        plans=measured.plans,
        baseline=baseline,
        winner=best_plan_name(measured.plans, baseline, proven=False),
        steps=facts.steps,
        notes=measured.notes,
        busy=measured.busy,
        machine=machine_name(),
        versions=speed_versions(),
        seconds=time.monotonic() - began,
    )
    known = loaded.record is not None  # without its source a Task has no unique fingerprint
    # Also before the proof, which may be interrupted or run out of memory.
    notes = save_races(verdict) if known else []
    if prove is not None:
        try:
            plans = _with_proofs(task, measured.plans, baseline, prove, progress, deadline)
        except KeyboardInterrupt as stop:
            found: dict[str, Any] = {"winner": None, **end_reason("the proof", stop)}
        else:
            found = {"plans": plans, "winner": best_plan_name(plans, baseline, proven=True)}
        verdict = verdict.model_copy(update={**found, "seconds": time.monotonic() - began})
        notes = save_races(verdict) if known and verdict.ended is None else notes
    for note in notes:
        say(note)
    return verdict


def _resolved_plan(plan: Plan) -> Plan:
    try:
        return resolve_device(plan)
    except DeviceError:
        return plan


def _with_proofs(
    task: Task, plans: Sequence[Timing], baseline: str, prove: Prove, progress: Progress, deadline: Deadline
) -> list[Timing]:
    """Returns the plans with their parity; each plan is proven once, and the baseline not at all."""
    base = next(timing for timing in plans if timing.name == baseline).as_plan
    known: dict[Plan, Parity] = {}
    if base.with_axes(device="cpu") == BASELINE:
        known[base] = Parity(plan=base.brief(), parity="bitwise", reason="it is the baseline itself", states=0)
    wanted = dict.fromkeys(timing.as_plan for timing in plans if timing.failure is None)
    asked = [plan for plan in wanted if plan not in known]
    if asked:
        progress("proving", 0.0)
        known |= zip(asked, _prove_in_time(task, asked, prove, progress, deadline), strict=True)
    return [timing if timing.failure is not None else _with_parity(timing, known) for timing in plans]


def _prove_in_time(
    task: Task, plans: Sequence[Plan], prove: Prove, progress: Progress, deadline: Deadline
) -> list[Parity]:
    try:
        with deadline.enforce("the proof"):
            return prove(task, plans, lambda done, total: progress("proving", done / total))
    except Exception as error:  # the times stay valid
        reason, passing = error_summary(error)
        unproven = Parity(plan="", parity="unproven", reason=reason, states=0, short_of_memory=passing)
        return [unproven.model_copy(update={"plan": plan.brief()}) for plan in plans]


def _with_parity(timing: Timing, known: Mapping[Plan, Parity]) -> Timing:
    return timing.proven(known[timing.as_plan])


def race_scales(
    reference: str,
    parameters: Mapping[str, str],
    scale: tuple[str, Sequence[str]],
    contest: RaceSpec,
    *,
    overrides: Mapping[str, Any] | None = None,
    say: Say = lambda line: None,
    progress: Progress = lambda doing, share: None,
) -> RaceScaling:
    """Races plans without proofs at several sizes of the Task in a file.

    Args:
        reference, parameters: see `load_task`.
        scale: the parameter of the file's `task(...)` to change, and its values.
    """
    name, values = scale
    sizes = _sizes(name, values)
    deadline = contest.deadline(time.monotonic())

    def at(value: str, part: Deadline) -> Verdict:
        def moved(doing: str, share: float) -> None:
            progress(f"{name}={value}: {doing}", share)

        loaded = load_task(reference, {**parameters, name: value})
        common: dict[str, Any] = dict(overrides=overrides, say=say, progress=moved)
        return race_loaded(loaded, contest, prove=None, deadline=part, **common)

    races, ended = list[Verdict](), dict[str, Any]()
    try:
        for number, value in enumerate(values):
            races.append(at(value, deadline.fraction(1 / (len(values) - number))))
    except (HotloopError, KeyboardInterrupt) as error:
        if not races:
            raise
        ended = end_reason(f"{name}={values[len(races)]}", error)
    done = list(values[: len(races)])
    return RaceScaling(
        parameter=name, values=done, races=races, crossings=_crossovers(races, sizes[: len(races)]), **ended
    )


def _sizes(name: str, values: Sequence[str]) -> list[float]:
    try:
        sizes = [float(value) for value in values]
    except ValueError:
        sizes = [0.0]
    if len(sizes) < 2 or len(set(sizes)) < len(sizes) or min(sizes) <= 0 or max(sizes) == float("inf"):
        raise TaskError(
            f"--scale {name}={','.join(values)}",
            expected="two or more numbers above zero, none of them twice",
            fix=f"write such as --scale {name}=0.25,1,4",
        )
    return sizes


def _crossovers(races: Sequence[Verdict], sizes: Sequence[float]) -> list[Crossover]:
    ordered = sorted(zip(sizes, races, strict=True), key=lambda pair: pair[0])
    baseline = races[0].baseline

    def points(name: str) -> list[Point]:
        return [(size, verdict.plan(name)) for size, verdict in ordered]

    names = [timing.name for timing in races[0].plans if timing.name != baseline]
    return [found for name in names for found in crossovers(name, points(name), points(baseline))]


CheckProgress = Callable[[str, int, int], None]
"""Called with the activity, the completed number, and the total."""


def check(
    task: Task,
    plan: Plan | str | Path,
    *,
    device: str | None = None,
    converge: int = 0,
    say: Say = lambda line: None,
    progress: CheckProgress = lambda doing, done, total: None,
) -> Parity:
    """Returns whether a plan gives the same result as the baseline on its device, with the evidence.

    Args:
        plan: a `Plan`, a TOML file, `auto` or `arrays`.
        device: overrides the plan's device.
        converge: also train to the end with this number of seeds, under the plan and the baseline, and compare the ends.
            If a training fails, or at Ctrl-C, the result has what was trained, and `convergence.ended` says why.
        say: called with notes of lowering.
        progress: called with the numbers of compared states and of completed trainings.

    Raises:
        PlanError: the plan can't be run here.
        HotloopError: a step of the baseline itself can't be run.
    """
    return check_requested(
        LoadedTask(task, None, {}),
        PlanRequest.from_value(plan, {} if device is None else {"device": device}),
        converge=converge,
        say=say,
        progress=progress,
    )


def check_requested(
    loaded: LoadedTask, wanted: PlanRequest, *, converge: int, say: Say, progress: CheckProgress
) -> Parity:
    """Checks like `check`; `auto` is the plan that `train` takes."""
    check_comparable(wanted.plan)
    if converge:
        check_seeds(converge)
    task = loaded.task
    program = lower_cached_or_auto(RunContext(loaded, wanted=wanted, reporter=Reporter(say)))
    try:
        parity = prove_programs(task, [program], progress=lambda *count: progress("states", *count))[0]
        plan = program.parts.plan
    except Exception as error:  # the baseline's own step can't be run
        raise explain_error(error, program, None) from error
    finally:
        program.close()
    if not converge:
        return parity
    found = check_convergence(task, plan, converge, lambda *count: progress("trainings", *count))
    return parity.model_copy(update={"convergence": found})
