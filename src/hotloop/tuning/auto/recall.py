"""Cached results of earlier races for the next run of a Task."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace

from hotloop.core.feasibility import PlanForecast
from hotloop.core.files.source_files import external_sources, imported_packages, installed_versions, source_digest
from hotloop.core.hardware.devices import resolve_device
from hotloop.core.hardware.machine import machine_name, speed_versions
from hotloop.core.plan_request import PlanRequest
from hotloop.core.random.rng import preserve_generators
from hotloop.core.records.training import TaskFacts
from hotloop.core.reporter import Say
from hotloop.errors import MemoryExhausted, PlanError
from hotloop.lowering.build import lower, translate_memory_errors
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.program import Program
from hotloop.lowering.task_facts import task_facts
from hotloop.plan import BASELINE, Plan
from hotloop.task_file import LoadedTask
from hotloop.tuning.auto.auto import EMPTY_HISTORY, forecast, live_candidates, lower_requested, remaining_facts
from hotloop.tuning.run_context import RunContext
from hotloop.tuning.search.payoff import RaceHistory, accepted_parities
from hotloop.tuning.search.race_cache import (
    CachedRace,
    best_race,
    load_races,
    load_trained_steps,
    save_races,
    save_trained_steps,
    unprofitable_plans,
)


def facts_with_fingerprint(loaded: LoadedTask) -> TaskFacts:
    """Returns the facts; the fingerprint depends on the source, its imports, and the parameters of `task(...)`."""
    with translate_memory_errors(BASELINE), preserve_generators():
        parts = LoweringContext.from_task(loaded.task, BASELINE)
        return task_facts(parts, hashlib.sha256(_source_digest(loaded, parts).encode()).hexdigest())


def _source_digest(loaded: LoadedTask, parts: LoweringContext) -> str:
    """Returns a text that identifies the code of a Task in a file; empty for a Task from Python."""
    known = loaded.record
    if known is None:
        return ""
    layers = sorted({type(module).__module__ for module in parts.model.modules()})  # a file may import modules by name
    elsewhere = source_digest(external_sources(loaded.files, layers))
    return repr(
        (known.digest, elsewhere, sorted(known.parameters.items()), installed_versions(imported_packages(loaded.files)))
    )


def cached_best_plan(loaded: LoadedTask, wanted: PlanRequest, say: Say, facts: TaskFacts | None = None) -> Plan | None:
    """Returns the fastest proven plan for this Task, machine and versions, with the axes that are set."""
    found = cached_best_race(loaded, wanted, say, facts)
    return None if found is None else found.timing.as_plan


def cached_best_race(
    loaded: LoadedTask, wanted: PlanRequest, say: Say, facts: TaskFacts | None = None
) -> CachedRace | None:
    """Returns the result of `cached_best_plan`."""
    if loaded.record is None:  # without its source a Task has no unique fingerprint
        return None
    facts = facts or facts_with_fingerprint(loaded)
    return _fastest_race(_matching_races(wanted, _race_key(wanted, facts), say), wanted, facts)


RaceKey = tuple[str, str, dict[str, str], str]
"""Fingerprint of the Task, machine, versions and device."""


def _race_key(wanted: PlanRequest, facts: TaskFacts) -> RaceKey:
    return facts.fingerprint, machine_name(), speed_versions(), resolve_device(wanted.plan).device


def _matching_races(wanted: PlanRequest, where: RaceKey, say: Say) -> list[CachedRace]:
    """Returns the results of plans with the axes that are set, relative to the baseline of this run.

    Results of other baselines don't count: the fastest plan with many workers may be slower than one without.
    """
    kept, notes = load_races(*where[:3])
    _say_notes(notes, say)
    plan = resolve_device(wanted.plan)
    asked = {*wanted.plan.model_fields_set, "device"}  # results hold for one device
    baseline = Plan(device=plan.device, workers=plan.workers)
    beside = [one for one in kept if one.baseline.as_plan == baseline]
    return [one for one in beside if all(one.timing.plan.get(axis) == getattr(plan, axis) for axis in asked)]


def _load_history(
    loaded: LoadedTask, wanted: PlanRequest, facts: TaskFacts, say: Say, done: int = 0
) -> tuple[list[CachedRace], RaceHistory]:
    """Returns the cached races and the history of the Task; both are empty for a Task without source."""
    if loaded.record is None:
        return [], EMPTY_HISTORY
    where = _race_key(wanted, facts)
    kept = _matching_races(wanted, where, say)
    memory = RaceHistory([one.timing for one in kept], lambda verdict: _say_notes(save_races(verdict), say))
    if wanted.is_explicit:
        steps = max(0, load_trained_steps(*where) - done)
        memory = replace(memory, steps=steps, reset_step_count=lambda: _say_notes(save_trained_steps(*where, 0), say))
    to_come = 0 if facts.steps is None else memory.expected_future_steps(facts.steps)
    allowed = accepted_parities(wanted.plan)
    return kept, replace(memory, unprofitable=unprofitable_plans(kept, facts.steps, allowed, to_come))


def _fastest_race(
    kept: list[CachedRace], wanted: PlanRequest, facts: TaskFacts, memory: RaceHistory = EMPTY_HISTORY
) -> CachedRace | None:
    to_come = 0 if facts.steps is None else memory.expected_future_steps(facts.steps)
    return best_race(kept, facts.steps, accepted_parities(wanted.plan), to_come)


def _fastest_plan(
    kept: list[CachedRace], wanted: PlanRequest, facts: TaskFacts, memory: RaceHistory = EMPTY_HISTORY
) -> Plan | None:
    found = _fastest_race(kept, wanted, facts, memory)
    return None if found is None else found.timing.as_plan


def _say_notes(notes: list[str], say: Say) -> None:
    for note in notes:
        say(note)


def with_facts_for_step_count(context: RunContext) -> RunContext:
    """Returns the context with facts if its steps count for later runs: under an explicit `auto`, for a Task in a file.

    Raises:
        DeviceError: the plan's device isn't on this machine.
    """
    wanted = context.wanted
    if not (wanted.is_auto and wanted.is_explicit) or context.source.record is None:
        return context
    resolve_device(wanted.plan)  # a missing device shows before a model is built
    return replace(context, facts=facts_with_fingerprint(context.source))


def count_trained_steps(context: RunContext, steps: int) -> None:
    """Counts the steps of a run for later runs; see `with_facts_for_step_count`."""
    if context.facts is not None and steps > 0:
        where = _race_key(context.wanted, context.facts)
        _say_notes(save_trained_steps(*where, load_trained_steps(*where) + steps), context.say)


def forecast_from_cache(loaded: LoadedTask, wanted: PlanRequest, say: Say) -> PlanForecast:
    """Forecasts what `lower_cached_or_auto` does under `auto`.

    Raises:
        PlanError: the axes that are set can't be run here.
    """
    resolve_device(wanted.plan)
    facts = facts_with_fingerprint(loaded)
    kept, memory = _load_history(loaded, wanted, facts, say)
    return forecast(loaded.task, wanted, facts, memory, _fastest_plan(kept, wanted, facts, memory))


def lower_cached_or_auto(context: RunContext) -> Program:
    """Lowers like `lower_requested`, but `auto` takes the cached plan that finishes first, and saves what a race finds.

    `auto` skips plans that an earlier race found slower than the baseline, or broken.
    """
    wanted = context.wanted
    if not wanted.is_auto:
        return lower_requested(context)
    resolve_device(wanted.plan)  # a missing device shows before a model is built
    context = replace(context, facts=context.facts or facts_with_fingerprint(context.source))
    assert context.facts is not None
    facts = remaining_facts(context.done, context.facts)
    kept, memory = _load_history(context.source, wanted, facts, context.say, context.done)
    stored = _fastest_race(kept, wanted, facts, memory)
    if stored is not None and (program := _lower_stored(context, stored)) is not None:
        context.plan_searches.append(stored.as_verdict(context.task.name, facts.steps))
        if stored.timing.as_plan != _fastest_plan(kept, wanted, facts):  # compiled again, which later runs profit from
            memory.reset_step_count()
        return program
    if context.is_live and not (why := why_not_live(context, facts)):
        return _lower_live(context, facts, memory)
    if context.is_live:
        context.say(f"auto searches before the first step: {why}")
    return lower_requested(context, memory)


def _lower_stored(context: RunContext, stored: CachedRace) -> Program | None:
    """Lowers the plan of a stored result; reports why the plan can't be lowered, and returns None."""
    plan = stored.timing.as_plan
    try:
        program = lower(context.task, plan, context.say, context.reporter.bar)
    except (PlanError, MemoryExhausted) as error:
        context.say(f"auto leaves out the stored plan {plan.brief()}: {error.given}")
        return None
    context.say(f"auto: {plan.brief()}, stored as the fastest that is proven equal")
    return program


def why_not_live(context: RunContext, facts: TaskFacts) -> str:
    """Returns why a run can't search while it trains; empty if it can."""
    plan = resolve_device(context.wanted.plan)
    if context.is_resumed:
        return "the run has begun with one plan"
    if not hasattr(os, "fork"):
        return "this system can't fork the process that compiles"
    if plan.device != "cpu":
        return f"a fork can't use {plan.device}"
    if plan.ranked or plan.parallel != "none":
        return "several processes train together"
    if context.has_user_callbacks:
        return "a callback may use the model, and a search makes others"
    if not facts.exact or facts.steps is None:
        return facts.inexact[0] if facts.inexact else "its data has an order of its own"
    return ""


def _lower_live(context: RunContext, facts: TaskFacts, memory: RaceHistory) -> Program:
    """Lowers the plan that needs no compiling, and adds the plans to try later to the context's candidates."""
    program = lower_requested(context, memory, is_search_later=True)
    context.candidates.extend(live_candidates(context, program.parts.plan, memory))
    return program
