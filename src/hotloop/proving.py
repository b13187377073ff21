"""Speed and truth of plans, side by side: `race` wires measuring and parity."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from hotloop.api import versions
from hotloop.choosing import Say, lowered
from hotloop.errors import HotloopError, TaskError
from hotloop.hardware import Device
from hotloop.lowering import Program
from hotloop.lowering.facts import facts_of
from hotloop.lowering.ingredients import Ingredients
from hotloop.measuring import Entrant, measure
from hotloop.measuring.crossing import Point, crossing
from hotloop.measuring.kept import remember
from hotloop.measuring.load import Used, busy_note, cores_of_others
from hotloop.pacing import seconds
from hotloop.plan import BASELINE, Plan
from hotloop.probe import check_device, here, machine
from hotloop.records import TaskFacts
from hotloop.report.contest import watched
from hotloop.rivals import Asked, Contest
from hotloop.rng import preserved
from hotloop.task import Task
from hotloop.taskfile import Loaded, load_task
from hotloop.verdicts import Crossing, Parity, Scaling, Timing, Verdict, best_of
from hotloop.wanted import AUTO, Wanted
from hotloop.wanted import BASELINE as BY_NAME

Prove = Callable[[Task, Plan], Parity]
Progress = Callable[[str, float], None]

PROVE: Prove | None = None
"""What proves that a plan gives the baseline's result; None asks for no proof."""


def race(
    task: Task,
    plans: Sequence[Asked] = (BY_NAME, AUTO),
    *,
    baseline: Asked = BY_NAME,
    devices: Sequence[str] | None = None,
    time_limit: str = "60s",
    prove: Prove | None = PROVE,
    progress: bool = True,
) -> Verdict:
    """Measures plans side by side on this machine, and says which finishes this run first.

    Args:
        plans: `baseline`, `auto`, TOML files or `Plan` values; the same one twice is raced against itself.
        baseline: the plan that the others are compared with; it takes part, asked for or not.
        devices: race each plan on each of them, such as `["cpu", "cuda"]`; default where each plan says.
        time_limit: for the windows that are measured, such as `60s`; preparing and proving come on top.
        prove: tells how true a plan's result is; None leaves that out, and then any plan may win.
        progress: show a progress bar.

    Returns:
        A figure for each plan, and the winner. A plan that can't be run has a `failure` in place of figures.

    Raises:
        PlanError: one plan alone, or one that doesn't exist.
        DeviceError: a device isn't on this machine.
        HotloopError: the baseline can't be run.
    """
    console = Console(stderr=True) if progress else Console(quiet=True)
    asked = Contest(plans, baseline, devices, time_limit=time_limit)
    with watched(console) as moved:
        return raced(Loaded(task, None, {}), asked, prove=prove, progress=moved)


def raced(
    loaded: Loaded,
    contest: Contest,
    *,
    overrides: Mapping[str, Any] | None = None,
    prove: Prove | None = PROVE,
    say: Say = lambda line: None,
    progress: Progress = lambda doing, share: None,
) -> Verdict:
    """Races plans of a loaded Task; see `race`."""
    began = time.monotonic()
    entries, baseline = contest.entries()
    for device in contest.devices or ():
        check_device(device)
    task = replace(loaded.task, **(overrides or {}))
    facts = fingerprinted(replace(loaded, task=task))
    entrants = [
        Entrant(name, _lowering(task, wanted, say), None if wanted.auto else wanted.plan)
        for name, wanted in entries.items()
    ]
    limit = seconds(contest.time_limit, "time-limit")
    before = Used.now()
    measured = measure(entrants, baseline, steps=facts.steps, time_limit_s=limit, progress=progress)
    others = cores_of_others(before, Used.now())
    plans = measured.plans if prove is None else _proven(task, measured.plans, baseline, prove, progress)
    processor, devices = _machine(plans)
    verdict = Verdict(
        task=task.name,
        fingerprint=facts.fingerprint,
        plans=plans,
        baseline=baseline,
        winner=best_of(plans, baseline, proven=prove is not None),
        steps=facts.steps,
        notes=[*measured.notes, *filter(None, [busy_note(others, machine.processor().allowed_cores)])],
        machine=", ".join([processor, *(device.model or device.name for device in devices)]),
        versions=_versions(devices),
        seconds=time.monotonic() - began,
    )
    if loaded.record is not None:  # without its source, a Task can't be told from another of the same shapes
        for note in remember(verdict):
            say(note)
    return verdict


def _lowering(task: Task, wanted: Wanted, say: Say) -> Callable[[], Program]:
    return lambda: lowered(task, wanted, say)


def fingerprinted(loaded: Loaded) -> TaskFacts:
    """The Task's facts; their fingerprint depends on its source and on the parameters given to its `task(...)`."""
    known = loaded.record
    digest = "" if known is None else repr((known.digest, sorted(known.parameters.items())))
    with preserved():
        return facts_of(Ingredients.of(loaded.task, BASELINE), hashlib.sha256(digest.encode()).hexdigest())


def _proven(task: Task, plans: Sequence[Timing], baseline: str, prove: Prove, progress: Progress) -> list[Timing]:
    """The plans with their parity; the same plan is proven once, and the one that others are held against not at all."""
    base = Plan(**next(timing.plan for timing in plans if timing.name == baseline))
    known: dict[Plan, Parity] = {}
    if base.with_axes(device="cpu") == BASELINE:
        known[base] = Parity(plan=base.brief(), parity="bitwise", reason="it is the baseline itself", states=0)
    found = []
    for timing in plans:
        if timing.failure is None:
            plan = Plan(**timing.plan)
            if plan not in known:
                progress(f"proving {timing.name}", 1.0)
                known[plan] = _parity(task, plan, prove)
            timing = timing.model_copy(update={"parity": known[plan].parity, "parity_reason": known[plan].reason})
        found.append(timing)
    return found


def _parity(task: Task, plan: Plan, prove: Prove) -> Parity:
    try:
        return prove(task, plan)
    except HotloopError as error:
        return Parity(plan=plan.brief(), parity="unproven", reason=str(error), states=0)


def _machine(plans: Sequence[Timing]) -> tuple[str, list[Device]]:
    """The processor, and the accelerators that took part."""
    names = sorted({timing.plan["device"] for timing in plans if timing.failure is None} - {"cpu"})
    found = [device for name in names if (device := here(name).device(name)) is not None]
    processor = machine.processor()
    return f"{processor.model or processor.architecture}, {processor.allowed_cores} cores", found


def _versions(devices: Sequence[Device]) -> dict[str, str]:
    driver = machine.nvidia()[1] if any(device.kind == "cuda" for device in devices) else None
    return versions() | ({} if driver is None else {"nvidia_driver": driver})


def raced_scales(
    reference: str,
    parameters: Mapping[str, str],
    scale: tuple[str, Sequence[str]],
    contest: Contest,
    *,
    overrides: Mapping[str, Any] | None = None,
    say: Say = lambda line: None,
    progress: Progress = lambda doing, share: None,
) -> Scaling:
    """Races plans at several sizes of the Task in a file; speed alone, since a proof is of one size.

    Args:
        reference, parameters: see `load_task`.
        scale: the parameter of the file's `task(...)` that is changed, and its values.
    """
    name, values = scale
    sizes = _sizes(name, values)

    def at(value: str) -> Verdict:
        def moved(doing: str, share: float) -> None:
            progress(f"{name}={value}: {doing}", share)

        loaded = load_task(reference, {**parameters, name: value})
        return raced(loaded, contest, overrides=overrides, prove=None, say=say, progress=moved)

    races = [at(value) for value in values]
    return Scaling(parameter=name, values=list(values), races=races, crossings=_crossings(races, sizes))


def _sizes(name: str, values: Sequence[str]) -> list[float]:
    try:
        sizes = [float(value) for value in values]
    except ValueError:
        sizes = [0.0]
    if len(set(sizes)) < 2 or min(sizes) <= 0 or max(sizes) == float("inf"):
        raise TaskError(
            f"--scale {name}={','.join(values)}",
            expected="two or more numbers above zero, none of them twice",
            fix=f"write such as --scale {name}=0.25,1,4",
        )
    return sizes


def _crossings(races: Sequence[Verdict], sizes: Sequence[float]) -> list[Crossing]:
    ordered = sorted(zip(sizes, races, strict=True), key=lambda pair: pair[0])
    baseline = races[0].baseline

    def points(name: str) -> list[Point]:
        return [(size, verdict.plan(name)) for size, verdict in ordered]

    names = [timing.name for timing in races[0].plans if timing.name != baseline]
    return [crossing(name, points(name), points(baseline)) for name in names]
