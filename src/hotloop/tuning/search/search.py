"""The search for the fastest plan that is proven equal: race single changes, put the good ones together, prove."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from hotloop.core.callback import any_of_users
from hotloop.core.number_formats import REDUCED
from hotloop.core.processes.deadline import GRACE_S, Deadline
from hotloop.core.random.rng import preserved
from hotloop.core.records.hardware import Hardware
from hotloop.core.records.race import TRUSTED, Parity, Timing
from hotloop.core.records.training import TaskFacts
from hotloop.errors import PlanError, TimeOverError
from hotloop.lowering.compile.runtime_checks import looks
from hotloop.lowering.failures.explanation import explained
from hotloop.lowering.program import Program
from hotloop.parity.proof import lacking
from hotloop.plan import Plan
from hotloop.task import Task
from hotloop.tuning.cuda_rules import Change
from hotloop.tuning.races.measure import Entrant, measure
from hotloop.tuning.races.runner import Runner
from hotloop.tuning.races.starts import on_one_clock, with_starts
from hotloop.tuning.search.budget import Budget, hopeless, why_in_vain
from hotloop.tuning.search.candidates import (
    apart,
    combined,
    compiled_changes,
    eager_changes,
    likeliest,
    promising,
    thread_changes,
    variants,
    without,
)
from hotloop.tuning.search.compile_payoff import Chance, chances, compile_s
from hotloop.tuning.search.findings import BASELINE, OF_ITS_OWN, is_left_open, is_told, too_short
from hotloop.tuning.search.program_pool import Held, in_groups, plans_at_once
from hotloop.tuning.search.proofs import Proofs
from hotloop.tuning.search.step_profile import Makeup, makeup

_GLANCE_S = 0.2
"""For a first idea of the baseline's step, and for a baseline that nothing is raced against."""

_SHORT_MS = 5.0
"""A step's, for which threads may cost more than they save."""

_DOUBT = 2
"""Times what a race costs: so much must be hoped for to hold it again."""

_ANOTHER = 0.15
"""Of what a compiled run takes, so much may be won by compiling it in another form: not rewritten, or for one thread."""


@dataclass
class Search:
    """One search for one Task on one device.

    Attributes:
        baseline: eager on the device under torch's settings; `base` is it with the axes that the user set.
        fixed: those axes, which stay. With a reduced precision among them, a plan that has it is accepted for what it is.
        rules: the best plan by the rules alone that compiles nothing, which a run without a search takes.
        deadline: no race, compilation or proof is begun that should take longer.
        failed: plans by name that failed in an earlier race, and why; they aren't tried again.
        timings: of each plan raced, by name, from its last race, beside the baseline of the very last one.
        notes: what was decided on the way, and why.
    """

    task: Task
    baseline: Plan
    base: Plan
    fixed: Collection[str]
    facts: TaskFacts
    hardware: Hardware
    prove: Callable[[Sequence[Program]], list[Parity]]
    time_limit_s: float | None = None
    deadline: Deadline = field(default_factory=Deadline)
    progress: Callable[[str, float], None] = lambda doing, share: None
    say: Callable[[str], None] = lambda line: None
    rules: Plan | None = None
    failed: Mapping[str, str] = field(default_factory=dict)
    timings: dict[str, Timing] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _raced: dict[str, Timing] = field(default_factory=dict)
    _spent_s: float = 0.0
    _cramped: bool = False
    _racing: Deadline = field(default_factory=Deadline)

    def __post_init__(self) -> None:
        self.held = Held(self.task)

    def run(self) -> str:
        """The name of the plan that finishes this run first and is proven equal: the baseline, if none is."""
        with closing(self.held):
            try:
                with self.deadline.enforced("the search", reserve_s=-GRACE_S):
                    return self._run()
            except TimeOverError as over:
                return self._left(over.given)

    def _run(self) -> str:
        if not self.facts.exact:
            return self._left(self.facts.inexact[0] if self.facts.inexact else OF_ITS_OWN)
        if self.time_limit_s is None and hopeless(self.facts.steps):
            return self._left(why_in_vain(self.facts.steps))
        (step_s, copying_s), device = self._glance(), self.baseline.device
        budget = Budget.of(step_s, self.facts.steps, self.time_limit_s, device, self.deadline, copying_s)
        self.say(budget.forecast())
        if self.time_limit_s is None and (budget.too_small or hopeless(self.facts.steps)):
            self._race([], _GLANCE_S)
            return self._left(why_in_vain(self.facts.steps, budget))
        if why := lacking([self.held.lowered(BASELINE, self.baseline)]):
            return self._left(f"{why}, so no plan could be proven equal and none was raced")
        if not self.deadline.allows(least_s := budget.tells_s() + budget.proof_s):
            return self._left(f"a race and a proof take about {least_s:.0f} s, and {self.deadline}")
        self._race_all(budget)
        winner = self._proven(budget)
        self._say_if_too_short()
        return winner

    def _race_all(self, budget: Budget) -> None:
        """Races what there is time for; the deadline ends what takes longer, and leaves time for a proof."""
        reserve_s = 1.5 * budget.proof_s  # the plan is lowered again
        self._racing = replace(self.deadline, at=self.deadline.at - reserve_s - 0.5)  # to put back what ran
        try:
            with self.deadline.enforced("racing", reserve_s=reserve_s):
                self._compiled(self._eagerly(budget), budget)
        except TimeOverError as over:
            self._left(over.given)
            self.held.give_up(list(self.held.programs))  # their States are those of the middle of a window

    def _left(self, why: str) -> str:
        """Says why nothing more is looked for; without a proven plan the baseline stays."""
        self.notes.append(why)
        self.timings.setdefault(BASELINE, Timing(name=BASELINE, plan=self.baseline.model_dump()))
        return BASELINE

    def _glance(self) -> tuple[float, float]:
        """Seconds of the baseline's step, and of copying its State out and back."""
        program = self.held.lowered(BASELINE, self.baseline)
        try:
            with preserved(*program.devices):
                return Runner(program).glance(_GLANCE_S)
        except Exception as error:
            raise explained(error, program, None) from error

    @property
    def told(self) -> bool:
        """Whether anything was found of any plan but the baseline."""
        return is_told(self.timings)

    @property
    def left_open(self) -> bool:
        """Whether nothing was found that speaks against the plan of the rules, nor proven that speaks for it."""
        return is_left_open(self.rules, self.baseline, self.timings, self.failed)

    def _say_if_too_short(self) -> None:
        alone = len(self.timings) == 1 and self.time_limit_s is None and not self.deadline.met
        if not (alone or self.told or self._cramped):
            self.notes.append(too_short(self.time_limit_s, self.deadline))

    def _eagerly(self, budget: Budget) -> Plan:
        """Races single changes that need no compiler, and what is good of them together; the best plan without one."""
        changes = without(eager_changes(self.facts, self.hardware, self.base, torch.get_num_threads()), self.fixed)
        changes = self._in_reach(likeliest(changes, self.rules) if budget.tight else changes, budget)
        start = [] if self.base == self.baseline else [self.base]
        singles = [self.base.with_axes(**change) for change in changes]
        rules = [] if self.rules is None or self.rules in (self.base, *singles) else [self.rules]
        plans = self._in_time([*start, *rules, *singles], budget)
        self._race(plans, budget.race_s(1 / 2, len(plans)), each_axis=True)
        found = [self.timings.get(plan.brief()) for plan in singles]
        own = self.timings.get(self.base.brief()) if start else None
        if own is not None and own.failure is not None:
            raise PlanError(f"{self.base.brief()}, as you set it, can't be run: {own.failure}")
        sure = [plan for plan in rules if self._surely_faster(plan)]
        best = combined(changes, found, own)
        if not best and not sure:
            return self._second_look([*rules, *singles], budget)
        alone = [self.base.with_axes(**{axis: value}) for axis, value in best.items()]
        together = self.base.with_axes(**best)
        if len(best) > 1 and self._hoped(alone, [*alone, *sure], budget):
            self._race([together], budget.race_s(1 / 4, 1, self._spent_s))
        return max([self.base, together, *alone, *sure], key=self._ratio)  # together they may be slower, or fail

    def _in_reach(self, changes: list[Change], budget: Budget) -> list[Change]:
        """Those that are worth their start: of a plan that was set to compile, each change is compiled too."""
        compiled = self.base.compile
        if compiled in ("step", "package"):
            changes = [change for change in changes if "optimizer" not in change]  # a compiler writes it its own way
        return changes if compiled == "none" else changes[: budget.starts(compile_s(0, compiled))]

    def _in_time(self, plans: list[Plan], budget: Budget) -> list[Plan]:
        """Those that the first race has time for; the last ones are the least likely to win."""
        able = budget.plans_at_first(len(plans))
        if 0 < able < len(plans):
            names = ", ".join(plan.brief() for plan in plans[able:])
            self.notes.append(f"not raced, since there is time for {able} of {len(plans)} plans: {names}")
        return plans[:able]

    def _surely_faster(self, plan: Plan) -> bool:
        return getattr(self.timings.get(plan.brief()), "verdict", None) == "faster"

    def _hoped(self, parts: Sequence[Plan], raced: Sequence[Plan], budget: Budget) -> bool:
        """Whether plans together would win, beyond the best that was raced, what it costs to race them."""
        best = max(map(self._ratio, raced))
        more = math.prod(map(self._ratio, parts)) / best
        return budget.set_by_user or budget.after(best).wins_s(more) > budget.tells_s()

    def _ratio(self, plan: Plan) -> float:
        return getattr(self.timings.get(plan.brief()), "ratio", None) or 0.0

    def _second_look(self, plans: Sequence[Plan], budget: Budget) -> Plan:
        """Races the plan that seemed best once more, if all were left undecided and it would win more than that costs."""
        ahead = [plan for plan in plans if self._ratio(plan) > self._ratio(self.base)]
        one = promising(ahead, [self.timings.get(plan.brief()) for plan in ahead])
        if one is None:
            return self.base
        (plan, timing), seconds = one, budget.race_s(1 / 4, 1, self._spent_s)
        if budget.wins_s(timing.ratio or 1.0) < _DOUBT * seconds:
            return self.base
        self._race([plan], seconds, again=True)
        return max([plan, self.base], key=self._ratio) if self._surely_faster(plan) else self.base

    def _compiled(self, plan: Plan, budget: Budget) -> None:
        """Races the best plan compiled, if this run is long enough to win back the compilation."""
        changes = without(compiled_changes(self.facts, self.hardware, plan), self.fixed)
        if not changes:
            return
        written = plan.with_axes(optimizer=self.base.optimizer)  # a compiler writes the update its own way
        ways = self._chances([written.with_axes(**change) for change in changes], plan, budget)
        began = time.perf_counter()
        for way in ways:
            lost_s = time.perf_counter() - began  # on ways that can't be run
            if why := self._too_late(way, lost_s, budget):
                if self.told or self.time_limit_s is None:
                    self.notes.append(f"no {'' if way is ways[0] else 'other '}compilation was tried: {why}")
                return
            if self._race_way(way, lost_s, budget):
                return

    def _chances(self, ways: Sequence[Plan], plan: Plan, budget: Budget) -> list[Chance]:
        """What compiling `plan`, which isn't, in each way should win of this run."""
        base = self.timings[BASELINE]
        timing = self.timings.get(plan.brief(), base)
        assert timing.step_ms is not None and base.step_ms is not None
        rest = budget.after(base.step_ms / timing.step_ms)
        proof_s = budget.proof_s if plan == self.base else 0.0  # any other is proven anyway
        told = not self.facts.recurrent or any(way.compile == "none" for way in ways)
        made, step_s = self._makeup(timing.name, plan) if told else None, timing.step_ms / 1e3
        often = looks(any_of_users(self.task.callbacks), self.facts.steps, self.facts.batches)
        return chances(ways, made, step_s, rest, recurrent=self.facts.recurrent, proof_s=proof_s, looks=often)

    def _too_late(self, way: Chance, lost_s: float, budget: Budget) -> str:
        """Why nothing is compiled any more; empty where something is."""
        if self.time_limit_s is None and way.won_s < (costs_s := lost_s + way.costs_s):
            return f"it would win about {way.won_s:.0f} s of this run, and takes about {costs_s:.0f} s"
        if not self.deadline.allows(way.compile_s + budget.settles_s() + budget.proof_s):
            return f"it takes about {way.compile_s:.0f} s, and {self.deadline}"
        if budget.race_s(1 / 8, 1, self._spent_s) == 0:
            return "what is left of the time limit could tell nothing of it"
        return ""

    def _race_way(self, way: Chance, lost_s: float, budget: Budget) -> bool:
        """Races one way to compile, as it is and its variants; False where it can't be run."""
        plans = variants(way.plan, self.facts, self.hardware, self.base, self.fixed, way.pooled)
        left_s = way.run_s and way.run_s - way.won_s + lost_s
        if not self._pays_again(way, left_s):
            for plan in plans:  # that nothing can be rewritten shows before it is compiled
                self._race([plan], budget.race_s(1 / 4))
                if not self._fails(plan):
                    return True
            return False
        while len(plans) > 2 and not self._pays_again(way, left_s, len(plans) - 1):
            plans.pop(-2)  # the likeliest stays, and the step as it is
        seconds = budget.race_s(1 / 8, len(plans), self._spent_s)
        raced = (
            self._race(plans, seconds) if seconds else self._race([way.plan], budget.race_s(1 / 8, 1, self._spent_s))
        )
        best = max([self.base, *plans], key=self._ratio)
        if self._pays_again(way, budget.after(self._ratio(best) or 1.0).run_s):
            self._on_one_thread(raced, budget)
        return not all(map(self._fails, plans))

    def _pays_again(self, way: Chance, run_s: float | None, more: int = 1) -> bool:
        """Whether so many more compilations are likely to win back their time in what a compiled run takes."""
        pays = self.time_limit_s is not None or run_s is None or _ANOTHER * run_s > more * way.compile_s
        return pays and self.deadline.allows(way.costs_s + (more - 1) * way.compile_s)

    def _fails(self, plan: Plan) -> bool:
        timing = self.timings.get(plan.brief())
        return plan.brief() in self.failed or (timing is not None and timing.failure is not None)

    def _makeup(self, name: str, plan: Plan) -> Makeup | None:
        """What its step is made of; None where the look itself fails, since the plan has been run by then."""
        try:
            program = self.held.lowered(name, plan)
            with preserved(*program.devices), closing(program):  # what it keeps for steps isn't free for others
                return makeup(program)
        except Exception:
            return None

    def _on_one_thread(self, raced: Sequence[Timing | None], budget: Budget) -> None:
        """Races the best compiled plan on one thread too, where its step may be too short to share, as eager it may be."""
        able = [timing for timing in raced if timing is not None and timing.step_ms is not None]
        best = min(able, key=lambda timing: timing.step_ms or 0.0, default=None)
        alone = self.timings.get(self.base.with_axes(threads=1).brief())
        if best is None or (best.step_ms or 0.0) > _SHORT_MS or (alone is not None and alone.behind):
            return
        changes = without(thread_changes(self.facts, self.hardware, best.as_plan), self.fixed)
        plans = [best.as_plan.with_axes(**change) for change in changes]
        self._race(plans, budget.race_s(1 / 8, len(plans), self._spent_s))

    def _race(
        self, plans: Sequence[Plan], seconds: float, *, again: bool = False, each_axis: bool = False
    ) -> list[Timing | None]:
        """Races plans against the baseline, those that were raced before only if asked to; they keep their costs of starting.

        Args:
            seconds: 0 where a limit leaves none; then nothing is raced.
            each_axis: whether what is good of several axes will be put together, so that those don't beat each other.
        """
        named = self._untried(plans, again) if seconds > 0 else {}
        parts = self._in_memory(named) if named else []
        if not parts and BASELINE not in self.timings:
            self._measure({}, _GLANCE_S, each_axis)
        for part in parts:
            self._measure(part, seconds * (len(part) + 1) / (len(named) + len(parts)), each_axis)
            if len(parts) > 1:
                self.held.give_up(part)
        self._spent_s += 0.0 if all(map(self._fails, named.values())) else seconds
        return [self.timings.get(plan.brief()) for plan in plans]

    def _untried(self, plans: Sequence[Plan], again: bool) -> dict[str, Plan]:
        named = {plan.brief(): plan for plan in plans if again or plan.brief() not in self.timings}
        failed = self.failed.keys() - {self.base.brief()}  # whoever set that is told each time why it can't be run
        for name in named.keys() & failed:
            self.notes.append(
                f"{name} was not tried: it failed before ({self.failed[name]}); hotloop race tries it again"
            )
        return {name: plan for name, plan in named.items() if name not in failed}

    def _in_memory(self, named: Mapping[str, Plan]) -> list[dict[str, Plan]]:
        """The plans in groups that there is memory for at a time, beside the baseline."""
        new = [name for name in named if name not in self.held.programs]
        room = plans_at_once(self.facts, self.baseline.device) if new else len(named)
        if room < len(new):
            self.held.give_up([name for name in self.held.programs if name != BASELINE])
            room = plans_at_once(self.facts, self.baseline.device)
        if room < 1:
            self._cramped = True
            self.notes.append(f"not raced, since there is no memory for them beside the baseline: {', '.join(named)}")
            return []
        return [{name: named[name] for name in part} for part in in_groups(list(named), room)]

    def _measure(self, named: Mapping[str, Plan], seconds: float, each_axis: bool) -> None:
        entrants = [
            Entrant(name, partial(self.held.lowered, name, plan), plan, apart(plan, self.base, each_axis))
            for name, plan in {BASELINE: self.baseline, **named}.items()
        ]
        steps, limits = self.facts.steps, dict[str, Any](time_limit_s=seconds, deadline=self._racing)
        found = measure(entrants, BASELINE, steps=steps, brief=True, progress=self.progress, **limits)
        self._raced |= with_starts(found.plans, BASELINE, self.held.starts, steps)
        self.timings = on_one_clock(self._raced, BASELINE, steps)

    def _proven(self, budget: Budget) -> str:
        """The first of the plans that finish earlier than the baseline, best first, whose proof pays and succeeds."""
        self.held.give_up([one.name for one in self.timings.values() if one.verdict != "faster"])
        accepted = (*TRUSTED, "reduced-precision") if self.base.precision in REDUCED else TRUSTED
        proofs = Proofs(self.baseline, budget, accepted, self._parity, self.timings[BASELINE], self.facts.steps)
        try:
            winner = proofs.first(self._faster(budget))
        finally:  # Ctrl-C leaves what was proven until then
            self.timings |= {one.name: one for one in proofs.judged}
            self.notes += proofs.notes
        return BASELINE if winner is None else winner

    def _faster(self, budget: Budget) -> list[Timing]:
        """Those that finish this run, which finds what was compiled here, before the baseline, the first of them first."""
        in_time = replace(self.deadline, at=self.deadline.at - budget.proof_s)
        for timing in self.timings.values():
            if timing.verdict == "faster" and timing.compile_s and in_time.allows(timing.compile_s):
                again_s = self.held.compiled_again_s(timing.name, timing.as_plan, in_time)
                self.timings[timing.name] = timing.model_copy(update={"compile_warm_s": again_s})
        base, steps = self.timings[BASELINE], self.facts.steps
        faster = [one for one in self.timings.values() if one.verdict == "faster" and one.saves_s(base, steps) > 0]
        return sorted(faster, key=lambda one: one.saves_s(base, steps), reverse=True)

    def _parity(self, timing: Timing) -> Parity:
        self.progress(f"proving {timing.name}", 0.0)
        return self.prove([self.held.lowered(timing.name, timing.as_plan)])[0]
