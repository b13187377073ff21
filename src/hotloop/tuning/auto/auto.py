"""From what was asked for to a Program: a plan asked for by name runs or is an error; `auto` goes down its list."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass

from hotloop.core.callback import Callback, any_of_users
from hotloop.core.feasibility.forecast import Choice, Foreseen, Refused
from hotloop.core.feasibility.violations import check, refused, settings
from hotloop.core.hardware.devices import placed
from hotloop.core.hardware.probe import here
from hotloop.core.number_formats import REDUCED
from hotloop.core.plan_request import Wanted
from hotloop.core.random.rng import preserved
from hotloop.core.records.hardware import Device, Hardware
from hotloop.core.records.race import Verdict
from hotloop.core.records.training import TaskFacts
from hotloop.core.reporter import During, Say
from hotloop.errors import DeviceError, MemoryExhausted, PlanError
from hotloop.lowering.build import lower, making_ready
from hotloop.lowering.context import Ingredients
from hotloop.lowering.program import Program
from hotloop.lowering.task_facts import facts_of
from hotloop.plan import BASELINE, Plan
from hotloop.task import Task
from hotloop.tuning import cuda_rules
from hotloop.tuning.rules import left_open, passed_over, ranked, unrolled
from hotloop.tuning.search.candidates import laying_changes, rewriting_changes, without
from hotloop.tuning.search.payoff import Memory, accepted, hoped
from hotloop.tuning.search.step_profile import Makeup

NOTHING_KEPT = Memory()


def lowered(
    task: Task,
    wanted: Wanted,
    say: Say = lambda line: None,
    during: During | None = None,
    done: int = 0,
    facts: TaskFacts | None = None,
    memory: Memory = NOTHING_KEPT,
    until: float = math.inf,
    callbacks: Sequence[Callback] = (),
) -> Program:
    """The Task under the plan that was asked for; `auto` takes the first of its plans that can be lowered, and compiles
    where timing some steps says that it pays, and what was compiled is faster and proven.

    Args:
        say: is told what `auto` chose, and what it had to pass over.
        during: see `lower`.
        done: steps of the run that lie behind.
        facts: of the Task, where they are known already.
        memory: of races of the Task.
        until: when the run is to stop, by `time.monotonic()`.
        callbacks: of the run, beside the Task's.

    Raises:
        PlanError: the plan can't be run here, and it was asked for by name.
    """
    if not wanted.auto:
        return lower(task, placed(wanted.plan), say, during)
    say = _once(say)
    considered = consider(task, wanted.plan, done, facts)
    choices = considered.choices
    if wanted.asked:
        for line in considered.passed_over:
            say(f"auto passes over {line}")
        if eager := _only_eager(considered):
            say(f"auto goes on eagerly: {eager}")
    else:  # nobody asked to wait for a compiler, or to trust what it made unproven: `tune` does both
        choices = [choice for choice in choices if choice.plan.compile == wanted.plan.compile]
    choices = _not_against(choices, memory, say)
    watched = any_of_users([*task.callbacks, *callbacks])
    program, plan = _weighed(task, considered.facts, choices, wanted, say, during, memory, until, watched)
    if wanted.asked:
        say(f"auto: {plan.brief()}")
    return program


def _not_against(choices: list[Choice], memory: Memory, say: Say) -> list[Choice]:
    """The choices without those that something was found against; the last, which is the baseline, stays."""
    against = {choice.plan: memory.refuses(choice.plan) for choice in choices[:-1]}
    for plan, why in against.items():
        if why:
            say(f"auto passes over {plan.brief()}: {why}")
    return [choice for choice in choices if not against.get(choice.plan)]


def _only_eager(considered: Considered) -> str:
    """Why nothing could be compiled here, where that wasn't said with what was passed over; empty if it could."""
    refused = [one.violation.reason for one in considered.refused if one.axis == "compile"]
    said = any(line.startswith("compile=") for line in considered.passed_over)
    return refused[0] if refused and not said else unrolled(considered.facts, considered.device.kind)


def _once(say: Say) -> Say:
    """A Task may be lowered more than once before it trains, and what is said of it is said once."""
    said = set[str]()

    def told(line: str) -> None:
        if line not in said:
            said.add(line)
            say(line)

    return told


def _weighed(
    task: Task,
    facts: TaskFacts,
    choices: list[Choice],
    wanted: Wanted,
    say: Say,
    during: During | None,
    memory: Memory,
    until: float,
    watched: bool,
) -> tuple[Program, Plan]:
    """The best choice that isn't compiled; or the same compiled, where that pays, is faster indeed, and proven."""
    eager = [choice for choice in choices if choice.plan.compile == wanted.plan.compile]
    program, plan = _first_lowered(task, eager, say, during)
    allowed = accepted(wanted.plan)
    ways, instead = _untried(choices, plan, facts, wanted, memory, say)
    if not ways or facts.steps is None:
        return program, plan
    if why := _unsettled(facts, plan):
        say(f"auto goes on eagerly: {why}")
        return program, plan
    rewrites = any(way.rewrites != "none" for way in ways)
    limit_s, program.watched = until - time.monotonic(), watched
    to_come = memory.to_come(facts.steps)
    cheapest = min(ways, key=lambda way: way.compile != "none")  # what is recorded alone takes seconds
    with closing(program):
        hope = hoped(
            program,
            facts.steps,
            way=cheapest.compile,
            rewrites=rewrites,
            recorded=cheapest.graphs != "none",
            limit_s=limit_s,
            to_come=to_come,
            normed=facts.normed,
        )
    del program  # training begins with one that has run no step, and there may be no memory for two
    if isinstance(hope, str) or not hope.compilations:
        say(f"auto goes on eagerly: {hope}")
        return lower(task, plan, say, during), plan
    from hotloop.tuning.search.auto_search import (
        Settling,  # proofs and races take a second to import, which other runs do without
    )

    first = next((way for way in ways if way.compile != "none"), cheapest)
    compiling = hope if first.compile == cheapest.compile else hope.by(first.compile, recorded=first.graphs != "none")
    say(f"auto compiles: {compiling}" if compiling.compilations else f"auto records: {hope}")
    instead = [way for way in instead if hope.by(way.compile).compilations]
    memory.spend()
    last, most_s = choices[-1].plan, compiling.compiling_s
    settling = Settling(task, facts, plan, last, allowed, say, during, watched, memory.keep, to_come, most_s)
    verdict = settling.run(_likeliest_first(ways, hope.made), compiling.compilations, instead)
    return _settled(task, [*ways, *instead, settling.otherwise], verdict, say, during, memory)


def _untried(
    choices: list[Choice], plan: Plan, facts: TaskFacts, wanted: Wanted, memory: Memory, say: Say
) -> tuple[list[Plan], list[Plan]]:
    """The ways to compile an eager plan that the choices allow; see `_promising`."""
    others = [one.plan for one in choices if one.plan.compile != plan.compile]
    compiled = [one for one in others if one.with_axes(compile=plan.compile) == plan]
    allowed = accepted(wanted.plan)
    steps = None if facts.steps is None else facts.steps + memory.to_come(facts.steps)
    return _promising(_ways(compiled, plan, facts, wanted), plan, steps, allowed, memory, say)


def _promising(
    whole: list[Plan], eager: Plan, steps: int | None, allowed: Collection[str], memory: Memory, say: Say
) -> tuple[list[Plan], list[Plan]]:
    """The ways to compile a whole step that nothing found before speaks against; and what to compile where none can be.

    That is all but the update, as with an optimizer that counts in numbers.
    """

    def untried(ways: list[Plan]) -> list[Plan]:
        against = {way: memory.against(way, eager, allowed, steps) for way in ways}
        if len({way.layout for way in ways}) > 1:  # which makes a greater difference than whether a step is rewritten
            lost = {(way.layout, way.compile): way for way in ways if memory.lost(way)}
            against |= {
                way: f"{lost[way.layout, way.compile].brief()} was raced before, and lost"
                for way in ways
                if not against[way] and (way.layout, way.compile) in lost
            }
        for way, why in against.items():
            if why:
                say(f"auto passes over {way.brief()}: {why}")
        return [way for way in ways if not against[way]]

    ways = untried(whole)
    if not whole or any(way not in ways and not memory.failed(way) for way in whole):  # one was compiled, and lost
        return ways, []
    instead = untried([eager.with_axes(compile="forward")])
    return (ways, instead) if ways else (instead, [])


def _unsettled(facts: TaskFacts, plan: Plan) -> str:
    """Why compiled plans are neither raced nor proven beside an eager one; empty where they may be."""
    if not facts.exact:
        reason = facts.inexact[0] if facts.inexact else "its data has an order of its own"
        return f"{reason}, so nothing compiled can be proven"
    saving = ["accumulation"] * (plan.accumulation != BASELINE.accumulation)
    saving += ["precision"] * (plan.precision in REDUCED)
    if not saving:
        return ""
    return (
        "compiled plans race beside whole batches of the baseline's precision, for which there may be no memory where"
        f" {' and '.join(saving)} is set; train --tune races them all the same"
    )


def _ways(compiled: list[Plan], eager: Plan, facts: TaskFacts, wanted: Wanted) -> list[Plan]:
    """The first of the compiled plans, with images laid with channels last, rewritten or both, and as it is.

    A compiler writes the update its own way. On CUDA see `cuda_rules`; there a recorded step need not be compiled.
    """
    fixed = wanted.plan.model_fields_set
    if wanted.asked and eager.device.startswith("cuda"):
        return cuda_rules.auto_ways(eager.with_axes(optimizer=wanted.plan.optimizer), facts, here(eager.device), fixed)
    if not compiled:
        return []
    plan = compiled[0].with_axes(optimizer=wanted.plan.optimizer)
    machine = here(plan.device)
    laid, rewritten = (changes(facts, machine, plan) for changes in (laying_changes, rewriting_changes))
    both = [{**one, **other} for one in laid for other in rewritten]
    return [*(plan.with_axes(**change) for change in without([*both, *laid, *rewritten], fixed)), plan]


def _likeliest_first(ways: list[Plan], made: Makeup | None) -> list[Plan]:
    """Those with channels last are, unless the step has pooling that can be rewritten, for which images lie in the usual order."""
    return sorted(ways, key=lambda way: way.layout != BASELINE.layout) if made is not None and made.pooled else ways


def _settled(
    task: Task, plans: list[Plan], verdict: Verdict | None, say: Say, during: During | None, memory: Memory
) -> tuple[Program, Plan]:
    """The winner, lowered anew, since training begins with what has run no step; the last of the plans compiles nothing."""
    if verdict is None:
        return lower(task, plans[-1], say, during), plans[-1]
    winner = next(plan for plan in plans if plan.brief() == verdict.winner)
    program, plan = _first_lowered(task, [Choice(one, ()) for one in (winner, plans[-1])], say, during)
    if plan == winner:
        memory.keep(_compiled_again(verdict, program.compile_s))
    if plan != plans[-1]:
        timing = verdict.plan(plan.brief())
        say(f"auto: {plan.brief()} is {timing.ratio:.2f} times as fast as the baseline, and {timing.parity}")
    return program, plan


def _compiled_again(verdict: Verdict, seconds: float) -> Verdict:
    """With what compiling the winner once more takes: the runs that follow pay no more than that."""
    plans = [
        one.model_copy(update={"compile_warm_s": seconds}) if one.name == verdict.winner and one.compile_s else one
        for one in verdict.plans
    ]
    return verdict.model_copy(update={"plans": plans})


def _first_lowered(task: Task, choices: list[Choice], say: Say, during: During | None) -> tuple[Program, Plan]:
    """Whatever keeps a plan from being lowered is said once, for the first of them."""
    problem = ""
    for choice in choices:
        try:
            program = lower(task, choice.plan, say, during)
        except (PlanError, MemoryExhausted) as error:
            if isinstance(error, DeviceError) or choice is choices[-1]:
                raise
            problem = problem or f"auto passes over {choice.plan.brief()}: {error.given}"
            continue
        if problem:
            say(problem)
        return program, choice.plan
    raise AssertionError("the rules always name the baseline")


@dataclass(frozen=True)
class Considered:
    """What `auto` makes of a Task on this machine.

    Attributes:
        choices: best first; the last is the baseline.
        passed_over: what should pay but can't be run here, each with the reason.
        refused: values of each axis that can't be run here, starting from the baseline.
        left_open: what lowering the first choice will find out.
        facts: of the Task, with the steps that are left.
    """

    choices: list[Choice]
    passed_over: list[str]
    refused: list[Refused]
    left_open: list[str]
    device: Device
    facts: TaskFacts


def consider(task: Task, base: Plan, done: int = 0, facts: TaskFacts | None = None) -> Considered:
    """What the rules of `auto` say; the axes set in making `base` are kept, and `facts` save building the model.

    Args:
        done: steps of the run that lie behind.

    Raises:
        PlanError: those axes can't be run here.
    """
    plain = placed(base)
    base = Plan(**{axis: getattr(plain, axis) for axis in base.model_fields_set})
    facts, hardware = known(task, plain) if facts is None else (facts, here(plain.device))
    facts = left_after(done, facts)
    check(plain, facts, hardware)
    found = hardware.device(plain.device)
    assert found is not None
    choices = ranked(facts, hardware, base)
    return Considered(
        choices=choices,
        passed_over=[
            f"{settings(plain.with_axes(**{wish.axis: wish.value}), problem)}: {problem.reason}"
            for wish, problem in passed_over(facts, hardware, base)
        ],
        refused=refused(plain, facts, hardware),
        left_open=left_open(facts, choices[0].plan),
        device=found,
        facts=facts,
    )


def foreseen(task: Task, wanted: Wanted, facts: TaskFacts, memory: Memory, remembered: Plan | None) -> Foreseen:
    """What `lowered` will do where it isn't told of a `remembered` plan, without lowering anything; see `consider`."""
    considered, passed_over = consider(task, wanted.plan, facts=facts), list[str]()

    def say(line: str) -> None:
        passed_over.append(line.removeprefix("auto passes over "))

    choices = _not_against(considered.choices, memory, say)
    choice = next(one for one in choices if one.plan.compile == wanted.plan.compile)
    ways, _ = _untried(choices, choice.plan, considered.facts, wanted, memory, say)
    if ways and (why := _unsettled(considered.facts, choice.plan)):
        say(f"compile={ways[0].compile}: {why}")
        ways = []
    return Foreseen(
        remembered=remembered,
        choice=choice,
        compiled=[Choice(way, cuda_rules.reasons(way, choice.plan, considered.facts)) for way in ways],
        passed_over=[*considered.passed_over, *passed_over],
        left_open=left_open(considered.facts, ways[0] if ways else choice.plan),
        refused=considered.refused,
        device=considered.device,
    )


def left_after(done: int, facts: TaskFacts) -> TaskFacts:
    """The facts with the steps that are left after so many."""
    return facts if facts.steps is None else facts.model_copy(update={"steps": max(facts.steps - done, 0)})


def known(task: Task, plan: Plan) -> tuple[TaskFacts, Hardware]:
    """The facts that tell whether plans on the device of `plan` can be run, before any is lowered."""
    with making_ready(plan), preserved():
        facts = facts_of(Ingredients.of(task, plan))
    return facts, here(plan.device)
