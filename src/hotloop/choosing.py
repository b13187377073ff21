"""From what was asked for to a Program: a plan asked for by name runs or is an error; `auto` goes down its list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hotloop.errors import DeviceError, MemoryExhausted, PlanError
from hotloop.feasible import Refused, check, refused, settings
from hotloop.hardware import Device, Hardware
from hotloop.lowering import Program, lower
from hotloop.lowering.facts import facts_of
from hotloop.lowering.ingredients import Ingredients
from hotloop.lowering.order import making_ready
from hotloop.lowering.telling import During, Say
from hotloop.plan import Plan
from hotloop.probe import check_device, devices, here
from hotloop.records import TaskFacts
from hotloop.rng import preserved
from hotloop.rules import Choice, left_open, passed_over, ranked, unrolled
from hotloop.task import Task
from hotloop.wanted import Wanted
from hotloop.weighing import hoped, milliseconds, step_seconds


def placed(plan: Plan, device: str | None = None) -> Plan:
    """The plan on the device asked for; without a word, on this machine's accelerator if there is one.

    Raises:
        DeviceError: there is no such device here.
    """
    if device is None and "device" not in plan.model_fields_set:
        device = next((name for name in devices() if name != "cpu"), "cpu")
    return plan.with_axes(device=str(check_device(plan.device if device is None else device)))


def lowered(
    task: Task,
    wanted: Wanted,
    say: Say = lambda line: None,
    during: During | None = None,
    done: int = 0,
    facts: TaskFacts | None = None,
    against: Mapping[Plan, str] | None = None,
) -> Program:
    """The Task under the plan that was asked for; `auto` takes the first of its plans that can be lowered, and compiles
    where timing some steps says that it pays.

    Args:
        say: is told what `auto` chose, and what it had to pass over.
        during: see `lower`.
        done: steps of the run that lie behind.
        facts: of the Task, where they are known already.
        against: what was found to speak against plans, which `auto` then passes over.

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
    choices = _not_against(choices, against or {}, say)
    program, plan = _weighed(task, considered.facts, choices, wanted, say, during)
    if wanted.asked:
        say(f"auto: {plan.brief()}")
    return program


def _not_against(choices: list[Choice], against: Mapping[Plan, str], say: Say) -> list[Choice]:
    """The choices without those that something was found against; the last, which is the baseline, stays."""
    refused = [choice for choice in choices[:-1] if choice.plan in against]
    for choice in refused:
        say(f"auto passes over {choice.plan.brief()}: {against[choice.plan]}")
    return [choice for choice in choices if choice not in refused]


def _only_eager(considered: Considered) -> str:
    """Why nothing could be compiled here, where that wasn't said with what was passed over; empty if it could."""
    refused = [one.violation.reason for one in considered.refused if one.axis == "compile"]
    said = any(line.startswith("compile=") for line in considered.passed_over)
    return refused[0] if refused and not said else unrolled(considered.facts)


def _once(say: Say) -> Say:
    """A Task may be lowered more than once before it trains, and what is said of it is said once."""
    said = set[str]()

    def told(line: str) -> None:
        if line not in said:
            said.add(line)
            say(line)

    return told


def _weighed(
    task: Task, facts: TaskFacts, choices: list[Choice], wanted: Wanted, say: Say, during: During | None
) -> tuple[Program, Plan]:
    """The best choice that isn't compiled; or the same compiled, where that pays and then is faster indeed."""
    eager = [choice for choice in choices if choice.plan.compile == wanted.plan.compile]
    program, plan = _first_lowered(task, eager, say, during)
    ways = [one.plan for one in choices if one not in eager and one.plan.with_axes(compile=plan.compile) == plan]
    if not ways or facts.steps is None:
        return program, plan
    hope = hoped(program, facts.steps)
    program.close()
    del program  # training begins with one that has run no step, and there may be no memory for two
    if isinstance(hope, str) or not hope.pays:
        say(f"auto goes on eagerly: {hope}")
        return lower(task, plan, say, during), plan
    say(f"auto compiles: {hope}")
    compiled = _compiled(task, ways[0], hope.step_s, say, during)
    return (lower(task, plan, say, during), plan) if compiled is None else (compiled, ways[0])


def _compiled(task: Task, plan: Plan, eager_s: float, say: Say, during: During | None) -> Program | None:
    """The Program, if it can be compiled and its step takes less than the eager one."""
    try:
        program = lower(task, plan, say, during)
    except (PlanError, MemoryExhausted) as error:
        say(f"auto passes over {plan.brief()}: {error.given}")
        return None
    took_s = step_seconds(program)
    if took_s < eager_s:
        return program
    say(f"auto goes on eagerly: a step takes {milliseconds(took_s)} compiled, and {milliseconds(eager_s)} eagerly")
    program.close()
    return None


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
    if facts.steps is not None:
        facts = facts.model_copy(update={"steps": max(facts.steps - done, 0)})
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


def known(task: Task, plan: Plan) -> tuple[TaskFacts, Hardware]:
    """The facts that tell whether plans on the device of `plan` can be run, before any is lowered."""
    with making_ready(plan), preserved():
        facts = facts_of(Ingredients.of(task, plan))
    return facts, here(plan.device)
