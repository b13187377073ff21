"""The search for the fastest plan that is proven equal: race single changes, combine the best, prove."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from hotloop.core.callback import has_user_callbacks
from hotloop.core.hardware.limits import free_memory_bytes
from hotloop.core.hardware.machine_load import LoadMeter, wait_until_quiet
from hotloop.core.processes import GRACE_S, Deadline, time_limit
from hotloop.core.random.rng import preserve_generators
from hotloop.core.records.hardware import Hardware
from hotloop.core.records.race import Parity, Timing
from hotloop.core.records.training import TaskFacts
from hotloop.errors import PlanError, TimeOverError, error_summary, is_out_of_memory
from hotloop.lowering.build import lower
from hotloop.lowering.compile.runtime_checks import recheck_count
from hotloop.lowering.failures.explanation import explain_error
from hotloop.lowering.program import Program
from hotloop.parity.proof import missing_memory
from hotloop.plan import Plan
from hotloop.task import Task
from hotloop.tuning.candidates import (
    AxisChange,
    combine_changes,
    compiled_changes,
    compiled_variants,
    eager_changes,
    likely,
    most_promising,
    not_fixed,
    race_group,
    thread_changes,
)
from hotloop.tuning.economics import (
    VARIANT_GAIN,
    Budget,
    Payoff,
    estimate_compile_s,
    is_run_too_short,
    rate_candidates,
    why_not_searched,
)
from hotloop.tuning.race_cache import accepted_parities
from hotloop.tuning.races.measure import Contender, measure
from hotloop.tuning.races.runner import Runner
from hotloop.tuning.races.starts import add_startup_cost, rebase_timings
from hotloop.tuning.step_profile import StepProfile, profile_step

BASELINE = "baseline"

_OWN_ORDER = (
    "its data has an order of its own, so no plan can be proven equal and none was raced, whatever the "
    "--time-limit; hotloop race measures how fast they are"
)

_ESTIMATE_S = 0.2
"""Duration of the first estimate of the baseline's step, and of a race without rivals."""

_WAIT_SHARE = 0.1
"""Longest wait for a quiet machine, as a share of the time until the deadline."""

_SHORT_STEP_MS = 5.0
"""Below this step time threads may cost more than they save."""

_RERACE_FACTOR = 2
"""A race is repeated if the hoped gain exceeds the race's cost by this factor."""

_MAX_COMPILE_S = 1800.0
"""Seconds after which a compilation is ended: torch's compiler doesn't finish for every network."""

_BYTES_PER_PARAMETER = 28
"""Bytes for each parameter: value, gradient, two optimizer values, and the State's copy."""

_MEMORY_SHARE = 0.6
"""Share of the free memory; the rest is for activations and the proof."""


def max_programs_in_memory(facts: TaskFacts, device: str) -> int:
    """Returns the number of further Programs that fit into the free memory."""
    return int(
        _MEMORY_SHARE * free_memory_bytes(torch.device(device)) / (_BYTES_PER_PARAMETER * max(1, facts.parameters))
    )


@dataclass
class ProgramPool:
    """The Programs of a search in memory, by name.

    Attributes:
        starts: seconds of the first lowering without compiling, and of compiling, by name.
    """

    task: Task
    programs: dict[str, Program] = field(default_factory=dict)
    starts: dict[str, tuple[float, float]] = field(default_factory=dict)

    def get_program(self, name: str, plan: Plan) -> Program:
        """Returns the Program of this name, lowered if it isn't in memory.

        Raises:
            PlanError: the plan can't be run, or compiling it takes too long.
        """
        if name not in self.programs:
            began = time.perf_counter()
            too_long = PlanError(
                f"compiling it was stopped after {_MAX_COMPILE_S:,.0f} s",
                expected="a compiler that finishes",
                fix="choose compile=none",
            )
            with nullcontext() if plan.compile == "none" else time_limit(_MAX_COMPILE_S, lambda: too_long):
                program = self.programs[name] = lower(self.task, plan)
            self.starts.setdefault(name, (time.perf_counter() - began - program.compile_s, program.compile_s))
        return self.programs[name]

    def release(self, names: Iterable[str]) -> None:
        held = [name for name in names if name in self.programs]
        for name in held:
            self.programs.pop(name).close()
        if held:
            gc.collect()  # models and optimizers refer to each other

    def recompile_s(self, name: str, plan: Plan, deadline: Deadline) -> float:
        """Compiles again and returns the seconds; those of the first time on failure or at the deadline."""
        try:
            with deadline.enforce("compiling again"):
                program = lower(self.task, plan)
        except Exception:
            return self.starts[name][1] if name in self.starts else 0.0
        program.close()
        return program.compile_s

    def close(self) -> None:
        for program in self.programs.values():
            program.close()


@dataclass
class PlanSearch:
    """A search for the fastest plan of one Task on one device.

    Attributes:
        baseline: eager on the device with torch's settings; `base` also has the axes that the user sets (`fixed`).
        rules: the best uncompiled plan by the rules alone, which a run without a search takes.
        deadline: a race, compilation or proof that should end later is skipped.
        failed: reasons of plans that failed in an earlier race and are skipped, by name.
        timings: by plan name, from its last race, relative to the last race's baseline.
        busy: a remark on the last race beside other programs; empty if the machine was quiet.
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
    busy: str = ""
    _raced: dict[str, Timing] = field(default_factory=dict)
    _spent_s: float = 0.0
    _is_short_of_memory: bool = False
    _race_deadline: Deadline = field(default_factory=Deadline)

    def __post_init__(self) -> None:
        self.pool = ProgramPool(self.task)

    def run(self) -> str:
        """Returns the name of the proven plan that finishes this run first; the baseline's if none is proven."""
        with closing(self.pool):
            try:
                with self.deadline.enforce("the search", reserve_s=-GRACE_S):
                    return self._run()
            except TimeOverError as over:
                return self._stop_searching(over.given)

    def _run(self) -> str:
        if not self.facts.exact:
            return self._stop_searching(self.facts.inexact[0] if self.facts.inexact else _OWN_ORDER)
        if self.time_limit_s is None and is_run_too_short(self.facts.steps):
            return self._stop_searching(why_not_searched(self.facts.steps))
        (step_s, copying_s), device = self._time_baseline(), self.baseline.device
        budget = Budget.of(step_s, self.facts.steps, self.time_limit_s, device, self.deadline, copying_s)
        self.say(self.busy or budget.forecast())
        if self.time_limit_s is None and (budget.is_too_small or is_run_too_short(self.facts.steps)):
            self._race([], _ESTIMATE_S)
            return self._stop_searching(why_not_searched(self.facts.steps, budget))
        if why := missing_memory([self.pool.get_program(BASELINE, self.baseline)]):
            return self._stop_searching(f"{why}, so no plan could be proven equal and none was raced")
        if not self.deadline.has_time_for(least_s := budget.min_race_s() + budget.proof_s):
            fix = "" if self.time_limit_s is None else f": use --time-limit {self.time_limit_s + least_s:.0f}s or more"
            return self._stop_searching(f"a race and a proof take about {least_s:.0f} s, and {self.deadline}{fix}")
        self._race_all(budget)
        winner = self._prove_fastest(budget)
        self._say_if_too_short()
        return winner

    def _race_all(self, budget: Budget) -> None:
        """Races plans until the deadline, and leaves time for a proof."""
        reserve_s = 1.5 * budget.proof_s  # the plan is lowered again
        self._race_deadline = replace(self.deadline, at=self.deadline.at - reserve_s - 0.5)  # to restore the State
        try:
            with self.deadline.enforce("racing", reserve_s=reserve_s):
                self._race_compiled(self._race_eager(budget), budget)
        except TimeOverError as over:
            self._stop_searching(over.given)
            self.pool.release(list(self.pool.programs))  # interrupted within a window

    def _stop_searching(self, why: str) -> str:
        """Notes why the search ends with the baseline."""
        self.notes.append(why)
        self.timings.setdefault(BASELINE, Timing(name=BASELINE, plan=self.baseline.model_dump()))
        return BASELINE

    def _time_baseline(self) -> tuple[float, float]:
        """Returns the seconds of the baseline's step, and of copying its State out and back."""
        program = self.pool.get_program(BASELINE, self.baseline)
        wait_until_quiet(_WAIT_SHARE * self.deadline.left_s)
        load = LoadMeter()
        try:
            with preserve_generators(*program.devices):
                found = Runner(program).quick_estimate(_ESTIMATE_S)
            self.busy = load.busy()
            return found
        except Exception as error:
            raise explain_error(error, program, None) from error

    @property
    def has_results(self) -> bool:
        """Whether any plan except the baseline has a result."""
        rivals = [timing for timing in self.timings.values() if timing.name != BASELINE]
        return any(one.verdict is not None or one.failure is not None or one.behind for one in rivals)

    @property
    def left_open(self) -> bool:
        """Whether the plan of the rules is undecided: neither excluded by a result nor proven."""
        if self.rules is None or self.rules == self.baseline:
            return not self.has_results
        timing = self.timings.get(self.rules.brief())
        if timing is None or timing.failure is not None:
            return timing is None and self.rules.brief() not in self.failed
        return timing.parity is None and not timing.behind and (timing.verdict is None or (timing.ratio or 0.0) > 1)

    def _say_if_too_short(self) -> None:
        """Notes that the search found no significant difference between a plan and the baseline."""
        alone = len(self.timings) == 1 and self.time_limit_s is None and not self.deadline.is_met
        if alone or self.has_results or self._is_short_of_memory:
            return
        short, more = "too little was measured", "a --time-limit gives more time"
        if self.time_limit_s is not None:
            short, more = f"a time limit of {self.time_limit_s:g} s is too short", "give it more"
        elif self.deadline.is_met:
            short, more = f"{self.deadline}, too little", "a later stop gives more"
        self.notes.append(f"{short} to compare any plan with the baseline; {more}")

    def _race_eager(self, budget: Budget) -> Plan:
        """Races single changes without a compiler, and the good ones combined; returns the best plan."""
        changes = not_fixed(eager_changes(self.facts, self.hardware, self.base, torch.get_num_threads()), self.fixed)
        changes = self._affordable(likely(changes, self.rules) if budget.is_tight else changes, budget)
        start = [] if self.base == self.baseline else [self.base]
        singles = [self.base.with_axes(**change) for change in changes]
        rules = [] if self.rules is None or self.rules in (self.base, *singles) else [self.rules]
        plans = self._plans_in_time([*start, *rules, *singles], budget)
        self._race(plans, budget.race_s(1 / 2, len(plans)), each_axis=True)
        found = [self.timings.get(plan.brief()) for plan in singles]
        own = self.timings.get(self.base.brief()) if start else None
        if own is not None and own.failure is not None:
            raise PlanError(f"{self.base.brief()}, as you set it, can't be run: {own.failure}")
        sure = [plan for plan in rules if self._is_surely_faster(plan)]
        best = combine_changes(changes, found, own)
        if not best and not sure:
            return self._race_best_again([*rules, *singles], budget)
        alone = [self.base.with_axes(**{axis: value}) for axis, value in best.items()]
        together = self.base.with_axes(**best)
        if len(best) > 1 and self._is_combination_promising(alone, [*alone, *sure], budget):
            self._race([together], budget.race_s(1 / 4, 1, self._spent_s))
        return max([self.base, together, *alone, *sure], key=self._ratio)  # the combination may be slower, or fail

    def _affordable(self, changes: list[AxisChange], budget: Budget) -> list[AxisChange]:
        """Returns the changes that are worth their startup: with a compiling plan, each change is compiled."""
        compiled = self.base.compile
        if compiled in ("step", "package"):
            changes = [
                change for change in changes if "optimizer" not in change
            ]  # the compiler generates the update itself
        return changes if compiled == "none" else changes[: budget.max_starts(estimate_compile_s(0, compiled))]

    def _plans_in_time(self, plans: list[Plan], budget: Budget) -> list[Plan]:
        """Returns the plans that the first race has time for; the last plans are the least promising."""
        able = budget.max_first_plans(len(plans))
        if 0 < able < len(plans):
            names = ", ".join(plan.brief() for plan in plans[able:])
            self.notes.append(f"not raced, since there is time for {able} of {len(plans)} plans: {names}")
        return plans[:able]

    def _is_surely_faster(self, plan: Plan) -> bool:
        return getattr(self.timings.get(plan.brief()), "verdict", None) == "faster"

    def _is_combination_promising(self, parts: Sequence[Plan], raced: Sequence[Plan], budget: Budget) -> bool:
        """Whether the combination should save more than its race costs."""
        best = max(map(self._ratio, raced))
        more = math.prod(map(self._ratio, parts)) / best
        return budget.is_set_by_user or budget.after(best).saves_s(more) > budget.min_race_s()

    def _ratio(self, plan: Plan) -> float:
        return getattr(self.timings.get(plan.brief()), "ratio", None) or 0.0

    def _race_best_again(self, plans: Sequence[Plan], budget: Budget) -> Plan:
        """Races the most promising undecided plan again if it should save more than the race costs."""
        ahead = [plan for plan in plans if self._ratio(plan) > self._ratio(self.base)]
        one = most_promising(ahead, [self.timings.get(plan.brief()) for plan in ahead])
        if one is None:
            return self.base
        (plan, timing), seconds = one, budget.race_s(1 / 4, 1, self._spent_s)
        if budget.saves_s(timing.ratio or 1.0) < _RERACE_FACTOR * seconds:
            return self.base
        self._race([plan], seconds, again=True)
        return max([plan, self.base], key=self._ratio) if self._is_surely_faster(plan) else self.base

    def _race_compiled(self, plan: Plan, budget: Budget) -> None:
        """Races the best plan compiled, if the compilation pays in this run."""
        changes = not_fixed(compiled_changes(self.facts, self.hardware, plan), self.fixed)
        if not changes:
            return
        written = plan.with_axes(optimizer=self.base.optimizer)  # the compiler generates the update itself
        ways = self._rate_compilations([written.with_axes(**change) for change in changes], plan, budget)
        began = time.perf_counter()
        for number, (way, payoff) in enumerate(ways.items()):
            lost_s = time.perf_counter() - began  # on compilations that failed
            if why := self._why_too_late(payoff, lost_s, budget):
                if self.has_results or self.time_limit_s is None:
                    self.notes.append(f"no {'other ' if number else ''}compilation was tried: {why}")
                return
            if self._race_candidate(way, payoff, lost_s, budget):
                return

    def _rate_compilations(self, ways: Sequence[Plan], plan: Plan, budget: Budget) -> dict[Plan, Payoff]:
        """Estimates for each way to compile `plan` what it saves in this run."""
        base = self.timings[BASELINE]
        timing = self.timings.get(plan.brief(), base)
        assert timing.step_ms is not None and base.step_ms is not None
        rest = budget.after(base.step_ms / timing.step_ms)
        proof_s = budget.proof_s if plan == self.base else 0.0  # any other is proven anyway
        told = not self.facts.recurrent or any(way.compile == "none" for way in ways)
        made, step_s = self._profile_step(timing.name, plan) if told else None, timing.step_ms / 1e3
        often = recheck_count(has_user_callbacks(self.task.callbacks), self.facts.steps, self.facts.batches)
        return rate_candidates(
            ways,
            made,
            step_s,
            self.facts.steps,
            rest,
            recurrent=self.facts.recurrent,
            proof_s=proof_s,
            checks=often,
        )

    def _why_too_late(self, payoff: Payoff, lost_s: float, budget: Budget) -> str:
        """Returns why no compilation is tried; empty if one is."""
        if self.time_limit_s is None and payoff.saves_s < (costs_s := lost_s + payoff.costs_s):
            return f"it would win about {payoff.saves_s:.0f} s of this run, and takes about {costs_s:.0f} s"
        if not self.deadline.has_time_for(payoff.compile_s + budget.full_race_s() + budget.proof_s):
            return f"it takes about {payoff.compile_s:.0f} s, and {self.deadline}"
        if budget.race_s(1 / 8, 1, self._spent_s) == 0:
            return "the rest of the time limit is too short to measure it"
        return ""

    def _race_candidate(self, way: Plan, payoff: Payoff, lost_s: float, budget: Budget) -> bool:
        """Races a compiled plan and its variants; False if none can be run."""
        plans = compiled_variants(way, self.facts, self.hardware, self.base, self.fixed, payoff.has_pooling)
        left_s = payoff.faster_run_s + lost_s
        if not self._is_variant_worthwhile(payoff, left_s):
            for plan in plans:  # missing rewrites show before the compilation
                self._race([plan], budget.race_s(1 / 4))
                if not self._has_failed(plan):
                    return True
            return False
        while len(plans) > 2 and not self._is_variant_worthwhile(payoff, left_s, len(plans) - 1):
            plans.pop(-2)  # the most promising and the unchanged plan stay
        seconds = budget.race_s(1 / 8, len(plans), self._spent_s)
        raced = self._race(plans, seconds) if seconds else self._race([way], budget.race_s(1 / 8, 1, self._spent_s))
        best = max([self.base, *plans], key=self._ratio)
        if self._is_variant_worthwhile(payoff, budget.after(self._ratio(best) or 1.0).run_s):
            self._race_on_one_thread(raced, budget)
        return not all(map(self._has_failed, plans))

    def _is_variant_worthwhile(self, payoff: Payoff, run_s: float | None, more: int = 1) -> bool:
        """Whether `more` compilations should save their time in a compiled run of `run_s`."""
        pays = self.time_limit_s is not None or run_s is None or VARIANT_GAIN * run_s > more * payoff.compile_s
        return pays and self.deadline.has_time_for(payoff.costs_s + (more - 1) * payoff.compile_s)

    def _has_failed(self, plan: Plan) -> bool:
        timing = self.timings.get(plan.brief())
        return plan.brief() in self.failed or (timing is not None and timing.failure is not None)

    def _profile_step(self, name: str, plan: Plan) -> StepProfile | None:
        """Profiles the plan's step; None if that fails, since the plan itself has run."""
        try:
            program = self.pool.get_program(name, plan)
            with preserve_generators(*program.devices), closing(program):  # frees what it stores for steps
                return profile_step(program)
        except Exception:
            return None

    def _race_on_one_thread(self, raced: Sequence[Timing | None], budget: Budget) -> None:
        """Races the best compiled plan on one thread if its step is short."""
        able = [timing for timing in raced if timing is not None and timing.step_ms is not None]
        best = min(able, key=lambda timing: timing.step_ms or 0.0, default=None)
        alone = self.timings.get(self.base.with_axes(threads=1).brief())
        if best is None or (best.step_ms or 0.0) > _SHORT_STEP_MS or (alone is not None and alone.behind):
            return
        changes = not_fixed(thread_changes(self.facts, self.hardware, best.as_plan), self.fixed)
        plans = [best.as_plan.with_axes(**change) for change in changes]
        self._race(plans, budget.race_s(1 / 8, len(plans), self._spent_s))

    def _race(
        self, plans: Sequence[Plan], seconds: float, *, again: bool = False, each_axis: bool = False
    ) -> list[Timing | None]:
        """Races plans against the baseline.

        Args:
            seconds: 0 races nothing.
            again: race also plans with a result.
            each_axis: whether plans of different axes will be combined, so that none excludes another.
        """
        named = self._plans_to_race(plans, again) if seconds > 0 else {}
        parts = self._groups_in_memory(named) if named else []
        if not parts and BASELINE not in self.timings:
            self._measure({}, _ESTIMATE_S, each_axis)
        for part in parts:
            self._measure(part, seconds * (len(part) + 1) / (len(named) + len(parts)), each_axis)
            if len(parts) > 1:
                self.pool.release(part)
        self._spent_s += 0.0 if all(map(self._has_failed, named.values())) else seconds
        return [self.timings.get(plan.brief()) for plan in plans]

    def _plans_to_race(self, plans: Sequence[Plan], again: bool) -> dict[str, Plan]:
        named = {plan.brief(): plan for plan in plans if again or plan.brief() not in self.timings}
        failed = self.failed.keys() - {self.base.brief()}  # a plan that the user sets reports its failure each time
        for name in named.keys() & failed:
            self.notes.append(
                f"{name} was not tried, since this plan failed in an earlier search ({self.failed[name]}); hotloop race runs the plan again"
            )
        return {name: plan for name, plan in named.items() if name not in failed}

    def _groups_in_memory(self, named: Mapping[str, Plan]) -> list[dict[str, Plan]]:
        """Splits the plans into groups that fit into memory with the baseline."""
        new = [name for name in named if name not in self.pool.programs]
        room = max_programs_in_memory(self.facts, self.baseline.device) if new else len(named)
        if room < len(new):
            self.pool.release([name for name in self.pool.programs if name != BASELINE])
            room = max_programs_in_memory(self.facts, self.baseline.device)
        if room < 1:
            self._is_short_of_memory = True
            self.notes.append(f"not raced, since there is no memory for them beside the baseline: {', '.join(named)}")
            return []
        names, count = list(named), -(-len(named) // room)  # as few groups as possible, of similar size
        return [{name: named[name] for name in names[number::count]} for number in range(count)]

    def _measure(self, named: Mapping[str, Plan], seconds: float, each_axis: bool) -> None:
        entrants = [
            Contender(name, partial(self.pool.get_program, name, plan), plan, race_group(plan, self.base, each_axis))
            for name, plan in {BASELINE: self.baseline, **named}.items()
        ]
        steps, limits = self.facts.steps, dict[str, Any](time_limit_s=seconds, deadline=self._race_deadline)
        found = measure(entrants, BASELINE, steps=steps, brief=True, progress=self.progress, **limits)
        self.busy = found.busy or self.busy
        self._raced |= add_startup_cost(found.plans, BASELINE, self.pool.starts, steps)
        self.timings = rebase_timings(self._raced, BASELINE, steps)

    def _prove_fastest(self, budget: Budget) -> str:
        """Returns the first plan, best first, that finishes before the baseline and whose proof pays and succeeds.

        All proofs together take less than the plan saves.
        """
        self.pool.release([one.name for one in self.timings.values() if one.verdict != "faster"])
        base, steps, accepted = self.timings[BASELINE], self.facts.steps, accepted_parities(self.base)
        waiting, judged, spent_s = self._faster_timings(budget), list[Timing](), 0.0
        while waiting:
            timing = waiting.pop(0)
            saves_s = math.inf if steps is None else timing.saves_s(base, steps)
            if why := self._why_proof_fails(timing, judged):
                parity = Parity(plan=timing.name, parity="unproven", reason=why, states=0)
            elif why := budget.why_no_proof(saves_s, spent_s):
                self.notes.append(f"{timing.name} was not proven: {why}")
                continue
            else:
                began, parity = time.perf_counter(), self._prove(timing, budget, bool(waiting))
                spent_s += time.perf_counter() - began
            judged.append(timing.proven(parity))
            self.timings[timing.name] = judged[-1]
            if parity.parity in accepted:
                return timing.name
        return BASELINE

    def _why_proof_fails(self, timing: Timing, judged: Sequence[Timing]) -> str:
        """Returns why a proof would fail: a plan with a part of the changes wasn't proven; empty otherwise."""
        changes = self._changes(timing)
        failed = (one for one in judged if not one.short_of_memory and self._changes(one).items() <= changes.items())
        part = next(failed, None)
        return "" if part is None else f"it has {part.name}, which is {part.parity}"

    def _changes(self, timing: Timing) -> dict[str, object]:
        axes = timing.as_plan.model_dump()
        return {axis: value for axis, value in axes.items() if value != getattr(self.baseline, axis)}

    def _prove(self, timing: Timing, budget: Budget, others: bool) -> Parity:
        """Returns the parity, `unproven` if the proof fails; leaves time for a proof of `others`."""
        self.progress(f"proving {timing.name}", 0.0)
        deadline, proof_s = budget.deadline, budget.proof_s
        reserve_s = 1.2 * proof_s if others and deadline.left_s > 2.4 * proof_s else 0.0
        try:
            with deadline.enforce("its proof", reserve_s=reserve_s):
                return self.prove([self.pool.get_program(timing.name, timing.as_plan)])[0]
        except Exception as error:
            reason, passing = error_summary(error)
            if is_out_of_memory(error):
                reason = f"there was no memory left for a proof ({reason})"
        return Parity(plan=timing.name, parity="unproven", reason=reason, states=0, short_of_memory=passing)

    def _faster_timings(self, budget: Budget) -> list[Timing]:
        """Returns plans that finish a run with cached compilation before the baseline, fastest first."""
        in_time = replace(self.deadline, at=self.deadline.at - budget.proof_s)
        for timing in self.timings.values():
            if timing.verdict == "faster" and timing.compile_s and in_time.has_time_for(timing.compile_s):
                again_s = self.pool.recompile_s(timing.name, timing.as_plan, in_time)
                self.timings[timing.name] = timing.model_copy(update={"compile_warm_s": again_s})
        base, steps = self.timings[BASELINE], self.facts.steps
        faster = [one for one in self.timings.values() if one.verdict == "faster" and one.saves_s(base, steps) > 0]
        return sorted(faster, key=lambda one: one.saves_s(base, steps), reverse=True)
