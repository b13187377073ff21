"""The search for the fastest plan that is proven equal: race single changes, put the good ones together, prove."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hotloop.errors import PlanError
from hotloop.hardware import Hardware
from hotloop.lowering import Program, lower
from hotloop.measuring import Entrant, measure
from hotloop.measuring.runner import Runner
from hotloop.plan import Plan
from hotloop.records import TaskFacts
from hotloop.rng import preserved
from hotloop.task import Task
from hotloop.tuning.bounds import compiling_gains, makeup
from hotloop.tuning.budget import COLD_COMPILE_S, REALISED, Budget
from hotloop.tuning.candidates import (
    Change,
    combined,
    compiled_changes,
    eager_changes,
    promising,
    rewriting_changes,
    thread_changes,
    without,
)
from hotloop.verdicts import TRUSTED, Parity, Timing

BASELINE = "baseline"

_PROVING_STEPS = 250
"""Steps whose time a proof takes, comparisons included, if a plan passes beside the plain baseline at once."""

_GLANCE_S = 0.2
"""For a first idea of the baseline's step, and for a baseline that nothing is raced against."""

_SHORT_MS = 5.0
"""A step's, for which threads may cost more than they save."""

_DOUBT = 2
"""Times what a race costs: so much must be hoped for to hold it again."""

_PROVED = 2
"""Plans at most that a proof is tried for."""

Progress = Callable[[str, float], None]
Prove = Callable[[Sequence[Program]], list[Parity]]


@dataclass
class Search:
    """One search for one Task on one device.

    Attributes:
        baseline: eager fp32 on the device; `base` is it with the axes that the user set.
        fixed: those axes, which stay. With a precision among them, a plan that has it is accepted for what it is.
        failed: plans by name that failed in an earlier race, and why; they aren't tried again.
        timings: of each plan raced, by name, from its last race.
        notes: what was decided on the way, and why.
    """

    task: Task
    baseline: Plan
    base: Plan
    fixed: Collection[str]
    facts: TaskFacts
    hardware: Hardware
    prove: Prove
    time_limit_s: float | None = None
    progress: Progress = lambda doing, share: None
    failed: Mapping[str, str] = field(default_factory=dict)
    timings: dict[str, Timing] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _programs: dict[str, Program] = field(default_factory=dict)
    _starts: dict[str, tuple[float, float]] = field(default_factory=dict)

    def run(self) -> str:
        """The name of the plan that finishes this run first and is proven equal: the baseline, if none is."""
        try:
            return self._run()
        finally:
            for program in self._programs.values():
                program.close()

    def _run(self) -> str:
        program = self._lowered(BASELINE, self.baseline)
        with preserved(*program.devices):
            step_s = Runner(program).warm_up(_GLANCE_S)[1]
        budget = Budget.of(step_s, self.facts.steps, self.time_limit_s)
        if budget.too_small:
            self._race([], _GLANCE_S)
            self.notes.append(
                f"the whole run takes {budget.run_s:.0f} s under the baseline, so looking for a better plan doesn't pay;"
                " a --time-limit looks for one all the same"
            )
            return BASELINE
        if budget.hopeless(_PROVING_STEPS * step_s):
            self._race([], _GLANCE_S)
            self.notes.append(
                f"a proof takes as long as about {_PROVING_STEPS} steps, and the whole run has {self.facts.steps}, so looking"
                " for a better plan doesn't pay; a --time-limit looks for one all the same"
            )
            return BASELINE
        plan = self._eagerly(budget)
        self._compiled(plan, budget)
        winner = self._proven(budget, step_s)
        self._say_if_too_short()
        return winner

    def _say_if_too_short(self) -> None:
        rivals = [timing for timing in self.timings.values() if timing.name != BASELINE and timing.failure is None]
        if self.time_limit_s is not None and rivals and all(timing.verdict is None for timing in rivals):
            self.notes.append(
                f"a time limit of {self.time_limit_s:g} s is too short to tell any plan from the baseline; give it more"
            )

    def _eagerly(self, budget: Budget) -> Plan:
        """Races single changes that need no compiler, and what is good of them together; the best plan without one."""
        changes = without(eager_changes(self.facts, self.hardware, self.base, torch.get_num_threads()), self.fixed)
        start = [] if self.base == self.baseline else [self.base]
        found = self._race([*start, *(self.base.with_axes(**change) for change in changes)], budget.race_s(1 / 2))
        if start and (own := found[0]) is not None and own.failure is not None:
            raise PlanError(f"{self.base.brief()}, as you set it, can't be run: {own.failure}")
        best = combined(changes, found[len(start) :]) or self._second_look(changes, found[len(start) :], budget)
        plan = self.base.with_axes(**best)
        if len(best) > 1:
            self._race([plan], budget.race_s(1 / 4))
            alone = [self.base.with_axes(**{axis: value}) for axis, value in best.items()]
            plan = max([plan, *alone], key=self._ratio)  # they may be slower together, or not run at all
        return plan

    def _ratio(self, plan: Plan) -> float:
        timing = self.timings.get(plan.brief())
        return 0.0 if timing is None else timing.ratio or 0.0

    def _second_look(self, changes: Sequence[Change], found: Sequence[Timing | None], budget: Budget) -> Change:
        """Races the change that seemed best once more, if all were left undecided and it would win more than that costs."""
        one = promising(changes, found)
        if one is None:
            return {}
        (change, timing), seconds = one, budget.race_s(1 / 4)
        if budget.wins_s(timing.ratio or 1.0) < _DOUBT * seconds:
            return {}
        return combined([change], self._race([self.base.with_axes(**change)], seconds, again=True))

    def _compiled(self, plan: Plan, budget: Budget) -> None:
        """Races the best plan compiled, if this run is long enough to win back the compilation."""
        changes = without(compiled_changes(self.facts, self.hardware, plan), self.fixed)
        if not changes:
            return
        base = self.timings[BASELINE]
        timing = self.timings.get(plan.brief(), base)
        assert timing.step_ms is not None and base.step_ms is not None
        gains = compiling_gains(makeup(self._lowered(timing.name, plan)), timing.step_ms / 1e3)
        won = REALISED * budget.after(base.step_ms / timing.step_ms).wins_s(gains)
        if self.time_limit_s is None and won < COLD_COMPILE_S:
            self.notes.append(
                f"no compilation was tried: it would win about {won:.0f} s of this run, and takes about"
                f" {COLD_COMPILE_S:.0f} s"
            )
            return
        # A compiler writes the update its own way.
        compiled = plan.with_axes(**changes[0], optimizer=self.base.optimizer)
        rewritten = self._rewritten(compiled)
        if self.time_limit_s is not None or won >= 2 * COLD_COMPILE_S:
            raced = self._race([compiled, *rewritten], budget.race_s(1 / 8))
            self._on_one_thread(raced, won, budget)
        elif not self._ran(rewritten, budget):  # there is time for one; that nothing can be rewritten shows before it
            self._race([compiled], budget.race_s(1 / 4))

    def _on_one_thread(self, raced: Sequence[Timing | None], won: float, budget: Budget) -> None:
        """Races the best compiled plan on one thread too, where its step is too short to share and there is time for it."""
        able = [timing for timing in raced if timing is not None and timing.step_ms is not None]
        best = min(able, key=lambda timing: timing.step_ms or 0.0, default=None)
        if best is None or (best.step_ms or 0.0) > _SHORT_MS or won < 3 * COLD_COMPILE_S:
            return
        changes = without(thread_changes(self.facts, self.hardware, Plan(**best.plan)), self.fixed)
        self._race([Plan(**best.plan).with_axes(**change) for change in changes], budget.race_s(1 / 8))

    def _ran(self, plans: Sequence[Plan], budget: Budget) -> bool:
        """Races them if there are any, and says whether one of them could be run."""
        timings = self._race(plans, budget.race_s(1 / 4)) if plans else []
        return any(timing is not None and timing.failure is None for timing in timings)

    def _rewritten(self, compiled: Plan) -> list[Plan]:
        """The compiled plan with its step rewritten; rewrites know the usual order of dimensions."""
        compiled = compiled.with_axes(layout=self.base.layout)
        changes = without(rewriting_changes(self.facts, self.hardware, compiled), self.fixed)
        return [compiled.with_axes(**change) for change in changes]

    def _race(self, plans: Sequence[Plan], seconds: float, *, again: bool = False) -> list[Timing | None]:
        """Races plans against the baseline, those that were raced before only if asked to; they keep their costs of starting."""
        plans_named = {plan.brief(): plan for plan in plans if again or plan.brief() not in self.timings}
        for name in plans_named.keys() & self.failed.keys():
            self.notes.append(
                f"{name} was not tried: it failed before ({self.failed[name]}); hotloop race tries it again"
            )
        named = {name: plan for name, plan in plans_named.items() if name not in self.failed}
        entrants = [
            self._entrant(BASELINE, self.baseline),
            *(self._entrant(name, plan) for name, plan in named.items()),
        ]
        if len(entrants) == 1 and BASELINE in self.timings:
            return [self.timings.get(plan.brief()) for plan in plans]
        steps = self.facts.steps
        found = measure(entrants, BASELINE, steps=steps, time_limit_s=seconds, brief=True, progress=self.progress)
        for timing in found.plans:
            self.timings[timing.name] = self._with_start(timing)
        return [self.timings.get(plan.brief()) for plan in plans]

    def _entrant(self, name: str, plan: Plan) -> Entrant:
        return Entrant(name, lambda: self._lowered(name, plan), plan)

    def _lowered(self, name: str, plan: Plan) -> Program:
        if name not in self._programs:
            began = time.perf_counter()
            program = self._programs[name] = lower(self.task, plan)
            self._starts[name] = (time.perf_counter() - began - program.compile_s, program.compile_s)
        return self._programs[name]

    def _with_start(self, timing: Timing) -> Timing:
        """A Program is used in several races, and costs its start in the first alone."""
        if timing.step_ms is None:
            return timing
        startup_s, compile_s = self._starts[timing.name]
        startup_s = max(startup_s, timing.startup_s or 0.0)
        steps = self.facts.steps
        run_s = None if steps is None else startup_s + compile_s + steps * timing.step_ms / 1e3
        return timing.model_copy(update={"startup_s": startup_s, "compile_s": compile_s, "run_s": run_s})

    def _proven(self, budget: Budget, step_s: float) -> str:
        """The first of the plans that finish earlier than the baseline, best first, whose proof succeeds."""
        self._on_one_clock()
        for timing in self._faster()[:_PROVED]:
            assert timing.ratio is not None
            costs = _PROVING_STEPS * step_s
            if self.time_limit_s is None and budget.wins_s(timing.ratio) < costs:
                self.notes.append(f"{timing.name} was not proven: that takes about {costs:.0f} s, more than it wins")
                continue
            self.progress(f"proving {timing.name}", 0.0)
            parity = self._parity(timing.name)
            found = timing.model_copy(update={"parity": parity.parity, "parity_reason": parity.reason})
            self.timings[timing.name] = found
            if parity.parity in self._accepted:
                return timing.name
        return BASELINE

    def _on_one_clock(self) -> None:
        """Times of several races, each beside its own baseline, as they would be beside that of the last one."""
        base, steps = self.timings[BASELINE], self.facts.steps
        assert base.step_ms is not None
        for timing in self.timings.values():
            if timing.step_ms and timing.ratio and timing.name != BASELINE:
                step_ms = base.step_ms / timing.ratio
                start_s = (timing.startup_s or 0.0) + (timing.compile_s or 0.0)
                changed = {
                    "step_ms": step_ms,
                    "samples_per_s": (timing.samples_per_s or 0.0) * timing.step_ms / step_ms,
                    "run_s": None if steps is None else start_s + steps * step_ms / 1e3,
                }
                self.timings[timing.name] = timing.model_copy(update=changed)

    def _faster(self) -> list[Timing]:
        """Those that finish this run before the baseline, the first of them first.

        What was compiled here is kept, so the run that follows doesn't pay for it once more.
        """
        for timing in self.timings.values():
            if timing.verdict == "faster" and timing.compile_s:
                self.timings[timing.name] = timing.model_copy(update={"compile_warm_s": self._compiled_again(timing)})
        finishes = {one.name: one.finishes(self.facts.steps) for one in self.timings.values() if one.step_ms}
        faster = [one for one in self.timings.values() if one.verdict == "faster"]
        able = [one for one in faster if finishes[one.name] < finishes[BASELINE]]
        return sorted(able, key=lambda one: finishes[one.name])

    def _compiled_again(self, timing: Timing) -> float:
        program = lower(self.task, Plan(**timing.plan))
        program.close()
        return program.compile_s

    @property
    def _accepted(self) -> tuple[str, ...]:
        return (*TRUSTED, "reduced-precision") if "precision" in self.fixed else TRUSTED

    def _parity(self, name: str) -> Parity:
        program = self._programs[name]
        try:
            return self.prove([program])[0]
        except PlanError as error:
            return Parity(plan=name, parity="unproven", reason=error.given, states=0)
