"""The first plan of a training: the requested one, the stored winner of an earlier search, or the best of the rules.

`--plan auto` adds the candidates of a search that goes on while the run trains.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hotloop.core.feasibility import InfeasibleValue, PlanForecast, RankedPlan, check, describe_axes, infeasible_values
from hotloop.core.files.source_files import external_sources, imported_packages, installed_versions, source_digest
from hotloop.core.hardware.devices import resolve_device
from hotloop.core.hardware.machine import machine_name, speed_versions
from hotloop.core.hardware.probe import probe_hardware
from hotloop.core.number_formats import REDUCED
from hotloop.core.plan_request import PlanRequest
from hotloop.core.random.rng import preserve_generators
from hotloop.core.records.hardware import Device, Hardware
from hotloop.core.records.training import TaskFacts
from hotloop.core.reporter import Say
from hotloop.errors import DeviceError, MemoryExhausted, PlanError
from hotloop.lowering.build import lower, translate_memory_errors
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.program import Program
from hotloop.lowering.task_facts import task_facts, task_facts_by_digest, trial_optimizer
from hotloop.plan import BASELINE, Plan
from hotloop.task import Task
from hotloop.task_file import LoadedTask
from hotloop.tuning.candidates import eager_variants, layout_changes, not_fixed, rewrite_changes
from hotloop.tuning.race_cache import (
    CachedRace,
    RaceHistory,
    accepted_parities,
    best_race,
    expected_future_steps,
    load_races,
    load_trained_steps,
    save_trained_steps,
)
from hotloop.tuning.rules import open_questions, rank_plans, skipped_hints, why_not_compiled
from hotloop.tuning.run_context import RunContext


def lower_cached_or_auto(context: RunContext) -> Program:
    """Lowers the requested plan; `auto` takes the stored plan that finishes first, else the first possible of the rules.

    `auto` skips plans that an earlier race found slower than the baseline, or broken.

    Raises:
        PlanError: the plan can't be run here, and was requested by name.
    """
    wanted = context.wanted
    plan = resolve_device(wanted.plan)  # a missing device shows before a model is built
    if not wanted.is_auto:
        return _lower(context, plan)
    context = with_facts(context)
    assert context.facts is not None
    facts = remaining_facts(context.done, context.facts)
    history = _load_history(context, facts)
    stored = history.best
    if stored is not None and (program := _lower_stored(context, stored)) is not None:
        context.plan_searches.append(stored.as_verdict(context.task.name, facts.steps))
        if stored is not best_race(history.races, facts.steps, history.accepted):
            # Compiled again, which later runs profit from.
            _say_notes(save_trained_steps(*_race_key(wanted, facts), 0), context.say)
        return program
    return lower_by_rules(context, history)


def _lower(context: RunContext, plan: Plan) -> Program:
    """Lowers a plan; the first one has the model that the facts were computed from."""
    parts = context.parts.pop() if context.parts else None
    return lower(context.task, plan, context.say, context.reporter.bar, parts=parts)


def _lower_stored(context: RunContext, stored: CachedRace) -> Program | None:
    """Lowers the plan of a stored result; reports why the plan can't be lowered, and returns None."""
    plan = stored.timing.as_plan
    try:
        program = _lower(context, plan)
    except (PlanError, MemoryExhausted) as error:
        context.say(f"auto leaves out the stored plan {plan.brief()}: {error.given}")
        return None
    context.say(f"auto: {plan.brief()}, stored as the fastest that is proven equal")
    return program


def lower_by_rules(context: RunContext, history: RaceHistory) -> Program:
    """Lowers the first plan of the rules that can be lowered, without a compilation, which needs a proof.

    Where a search can go on while the run trains, its candidates are added to those of the context.
    """
    wanted = context.wanted
    context = replace(context, reporter=replace(context.reporter, say=_say_once(context.say)))
    options = list_options(context.task, wanted.plan, context.done, context.facts)
    if wanted.is_explicit:
        for line in options.passed_over:
            context.say(f"auto leaves out {line}")
        if why := _why_only_eager(options):
            context.say(f"auto goes on eagerly: {why}")
    why = why_not_live(context, options.facts) if context.is_live else ""
    if why:
        context.say(f"auto searches for no faster plan beside this training: {why}")
    is_searched = context.is_live and not why
    program, plan = _lower_first_possible(context, _without_rejected(options.uncompiled, history, context.say))
    if wanted.is_explicit:
        context.say(f"auto: {plan.brief()}{', from the first step on' * is_searched}")
    if is_searched:
        context.candidates.extend(live_candidates(options, wanted, history, plan, context.say))
    return program


def why_not_live(context: RunContext, facts: TaskFacts) -> str:
    """Returns why no search goes on while the run trains, and what to do; empty if one may.

    Args:
        facts: of the Task, with the remaining steps.
    """
    plan = resolve_device(context.wanted.plan)
    if context.is_resumed:
        return "the run has begun with one plan; --tune searches before a new training"
    if plan.ranked or plan.parallel != "none":
        return "several processes train together; --tune searches before a training in one process"
    if not facts.exact:
        reason = facts.inexact[0] if facts.inexact else "its data has an order of its own"
        return f"{reason}, so no other plan can be proven equal"
    why = ""
    if not hasattr(os, "fork"):
        why = "this system can't fork the process that compiles"
    elif plan.device != "cpu":
        why = f"a fork can't use {plan.device}"
    elif context.has_user_callbacks:
        why = "a callback may use the model, and a search makes others"
    elif facts.steps is None:
        why = "the number of its steps is unknown"
    elif saving := ["accumulation"] * (plan.accumulation != BASELINE.accumulation) + ["precision"] * (
        plan.precision in REDUCED
    ):
        why = (
            "a proof needs memory for whole batches in the baseline's precision, and there may be too little where "
            f"{' and '.join(saving)} is set"
        )
    return why and f"{why}; --tune searches before the training"


def live_candidates(
    options: PlanOptions, wanted: PlanRequest, history: RaceHistory, eager: Plan, say: Say
) -> list[Plan]:
    """Returns what a search may try while a run trains with `eager`, best first: compiled plans, then eager plans."""
    others = eager_variants(options.facts, probe_hardware(eager.device), eager, wanted.plan.model_fields_set)
    compiled = _compiled_candidates(options, wanted, history, eager, say)
    return compiled + [one for one in others if not history.why_refused(one)]


def _compiled_candidates(
    options: PlanOptions, wanted: PlanRequest, history: RaceHistory, eager: Plan, say: Say
) -> list[Plan]:
    """Returns the compiled forms of an eager plan that no earlier race excludes, best first: channels last, rewrites
    or both, and unchanged.

    The compiler generates the update itself, so the optimizer's implementation is the requested one.
    """
    choices = _without_rejected(options.choices, history, lambda line: None)
    others = (one.plan for one in choices if one.plan.compile != eager.compile)
    plan = next((one for one in others if one.with_axes(compile=eager.compile) == eager), None)
    if plan is None:
        return []
    plan, facts = plan.with_axes(optimizer=wanted.plan.optimizer), options.facts
    machine = probe_hardware(plan.device)
    laid, rewritten = (changes(facts, machine, plan) for changes in (layout_changes, rewrite_changes))
    both = [{**one, **other} for one in laid for other in rewritten]
    changes = not_fixed([*both, *laid, *rewritten], wanted.plan.model_fields_set)
    ways = [*(plan.with_axes(**change) for change in changes), plan]
    against = {way: history.why_not_again(way, eager) for way in ways}
    if len({way.layout for way in ways}) > 1:  # the layout matters more than rewrites
        lost = {way.layout: way for way in ways if history.has_lost(way)}
        for way in ways:
            if not against[way] and way.layout in lost:
                against[way] = f"{lost[way.layout].brief()} was raced before, and lost"
    for way, why in against.items():
        if why:
            say(f"auto leaves out {way.brief()}: {why}")
    return [way for way in ways if not against[way]]


def _without_rejected(choices: Sequence[RankedPlan], history: RaceHistory, say: Say) -> list[RankedPlan]:
    """Returns the choices that no earlier race excludes; the baseline stays."""
    against = {choice.plan: history.why_refused(choice.plan) for choice in choices[:-1]}
    for plan, why in against.items():
        if why:
            say(f"auto leaves out {plan.brief()}: {why}")
    return [choice for choice in choices if not against.get(choice.plan)]


def _why_only_eager(options: PlanOptions) -> str:
    """Returns why nothing can be compiled, unless that was reported; empty if it can."""
    refused = [one.violation.reason for one in options.refused if one.axis == "compile"]
    said = any(line.startswith("compile=") for line in options.passed_over)
    return refused[0] if refused and not said else why_not_compiled(options.facts, options.device.kind)


def _say_once(say: Say) -> Say:
    """Reports each line once: a Task may be lowered several times before training."""
    said = set[str]()

    def say_new(line: str) -> None:
        if line not in said:
            said.add(line)
            say(line)

    return say_new


def _lower_first_possible(context: RunContext, choices: list[RankedPlan]) -> tuple[Program, Plan]:
    """Lowers the first choice that can be lowered, and reports why the first of the others can't be."""
    problem = ""
    for choice in choices:
        try:
            program = _lower(context, choice.plan)
        except (PlanError, MemoryExhausted) as error:
            if isinstance(error, DeviceError) or choice is choices[-1]:
                raise
            problem = problem or f"auto leaves out {choice.plan.brief()}: {error.given}"
            continue
        if problem:
            context.say(problem)
        return program, choice.plan
    raise AssertionError("the rules always name the baseline")


@dataclass(frozen=True)
class PlanOptions:
    """The plans of `auto` for a Task on this machine.

    Attributes:
        choices: best first; the last is the baseline.
        passed_over: infeasible hints with their reasons.
        refused: infeasible values of each axis, relative to the baseline.
        left_open: what lowering the first choice finds out.
        facts: of the Task, with the remaining steps.
    """

    choices: list[RankedPlan]
    passed_over: list[str]
    refused: list[InfeasibleValue]
    left_open: list[str]
    device: Device
    facts: TaskFacts

    @property
    def uncompiled(self) -> list[RankedPlan]:
        """The choices that compile nothing unless the user asks for it: they need no proof."""
        return [one for one in self.choices if one.plan.compile == self.choices[-1].plan.compile]


def list_options(task: Task, base: Plan, done: int = 0, facts: TaskFacts | None = None) -> PlanOptions:
    """Applies the rules of `auto`; axes that are set in `base` stay.

    Args:
        done: completed steps of the run.
        facts: default from a new model.

    Raises:
        PlanError: those axes can't be run here.
    """
    plain = resolve_device(base)
    base = Plan(**{axis: getattr(plain, axis) for axis in base.model_fields_set})
    facts, hardware = feasibility_facts(task, plain) if facts is None else (facts, probe_hardware(plain.device))
    facts = remaining_facts(done, facts)
    check(plain, facts, hardware)
    found = hardware.device(plain.device)
    assert found is not None
    choices = rank_plans(facts, hardware, base)
    return PlanOptions(
        choices=choices,
        passed_over=[
            f"{describe_axes(plain.with_axes(**{wish.axis: wish.value}), problem)}: {problem.reason}"
            for wish, problem in skipped_hints(facts, hardware, base)
        ],
        refused=infeasible_values(plain, facts, hardware),
        left_open=open_questions(facts, choices[0].plan),
        device=found,
        facts=facts,
    )


def forecast_from_cache(loaded: LoadedTask, wanted: PlanRequest, say: Say) -> PlanForecast:
    """Forecasts, without lowering, what a training with `--plan auto` does.

    Raises:
        PlanError: the axes that are set can't be run here.
    """
    resolve_device(wanted.plan)
    facts, context = facts_with_fingerprint(loaded), RunContext(loaded, wanted=wanted)
    history = _load_history(context, facts, say)
    options, passed_over = list_options(loaded.task, wanted.plan, facts=facts), list[str]()

    def leave_out(line: str) -> None:
        passed_over.append(line.removeprefix("auto leaves out "))

    accepted = _without_rejected(options.choices, history, leave_out)
    choice = next(one for one in accepted if one in options.uncompiled)
    compiled = _compiled_candidates(options, wanted, history, choice.plan, leave_out)
    if compiled and (why := why_not_live(context, options.facts)):
        leave_out(f"compile={compiled[0].compile}: {why}")
        compiled = []
    return PlanForecast(
        remembered=None if history.best is None else history.best.timing.as_plan,
        choice=choice,
        compiled=compiled,
        passed_over=[*options.passed_over, *passed_over],
        left_open=open_questions(options.facts, compiled[0] if compiled else choice.plan),
        refused=options.refused,
        device=options.device,
    )


def remaining_facts(done: int, facts: TaskFacts) -> TaskFacts:
    """Returns the facts with the steps that remain after `done` steps."""
    return facts if facts.steps is None else facts.model_copy(update={"steps": max(facts.steps - done, 0)})


def feasibility_facts(task: Task, plan: Plan) -> tuple[TaskFacts, Hardware]:
    """Returns the facts and the hardware that decide the feasibility of plans on the device of `plan`."""
    with translate_memory_errors(plan), preserve_generators():
        facts = task_facts(LoweringContext.from_task(task, plan))
    return facts, probe_hardware(plan.device)


def facts_with_fingerprint(loaded: LoadedTask) -> TaskFacts:
    """Returns the facts; the fingerprint depends on the source, its imports, and the parameters of `task(...)`."""
    return _inspect(loaded)[0]


def with_facts(context: RunContext) -> RunContext:
    """Returns the context with the facts of the Task, and the model that they were computed from.

    Raises:
        DeviceError: the plan's device isn't on this machine.
    """
    if context.facts is not None or context.program is not None:
        return context
    resolve_device(context.wanted.plan)  # a missing device shows before a model is built
    facts, parts = _inspect(context.source)
    return replace(context, facts=facts, parts=[parts])


def _inspect(loaded: LoadedTask) -> tuple[TaskFacts, LoweringContext]:
    """Returns the facts for stored results, and a new model and its data with the facts of a run's record."""
    with translate_memory_errors(BASELINE), preserve_generators():
        parts = LoweringContext.from_task(loaded.task, BASELINE)
        parts = replace(parts, trial_optimizer=trial_optimizer(loaded.task, parts.model))
        stored = hashlib.sha256(_source_digest(loaded, parts).encode()).hexdigest()
        own = loaded.record.digest if loaded.record else ""
        facts, recorded = task_facts_by_digest(parts, [stored, own])
    return facts, replace(parts, facts=recorded)


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


def cached_best_race(
    loaded: LoadedTask, wanted: PlanRequest, say: Say, facts: TaskFacts | None = None
) -> CachedRace | None:
    """Returns the fastest proven plan for this Task, machine and versions, with the axes that are set."""
    if loaded.record is None:  # without its source a Task has no unique fingerprint
        return None
    facts = facts or facts_with_fingerprint(loaded)
    races = _matching_races(wanted, _race_key(wanted, facts), say)
    return best_race(races, facts.steps, accepted_parities(wanted.plan))


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


def _load_history(context: RunContext, facts: TaskFacts, say: Say | None = None) -> RaceHistory:
    """Returns the earlier races of the Task; none for a Task without source.

    Args:
        facts: of the Task, with the remaining steps.
    """
    wanted, races, to_come = context.wanted, list[CachedRace](), 0
    if context.source.record is not None:
        where = _race_key(wanted, facts)
        races = _matching_races(wanted, where, say or context.say)
        if wanted.is_explicit:
            to_come = expected_future_steps(load_trained_steps(*where) - context.done, facts.steps)
    return RaceHistory(races, facts.steps, to_come, accepted_parities(wanted.plan))


def _say_notes(notes: list[str], say: Say) -> None:
    for note in notes:
        say(note)


def is_step_count_stored(context: RunContext) -> bool:
    """Whether the trained steps count for later runs: under an explicit `auto`, for a Task in a file."""
    return context.wanted.is_auto and context.wanted.is_explicit and context.source.record is not None


def count_trained_steps(context: RunContext, steps: int) -> None:
    """Counts the steps of a run for later runs, see `is_step_count_stored`."""
    if is_step_count_stored(context) and context.facts is not None and steps > 0:
        where = _race_key(context.wanted, context.facts)
        _say_notes(save_trained_steps(*where, load_trained_steps(*where) + steps), context.say)
