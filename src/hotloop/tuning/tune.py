"""`tune`: wires the search for a plan, its proof, and the memory of what was found."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hotloop.core.feasibility.violations import check as check_plan
from hotloop.core.format import seconds
from hotloop.core.hardware import machine
from hotloop.core.hardware.devices import placed
from hotloop.core.hardware.probe import here
from hotloop.core.hardware.versions import machine_name, speed_versions
from hotloop.core.plan_request import Wanted
from hotloop.core.processes.deadline import Deadline
from hotloop.core.records.hardware import Hardware
from hotloop.core.records.race import Verdict
from hotloop.core.records.training import TaskFacts
from hotloop.core.reporter import Say
from hotloop.core.terminal import Terminal
from hotloop.parity.proof import prove_programs
from hotloop.plan import Plan
from hotloop.report.race import watched
from hotloop.task import Task, overridden
from hotloop.task_file import Loaded
from hotloop.tuning.auto.recall import fingerprinted, remembered
from hotloop.tuning.contenders import check_comparable
from hotloop.tuning.races.system_load import Used, busy_note, cores_of_others
from hotloop.tuning.rules import ranked
from hotloop.tuning.search import failed_searches
from hotloop.tuning.search.candidates import SOUGHT
from hotloop.tuning.search.findings import BASELINE
from hotloop.tuning.search.race_cache import recall, remember
from hotloop.tuning.search.search import Search

Progress = Callable[[str, float], None]


def tune(
    task: Task,
    *,
    plan: Plan | None = None,
    device: str | None = None,
    time_limit: str | None = None,
    progress: bool = True,
) -> Verdict:
    """Finds the fastest plan that is proven to give the baseline's result; `fit(task, plan=...)` then takes it.

    Args:
        plan: axes that are set already; the others are looked for. A plan read from a run's file sets all of them.
        device: where, whatever the plan says; default this machine's accelerator, else the CPU.
        time_limit: for the whole search, such as `60s`; default what a better plan can win back in this run. The best plan
            that is proven by then is the result.
        progress: show a progress bar.

    Returns:
        What was raced, and the winner: `verdict.plan(verdict.winner).as_plan`. It's never slower than the baseline.

    Raises:
        PlanError: the axes can't be run here.
    """
    given = {} if plan is None else {axis: getattr(plan, axis) for axis in plan.model_fields_set}
    base = Plan(**(given if device is None else given | {"device": device}))
    console = Terminal() if progress else Terminal(quiet=True)
    with watched(console) as moved:
        return tuned(Loaded(task, None, {}), base, time_limit=time_limit, progress=moved)


def tuned(
    loaded: Loaded,
    base: Plan,
    *,
    overrides: Mapping[str, Any] | None = None,
    facts: TaskFacts | None = None,
    time_limit: str | None = None,
    say: Say = lambda line: None,
    progress: Progress = lambda doing, share: None,
    until: float = math.inf,
) -> Verdict:
    """Tunes a loaded Task, and remembers what was found; see `tune`.

    Args:
        facts: of the Task, where they are known.
        until: when the training that follows is to stop, by `time.monotonic()`.
    """
    began, before = time.monotonic(), Used.now()
    limit_s = None if time_limit is None else seconds(time_limit, "time-limit")
    task = overridden(loaded.task, overrides)
    check_comparable(base)
    start = placed(base)
    facts = facts or fingerprinted(replace(loaded, task=task))
    hardware = here(start.device)
    check_plan(start, facts, hardware)
    kept, unread = (
        recall(facts.fingerprint, machine_name(), speed_versions()) if loaded.record is not None else ([], [])
    )
    for note in unread:
        say(note)
    search = Search(
        task=task,
        baseline=Plan(device=start.device, workers=start.workers),
        base=start,
        fixed=base.model_fields_set,
        facts=facts,
        hardware=hardware,
        prove=lambda programs: prove_programs(task, programs, progress=lambda done, of: progress("proving", done / of)),
        rules=_by_rules(facts, hardware, base, start),
        failed={one.timing.as_plan.brief(): one.timing.failure for one in kept if one.timing.failure},
        time_limit_s=limit_s,
        deadline=Deadline.before(until, math.inf if limit_s is None else began + limit_s),
        progress=progress,
        say=say,
        notes=_all_set(base),
    )
    try:
        winner = search.run()
    except BaseException:  # Ctrl-C in a proof, say: what was raced is known all the same
        if loaded.record is not None and search.timings:
            remember(_verdict(search, BASELINE, facts, began, before))
        raise
    verdict = _verdict(search, winner, facts, began, before)
    if loaded.record is not None:
        for note in remember(verdict):
            say(note)
        _keep(search, verdict, limit_s, facts.steps, _about(facts, base, start))
    return verdict


def _all_set(base: Plan) -> list[str]:
    """Says so where next to nothing is left to look for; a saved plan names every axis but open numbers such as threads."""
    left = [axis for axis in SOUGHT if axis not in base.model_fields_set]
    if len(left) > 1:
        return []
    but = f" but {left[0]}" if left else ""
    return [f"the plan sets every axis that a search changes{but}, and those stay; leave out what is to be looked for"]


def _verdict(search: Search, winner: str, facts: TaskFacts, began: float, before: Used) -> Verdict:
    """What the search has found; `before` is what this process and others had used when it began."""
    others = cores_of_others(before, Used.now())
    return Verdict(
        task=search.task.name,
        fingerprint=facts.fingerprint,
        plans=list(search.timings.values()),
        baseline=BASELINE,
        winner=winner,
        steps=search.facts.steps,
        left_open=winner == BASELINE and search.left_open,
        notes=[*search.notes, *filter(None, [busy_note(others, machine.processor().allowed_cores)])],
        machine=machine_name(),
        versions=speed_versions(),
        seconds=time.monotonic() - began,
    )


def _by_rules(facts: TaskFacts, hardware: Hardware, base: Plan, start: Plan) -> Plan | None:
    """The rules' first plan that compiles nothing, with the axes of `base`, that were set; `start` is it on its device."""
    given = Plan(**{axis: getattr(start, axis) for axis in base.model_fields_set | {"device"}})
    plans = [choice.plan for choice in ranked(facts, hardware, given)]
    return next((plan for plan in plans if plan.compile == start.compile), None)


def _about(facts: TaskFacts, base: Plan, start: Plan) -> dict[str, Any]:
    axes = start.model_dump(include=base.model_fields_set | {"device", "precision"})
    return failed_searches.about(facts.fingerprint, machine_name(), speed_versions(), axes)


def _keep(search: Search, verdict: Verdict, limit_s: float | None, steps: int | None, key: dict[str, Any]) -> None:
    """Remembers a search that found nothing, if it could tell anything, and nothing lacked memory, disk or time."""
    step_ms = verdict.plan(BASELINE).step_ms
    if verdict.winner != BASELINE:
        failed_searches.forget(key)
    elif search.told and step_ms and not (search.deadline.met or any(one.short_of_memory for one in verdict.plans)):
        failed_searches.keep(
            failed_searches.Earlier(
                key=key, steps=steps, step_s=step_ms / 1e3, time_limit_s=limit_s, left_open=verdict.left_open
            )
        )


def remembered_or_tuned(
    loaded: Loaded,
    wanted: Wanted,
    *,
    overrides: Mapping[str, Any] | None = None,
    say: Say = lambda line: None,
    progress: Progress = lambda doing, share: None,
    until: float = math.inf,
) -> tuple[Plan | None, str]:
    """The plan that is remembered for a Task, or else what `tuned` finds; and a line that says so.

    Without a plan it is left to the rules, as in a training without a search: nothing was found that is better.

    Args:
        until: when the training is to stop, by `time.monotonic()`; a search takes a third of the time at most.
    """
    loaded = replace(loaded, task=overridden(loaded.task, overrides))
    facts = fingerprinted(loaded)
    plan = remembered(loaded, wanted, say, facts)
    if plan is not None:
        return plan, f"tune: {plan.brief()}, remembered as the fastest that is proven equal"
    if loaded.record is not None and (before := _in_vain(facts, wanted)) is not None:
        return _without(wanted, before.left_open, "an earlier search found nothing proven equal that is faster")
    verdict = tuned(loaded, wanted.plan, facts=facts, say=say, progress=progress, until=until)
    for note in verdict.notes:
        say(f"tune: {note}")
    best = verdict.plan(verdict.winner or verdict.baseline)
    if best.name == verdict.baseline:
        raced = len(verdict.plans) > 1
        why = "nothing proven equal is faster" if raced else "nothing was raced"
        return _without(wanted, verdict.left_open, f"{why} ({verdict.seconds:.0f} s)")
    found = f"{best.name}, {best.ratio:.2f} times as fast as the baseline and {best.parity}"
    return best.as_plan, f"tune: {found} ({verdict.seconds:.0f} s)"


def _in_vain(facts: TaskFacts, wanted: Wanted) -> failed_searches.Earlier | None:
    """The search before that found nothing, if another one had no more time."""
    found = failed_searches.recall(_about(facts, wanted.plan, placed(wanted.plan)))
    return found if found is not None and found.covers(facts.steps) else None


def _without(wanted: Wanted, left_open: bool, why: str) -> tuple[Plan | None, str]:
    """What to run where nothing was found: the axes that were set stay, and what nothing speaks against is as it is."""
    if left_open and not wanted.plan.model_fields_set - {"device", "workers"}:
        return None, f"tune: {why}, so the plan is that of the rules, as without --tune"
    plan = placed(wanted.plan)
    return plan, f"tune: {why}, so it's {plan.brief()}"
