"""Is this plan's result as true as the baseline's? Single steps against float64, then a free run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hotloop.errors import HotloopError, blame
from hotloop.lowering import Program, lower
from hotloop.parity.collecting import Collector
from hotloop.parity.judging import judged
from hotloop.parity.path import STATES
from hotloop.parity.running import NUDGES, Freely, run_freely
from hotloop.parity.witnesses import Truth, baselines, peers
from hotloop.plan import Plan
from hotloop.probe import check_device
from hotloop.rng import preserved
from hotloop.task import Task
from hotloop.verdicts import Parity

Progress = Callable[[int, int], None]
"""Told of states done, and how many there are."""


def prove(task: Task, plan: Plan, *, progress: Progress = lambda done, total: None) -> Parity:
    """Compares a plan with the baseline on its device; see `prove_programs`.

    Raises:
        PlanError: the plan can't be run here.
    """
    program = lower(task, plan)
    try:
        return prove_programs(task, [program], progress=progress)[0]
    finally:
        program.close()


def prove_plans(task: Task, plans: Sequence[Plan], *, progress: Progress = lambda done, total: None) -> list[Parity]:
    """Compares plans with the baseline, those of one device and precision together; see `prove_programs`.

    One that can't be run is unproven.
    """
    found: dict[Plan, Parity] = {}
    groups: dict[tuple[str, str], list[Program]] = {}
    for plan in dict.fromkeys(plans):
        try:
            groups.setdefault((plan.device, plan.precision), []).append(lower(task, plan))
        except HotloopError as error:
            found[plan] = Parity(plan=plan.brief(), parity="unproven", reason=error.given, states=0)
    for programs in groups.values():
        try:
            parities = prove_programs(task, programs, progress=progress)
        finally:
            for program in programs:
                program.close()
        found |= zip([program.parts.plan for program in programs], parities, strict=True)
    return [found[plan] for plan in plans]


def prove_programs(
    task: Task, programs: Sequence[Program], *, progress: Progress = lambda done, total: None
) -> list[Parity]:
    """Compares Programs of one Task, on one device and in one precision, with the baseline there.

    From States along the baseline's path each takes one step, with the same batch and the same draws, and so does the
    baseline in float64. Losses, gradients, updates, the optimizer's state and buffers may be off from the truth by a
    small multiple of what several baselines are that differ harmlessly. A free run across the end of an epoch follows.
    Their States are put back afterwards.
    """
    found = _compared(task, programs, progress, brief=True)
    # More baselines can only allow more, so what passes beside one passes beside all of them.
    left = [number for number, parity in enumerate(found) if parity.parity == "broken"]
    if left:
        again = _compared(task, [programs[number] for number in left], progress, brief=False)
        for number, parity in zip(left, again, strict=True):
            seconds = (found[number].seconds or 0.0) + (parity.seconds or 0.0)
            found[number] = parity.model_copy(update={"seconds": seconds})
    return found


def _compared(task: Task, programs: Sequence[Program], progress: Progress, *, brief: bool) -> list[Parity]:
    """As `prove_programs` does; `brief` beside as few baselines as there can be, which allows less."""
    began = time.monotonic()
    plans = [program.parts.plan for program in programs]
    before = [program.state() for program in programs]
    device = check_device(plans[0].device)
    common: dict[str, Any] = {"states": 0, "versions": {"torch": torch.__version__}}

    def all_unproven(reason: str) -> list[Parity]:
        return [Parity(plan=plan.brief(), parity="unproven", reason=reason, **common) for plan in plans]

    if not task.roles.exact:
        return all_unproven("the data is a stream with an order of its own, so runs can't be compared step by step")
    with preserved(device, *(other for program in programs for other in program.parts.elsewhere)):
        try:
            truth = Truth(task, device)
        except Exception as error:
            return all_unproven(f"the model can't be turned into float64: {blame(error)}")
        witnesses, reduced = baselines(task, plans[0].device, few=brief), peers(task, plans[0], few=brief)
        try:
            alone = slice(1) if brief else slice(None)
            collector = Collector(truth, witnesses[alone], reduced[alone], programs)
            evidence = collector.collect(lambda states: progress(states, STATES))
            free: dict[int, Freely] = {}
            if not evidence.unproven:
                able = [
                    program
                    for program, account in zip(programs, evidence.candidates, strict=True)
                    if account.failed is None
                ]
                fp32, other = (
                    [one for one in every if one.name not in collector.left_out] for every in (witnesses, reduced)
                )
                runs = run_freely(evidence.last, fp32, other, able, nudges=1 if brief else NUDGES)
                free = dict(zip(map(id, able), runs, strict=True))
        finally:
            for witness in [*witnesses, *reduced]:
                witness.program.close()
            for program, state in zip(programs, before, strict=True):
                program.restore(state)
    for program, account in zip(programs, evidence.candidates, strict=True):
        if truth.watch.draws and (apart := _draws_apart(program)):
            account.unproven = f"it draws random numbers {apart}, so they are other ones than the baseline's"
    common |= {"states": len(evidence.steps), "seconds": time.monotonic() - began}
    return [
        Parity(
            plan=account.name,
            free_steps=free[id(program)].steps if id(program) in free else 0,
            **common,
            **judged(account, evidence, free.get(id(program))),
        )
        for program, account in zip(programs, evidence.candidates, strict=True)
    ]


def _draws_apart(program: Program) -> str:
    """In what way a Program's random numbers come otherwise than the baseline's; empty if they don't."""
    if program.parts.plan.accumulation > 1:
        return "for each piece of a batch"
    return "on several devices" if program.parts.elsewhere else ""
