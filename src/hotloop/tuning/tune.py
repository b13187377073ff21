"""`tune`: searches for a plan, proves it, and caches the results."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hotloop.core.feasibility import check as check_plan
from hotloop.core.format import parse_seconds
from hotloop.core.hardware.devices import resolve_device
from hotloop.core.hardware.machine import machine_name, speed_versions
from hotloop.core.hardware.probe import probe_hardware
from hotloop.core.plan_request import PlanRequest
from hotloop.core.processes import Deadline
from hotloop.core.records.hardware import Hardware
from hotloop.core.records.race import Verdict, describe_ratio
from hotloop.core.records.training import TaskFacts
from hotloop.core.reporter import Progress, Say
from hotloop.core.terminal import Terminal
from hotloop.parity.proof import prove_programs
from hotloop.plan import Plan
from hotloop.report.race import race_progress_bar
from hotloop.task import Task, override_fields
from hotloop.task_file import LoadedTask
from hotloop.tuning.auto import cached_best_race, facts_with_fingerprint
from hotloop.tuning.candidates import SEARCHED_AXES
from hotloop.tuning.contenders import check_comparable
from hotloop.tuning.race_cache import (
    FailedSearch,
    delete_failed_search,
    load_failed_search,
    load_races,
    save_failed_search,
    save_races,
    search_key,
)
from hotloop.tuning.rules import rank_plans
from hotloop.tuning.search import BASELINE, PlanSearch


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
        plan: axes that are set; the search changes the others. A plan from a run's file sets all axes.
        device: overrides the plan's device; default this machine's accelerator, else the CPU.
        time_limit: for the search, such as `60s`; default what a better plan can save in this run.
        progress: show a progress bar.

    Returns:
        The raced plans and the winner, `verdict.plan(verdict.winner).as_plan`, which is never slower than the baseline.

    Raises:
        PlanError: the axes can't be run here.
    """
    given = {} if plan is None else {axis: getattr(plan, axis) for axis in plan.model_fields_set}
    base = Plan(**(given if device is None else given | {"device": device}))
    console = Terminal() if progress else Terminal(quiet=True)
    with race_progress_bar(console) as moved:
        return tune_loaded(LoadedTask(task, None, {}), base, time_limit=time_limit, progress=moved)


def tune_loaded(
    loaded: LoadedTask,
    base: Plan,
    *,
    overrides: Mapping[str, Any] | None = None,
    facts: TaskFacts | None = None,
    time_limit: str | None = None,
    say: Say = lambda line: None,
    progress: Progress = lambda doing, share: None,
    until: float = math.inf,
) -> Verdict:
    """Tunes a loaded Task and caches the results, see `tune`.

    Args:
        until: when the following training stops, by `time.monotonic()`.
    """
    began = time.monotonic()
    limit_s = None if time_limit is None else parse_seconds(time_limit, "time-limit")
    task = override_fields(loaded.task, overrides)
    check_comparable(base)
    start = resolve_device(base)
    facts = facts or facts_with_fingerprint(replace(loaded, task=task))
    hardware = probe_hardware(start.device)
    check_plan(start, facts, hardware)
    kept, unread = (
        load_races(facts.fingerprint, machine_name(), speed_versions()) if loaded.record is not None else ([], [])
    )
    for note in unread:
        say(note)
    search = PlanSearch(
        task=task,
        baseline=Plan(device=start.device, workers=start.workers),
        base=start,
        fixed=base.model_fields_set,
        facts=facts,
        hardware=hardware,
        prove=lambda programs: prove_programs(task, programs, progress=lambda done, of: progress("proving", done / of)),
        rules=_rules_plan(facts, hardware, base, start),
        failed={one.timing.as_plan.brief(): one.timing.failure for one in kept if one.timing.failure},
        time_limit_s=limit_s,
        deadline=Deadline.minus(until, math.inf if limit_s is None else began + limit_s),
        progress=progress,
        say=say,
        notes=_fixed_axes_notes(base),
    )
    try:
        winner = search.run()
    except BaseException:  # such as Ctrl-C in a proof: the times stay valid
        if loaded.record is not None and search.timings:
            save_races(_make_verdict(search, BASELINE, facts, began))
        raise
    verdict = _make_verdict(search, winner, facts, began)
    if loaded.record is not None:
        for note in save_races(verdict):
            say(note)
        _cache_failed_search(search, verdict, limit_s, facts.steps, _search_key(facts, base, start))
    return verdict


def _fixed_axes_notes(base: Plan) -> list[str]:
    """Returns a note if the plan sets all searched axes but one, as plans saved by a run do."""
    left = [axis for axis in SEARCHED_AXES if axis not in base.model_fields_set]
    if len(left) > 1:
        return []
    but = f" but {left[0]}" if left else ""
    return [
        f"the plan sets every axis that a search changes{but}, and a search keeps them; leave out the axes to search"
    ]


def _make_verdict(search: PlanSearch, winner: str, facts: TaskFacts, began: float) -> Verdict:
    return Verdict(
        task=search.task.name,
        fingerprint=facts.fingerprint,
        plans=list(search.timings.values()),
        baseline=BASELINE,
        winner=winner,
        steps=search.facts.steps,
        left_open=winner == BASELINE and search.left_open,
        notes=search.notes,
        busy=search.busy,
        machine=machine_name(),
        versions=speed_versions(),
        seconds=time.monotonic() - began,
    )


def _rules_plan(facts: TaskFacts, hardware: Hardware, base: Plan, start: Plan) -> Plan | None:
    """Returns the rules' first plan without a compilation, with the axes of `base`; `start` is `base` on its device."""
    given = Plan(**{axis: getattr(start, axis) for axis in base.model_fields_set | {"device"}})
    plans = [choice.plan for choice in rank_plans(facts, hardware, given)]
    return next((plan for plan in plans if plan.compile == start.compile), None)


def _search_key(facts: TaskFacts, base: Plan, start: Plan) -> dict[str, Any]:
    axes = start.model_dump(include=base.model_fields_set | {"device", "precision"})
    return search_key(facts.fingerprint, machine_name(), speed_versions(), axes)


def _cache_failed_search(
    search: PlanSearch, verdict: Verdict, limit_s: float | None, steps: int | None, key: dict[str, Any]
) -> None:
    """Caches a search without a better plan, if it had results, a quiet machine, and enough memory, disk space and time."""
    step_ms = verdict.plan(BASELINE).step_ms
    if verdict.winner != BASELINE:
        delete_failed_search(key)
    elif (
        search.has_results
        and step_ms
        and not verdict.busy
        and not (search.deadline.is_met or any(one.short_of_memory for one in verdict.plans))
    ):
        save_failed_search(
            FailedSearch(key=key, steps=steps, step_s=step_ms / 1e3, time_limit_s=limit_s, left_open=verdict.left_open)
        )


def cached_or_tuned_plan(
    loaded: LoadedTask,
    wanted: PlanRequest,
    *,
    overrides: Mapping[str, Any] | None = None,
    say: Say = lambda line: None,
    progress: Progress = lambda doing, share: None,
    until: float = math.inf,
    searches: list[Verdict] | None = None,
) -> tuple[Plan | None, str]:
    """Returns the cached plan of a Task, or the result of `tune_loaded`; and a line for the user.

    The plan is None if nothing better was found; then the rules choose.

    Args:
        until: when the training stops, by `time.monotonic()`; a search takes at most a third of the time.
        searches: takes the result that the plan comes from.
    """
    loaded = replace(loaded, task=override_fields(loaded.task, overrides))
    facts = facts_with_fingerprint(loaded)
    searches = [] if searches is None else searches
    if (stored := cached_best_race(loaded, wanted, say, facts)) is not None:
        searches.append(stored.as_verdict(loaded.task.name, facts.steps))
        plan = stored.timing.as_plan
        return plan, f"tune: {plan.brief()}, stored as the fastest that is proven equal"
    if loaded.record is not None and (before := _earlier_failed_search(facts, wanted)) is not None:
        return _plan_without_result(
            wanted, before.left_open, "an earlier search found nothing proven equal that is faster"
        )
    verdict = tune_loaded(loaded, wanted.plan, facts=facts, say=say, progress=progress, until=until)
    searches.append(verdict)
    for note in verdict.remarks:
        say(f"tune: {note}")
    best = verdict.plan(verdict.winner or verdict.baseline)
    if best.name == verdict.baseline:
        raced = len(verdict.plans) > 1
        why = "nothing proven equal is faster" if raced else "nothing was raced"
        return _plan_without_result(wanted, verdict.left_open, f"{why} ({verdict.seconds:.0f} s)")
    found = f"{best.name}, {describe_ratio(best, verdict.busy)} and {best.parity}"
    return best.as_plan, f"tune: {found} ({verdict.seconds:.0f} s)"


def _earlier_failed_search(facts: TaskFacts, wanted: PlanRequest) -> FailedSearch | None:
    """Returns the earlier failed search, if another one would have no more time."""
    found = load_failed_search(_search_key(facts, wanted.plan, resolve_device(wanted.plan)))
    return found if found is not None and found.covers(facts.steps) else None


def _plan_without_result(wanted: PlanRequest, left_open: bool, why: str) -> tuple[Plan | None, str]:
    """Returns the plan without a better one: None for the rules' plan if undecided, else the axes that are set."""
    if left_open and not wanted.plan.model_fields_set - {"device", "workers"}:
        return None, f"tune: {why}, so the plan is that of the rules, as without --tune"
    plan = resolve_device(wanted.plan)
    return plan, f"tune: {why}, so it's {plan.brief()}"
