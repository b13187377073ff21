"""Lowers the requested plan: a named plan runs or is an error; `auto` takes the best plan of the rules."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass, replace

from hotloop.core.feasibility import InfeasibleValue, PlanForecast, RankedPlan, check, describe_axes, infeasible_values
from hotloop.core.hardware.devices import resolve_device
from hotloop.core.hardware.probe import probe_hardware
from hotloop.core.number_formats import REDUCED
from hotloop.core.plan_request import PlanRequest
from hotloop.core.random.rng import preserve_generators
from hotloop.core.records.hardware import Device, Hardware
from hotloop.core.records.race import Verdict, describe_ratio
from hotloop.core.records.training import TaskFacts
from hotloop.core.reporter import Say
from hotloop.errors import DeviceError, MemoryExhausted, PlanError
from hotloop.lowering.build import lower, translate_memory_errors
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.program import Program
from hotloop.lowering.task_facts import task_facts
from hotloop.plan import BASELINE, Plan
from hotloop.task import Task
from hotloop.tuning import cuda_rules
from hotloop.tuning.rules import open_questions, rank_plans, skipped_hints, why_not_compiled
from hotloop.tuning.run_context import RunContext
from hotloop.tuning.search.candidates import eager_variants, layout_changes, not_fixed, rewrite_changes
from hotloop.tuning.search.payoff import Payoff, RaceHistory, accepted_parities, estimate_payoff
from hotloop.tuning.search.step_profile import StepProfile

EMPTY_HISTORY = RaceHistory()


def lower_requested(
    context: RunContext, memory: RaceHistory = EMPTY_HISTORY, *, is_search_later: bool = False
) -> Program:
    """Lowers the Task under the requested plan; `auto` takes the first of its plans that can be lowered.

    `auto` compiles where a timing of some steps shows that a compilation pays, and the race and the proof confirm it.

    Args:
        memory: of races of the Task.
        is_search_later: `auto` compiles nothing here, since a search follows while the run trains.

    Raises:
        PlanError: the plan can't be run here, and was requested by name.
    """
    wanted = context.wanted
    if not wanted.is_auto:
        return lower(context.task, resolve_device(wanted.plan), context.say, context.reporter.bar)
    context = replace(context, reporter=replace(context.reporter, say=_say_once(context.say)))
    considered = list_options(context.task, wanted.plan, context.done, context.facts)
    context = replace(context, facts=considered.facts, done=0)
    choices = considered.choices
    if wanted.is_explicit:
        for line in considered.passed_over:
            context.say(f"auto leaves out {line}")
        if why := _why_only_eager(considered):
            context.say(f"auto goes on eagerly: {why}")
    if is_search_later or not wanted.is_explicit:  # compiling takes time, and unproven results need consent
        choices = [choice for choice in choices if choice.plan.compile == wanted.plan.compile]
    choices = _without_rejected(choices, memory, context.say)
    eager = [choice for choice in choices if choice.plan.compile == wanted.plan.compile]
    program, plan = _lower_first_possible(context, eager)
    if race := _planned_race(context, memory, choices, plan):
        payoff = _estimate_payoff(context, memory, race, program)
        del program  # training begins with a Program that has run no step, and there may be no memory for two
        program, plan = _lower_faster(context, memory, race, payoff)
    if wanted.is_explicit:
        context.say(f"auto: {plan.brief()}{', from the first step on' if is_search_later else ''}")
    return program


def live_candidates(context: RunContext, eager: Plan, memory: RaceHistory) -> list[Plan]:
    """Returns what `auto` may try while a run trains, best first: compiled forms that a package stores, then eager plans."""
    considered = list_options(context.task, context.wanted.plan, context.done, context.facts)
    facts, fixed = considered.facts, context.wanted.plan.model_fields_set
    if _why_not_raced(facts, eager):
        return []
    choices = _without_rejected(considered.choices, memory, lambda line: None)
    ways, _ = _plans_to_compile(choices, eager, facts, context.wanted, memory, context.say)
    others = eager_variants(facts, probe_hardware(eager.device), eager, fixed)
    return [way for way in ways if way.compile == "package"] + [one for one in others if not memory.why_refused(one)]


def _without_rejected(choices: list[RankedPlan], memory: RaceHistory, say: Say) -> list[RankedPlan]:
    """Returns the choices that no earlier race excludes; the baseline stays."""
    against = {choice.plan: memory.why_refused(choice.plan) for choice in choices[:-1]}
    for plan, why in against.items():
        if why:
            say(f"auto leaves out {plan.brief()}: {why}")
    return [choice for choice in choices if not against.get(choice.plan)]


def _why_only_eager(considered: PlanOptions) -> str:
    """Returns why nothing can be compiled, unless that was reported; empty if it can."""
    refused = [one.violation.reason for one in considered.refused if one.axis == "compile"]
    said = any(line.startswith("compile=") for line in considered.passed_over)
    return refused[0] if refused and not said else why_not_compiled(considered.facts, considered.device.kind)


def _say_once(say: Say) -> Say:
    """Reports each line once: a Task may be lowered several times before training."""
    said = set[str]()

    def told(line: str) -> None:
        if line not in said:
            said.add(line)
            say(line)

    return told


@dataclass(frozen=True)
class _PlannedRace:
    """The eager plan, `last` for a slower eager plan, compiled forms, and those to try if no form can be compiled."""

    eager: Plan
    last: Plan
    ways: list[Plan]
    instead: list[Plan]

    @property
    def cheapest(self) -> Plan:
        return min(self.ways, key=lambda way: way.compile != "none")  # recording alone takes seconds


def _planned_race(
    context: RunContext, memory: RaceHistory, choices: list[RankedPlan], plan: Plan
) -> _PlannedRace | None:
    """Returns what may be raced against an eager plan; None where nothing may."""
    facts = context.facts
    assert facts is not None
    ways, instead = _plans_to_compile(choices, plan, facts, context.wanted, memory, context.say)
    if not ways or facts.steps is None:
        return None
    if why := _why_not_raced(facts, plan):
        context.say(f"auto goes on eagerly: {why}")
        return None
    return _PlannedRace(plan, choices[-1].plan, ways, instead)


def _estimate_payoff(context: RunContext, memory: RaceHistory, race: _PlannedRace, program: Program) -> Payoff | str:
    """Estimates what compiling saves, on the eager Program, which is closed; or returns why nothing is compiled."""
    facts = context.facts
    assert facts is not None and facts.steps is not None
    limit_s, program.watched = context.until - time.monotonic(), context.has_user_callbacks
    with closing(program):
        return estimate_payoff(
            program,
            facts.steps,
            way=race.cheapest.compile,
            rewrites=any(way.rewrites != "none" for way in race.ways),
            recorded=race.cheapest.graphs != "none",
            limit_s=limit_s,
            to_come=memory.expected_future_steps(facts.steps),
            normed=facts.normed,
        )


def _lower_faster(
    context: RunContext, memory: RaceHistory, race: _PlannedRace, payoff: Payoff | str
) -> tuple[Program, Plan]:
    """Races compiled forms if that pays, and lowers the fastest proven plan; otherwise the eager plan again."""
    if isinstance(payoff, str) or not payoff.compilations:
        context.say(f"auto goes on eagerly: {payoff}")
        return lower(context.task, race.eager, context.say, context.reporter.bar), race.eager
    from hotloop.tuning.search.auto_search import AutoSearch  # takes a second to import

    cheapest = race.cheapest
    first = next((way for way in race.ways if way.compile != "none"), cheapest)
    compiling = (
        payoff if first.compile == cheapest.compile else payoff.for_way(first.compile, recorded=first.graphs != "none")
    )
    context.say(f"auto compiles: {compiling}" if compiling.compilations else f"auto records: {payoff}")
    instead = [way for way in race.instead if payoff.for_way(way.compile).compilations]
    memory.reset_step_count()
    search = AutoSearch(context, race.eager, race.last, memory, compiling.compile_limit_s)
    verdict = search.run(_order_by_layout(race.ways, payoff.made), compiling.compilations, instead)
    context.plan_searches.extend([verdict] if verdict is not None else [])
    return _lower_winner(context, [*race.ways, *instead, search.fallback_plan], verdict, memory)


def _plans_to_compile(
    choices: list[RankedPlan], plan: Plan, facts: TaskFacts, wanted: PlanRequest, memory: RaceHistory, say: Say
) -> tuple[list[Plan], list[Plan]]:
    """Returns the ways to compile an eager plan that the choices allow, see `_plans_not_rejected`."""
    others = [one.plan for one in choices if one.plan.compile != plan.compile]
    compiled = [one for one in others if one.with_axes(compile=plan.compile) == plan]
    allowed = accepted_parities(wanted.plan)
    steps = None if facts.steps is None else facts.steps + memory.expected_future_steps(facts.steps)
    return _plans_not_rejected(_compiled_variants(compiled, plan, facts, wanted), plan, steps, allowed, memory, say)


def _plans_not_rejected(
    whole: list[Plan], eager: Plan, steps: int | None, allowed: Collection[str], memory: RaceHistory, say: Say
) -> tuple[list[Plan], list[Plan]]:
    """Returns whole compiled steps that no earlier race excludes; and plans to try if these fail.

    The latter compile all but the update, for optimizers that count in Python numbers.
    """

    def untried(ways: list[Plan]) -> list[Plan]:
        against = {way: memory.why_not_again(way, eager, allowed, steps) for way in ways}
        if len({way.layout for way in ways}) > 1:  # the layout matters more than rewrites
            lost = {(way.layout, way.compile): way for way in ways if memory.has_lost(way)}
            against |= {
                way: f"{lost[way.layout, way.compile].brief()} was raced before, and lost"
                for way in ways
                if not against[way] and (way.layout, way.compile) in lost
            }
        for way, why in against.items():
            if why:
                say(f"auto leaves out {way.brief()}: {why}")
        return [way for way in ways if not against[way]]

    ways = untried(whole)
    if not whole or any(way not in ways and not memory.has_failed(way) for way in whole):  # one was compiled, and lost
        return ways, []
    instead = untried([eager.with_axes(compile="forward")])
    return (ways, instead) if ways else (instead, [])


def _why_not_raced(facts: TaskFacts, plan: Plan) -> str:
    """Returns why compiled plans aren't raced against an eager plan; empty if they may be."""
    if not facts.exact:
        reason = facts.inexact[0] if facts.inexact else "its data has an order of its own"
        return f"{reason}, so nothing compiled can be proven"
    saving = ["accumulation"] * (plan.accumulation != BASELINE.accumulation)
    saving += ["precision"] * (plan.precision in REDUCED)
    if not saving:
        return ""
    return (
        "a race of compiled plans needs memory for whole batches in the baseline's precision, and there may "
        f"be too little where {' and '.join(saving)} is set; train --tune races them anyway"
    )


def _compiled_variants(compiled: list[Plan], eager: Plan, facts: TaskFacts, wanted: PlanRequest) -> list[Plan]:
    """Returns the first compiled plan with channels last, rewrites or both, and unchanged; on CUDA see `cuda_rules`.

    The compiler generates the update itself, so the optimizer's implementation is the requested one.
    """
    fixed = wanted.plan.model_fields_set
    if wanted.is_explicit and eager.device.startswith("cuda"):
        return cuda_rules.auto_cuda_plans(
            eager.with_axes(optimizer=wanted.plan.optimizer), facts, probe_hardware(eager.device), fixed
        )
    if not compiled:
        return []
    plan = compiled[0].with_axes(optimizer=wanted.plan.optimizer)
    machine = probe_hardware(plan.device)
    laid, rewritten = (changes(facts, machine, plan) for changes in (layout_changes, rewrite_changes))
    both = [{**one, **other} for one in laid for other in rewritten]
    return [*(plan.with_axes(**change) for change in not_fixed([*both, *laid, *rewritten], fixed)), plan]


def _order_by_layout(ways: list[Plan], made: StepProfile | None) -> list[Plan]:
    """Puts channels last behind if the step has pooling that rewrites support, which needs the usual layout."""
    return (
        sorted(ways, key=lambda way: way.layout != BASELINE.layout) if made is not None and made.has_pooling else ways
    )


def _lower_winner(
    context: RunContext, plans: list[Plan], verdict: Verdict | None, memory: RaceHistory
) -> tuple[Program, Plan]:
    """Lowers the winner again, since training begins with a Program that has run no step; the last plan is eager."""
    if verdict is None:
        return lower(context.task, plans[-1], context.say, context.reporter.bar), plans[-1]
    if verdict.busy:
        context.say(f"auto: {verdict.busy}")
    winner = next(plan for plan in plans if plan.brief() == verdict.winner)
    program, plan = _lower_first_possible(context, [RankedPlan(one, ()) for one in (winner, plans[-1])])
    if plan == winner:
        memory.save_verdict(_with_recompile_time(verdict, program.compile_s))
    if plan != plans[-1]:
        timing = verdict.plan(plan.brief())
        context.say(f"auto: {plan.brief()} is {describe_ratio(timing, verdict.busy)}, and {timing.parity}")
    return program, plan


def _with_recompile_time(verdict: Verdict, seconds: float) -> Verdict:
    """Returns the verdict with the seconds of a repeated compilation, which later runs take."""
    plans = [
        one.model_copy(update={"compile_warm_s": seconds}) if one.name == verdict.winner and one.compile_s else one
        for one in verdict.plans
    ]
    return verdict.model_copy(update={"plans": plans})


def _lower_first_possible(context: RunContext, choices: list[RankedPlan]) -> tuple[Program, Plan]:
    """Lowers the first choice that can be lowered, and reports why the first of the others can't be."""
    problem = ""
    for choice in choices:
        try:
            program = lower(context.task, choice.plan, context.say, context.reporter.bar)
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


def forecast(
    task: Task, wanted: PlanRequest, facts: TaskFacts, memory: RaceHistory, remembered: Plan | None
) -> PlanForecast:
    """Forecasts, without lowering, what `lower_requested` does if no plan is `remembered`; see `list_options`."""
    considered, passed_over = list_options(task, wanted.plan, facts=facts), list[str]()

    def say(line: str) -> None:
        passed_over.append(line.removeprefix("auto leaves out "))

    choices = _without_rejected(considered.choices, memory, say)
    choice = next(one for one in choices if one.plan.compile == wanted.plan.compile)
    ways, _ = _plans_to_compile(choices, choice.plan, considered.facts, wanted, memory, say)
    if ways and (why := _why_not_raced(considered.facts, choice.plan)):
        say(f"compile={ways[0].compile}: {why}")
        ways = []
    return PlanForecast(
        remembered=remembered,
        choice=choice,
        compiled=[RankedPlan(way, cuda_rules.cuda_reasons(way, choice.plan, considered.facts)) for way in ways],
        passed_over=[*considered.passed_over, *passed_over],
        left_open=open_questions(considered.facts, ways[0] if ways else choice.plan),
        refused=considered.refused,
        device=considered.device,
    )


def remaining_facts(done: int, facts: TaskFacts) -> TaskFacts:
    """Returns the facts with the steps that remain after `done` steps."""
    return facts if facts.steps is None else facts.model_copy(update={"steps": max(facts.steps - done, 0)})


def feasibility_facts(task: Task, plan: Plan) -> tuple[TaskFacts, Hardware]:
    """Returns the facts and the hardware that decide the feasibility of plans on the device of `plan`."""
    with translate_memory_errors(plan), preserve_generators():
        facts = task_facts(LoweringContext.from_task(task, plan))
    return facts, probe_hardware(plan.device)
