"""The search of `auto` in a long run: races compiled plans against the eager plan, and proves the fastest."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from hotloop.core.hardware.machine import machine_name, speed_versions
from hotloop.core.hardware.machine_load import LoadMeter, wait_until_quiet
from hotloop.core.random.rng import preserve_generators
from hotloop.core.records.race import Parity, Timing, Verdict
from hotloop.errors import PlanError, error_summary
from hotloop.lowering.build import lower
from hotloop.lowering.program import Program
from hotloop.parity.proof import missing_memory, prove_programs
from hotloop.plan import Plan
from hotloop.task import Task
from hotloop.tuning.races.measure import Contender, measure
from hotloop.tuning.races.runner import Runner
from hotloop.tuning.races.starts import add_startup_cost
from hotloop.tuning.run_context import RunContext
from hotloop.tuning.search.budget import Budget, estimate_proof_s, saved_steps
from hotloop.tuning.search.payoff import RaceHistory, accepted_parities
from hotloop.tuning.search.program_pool import MAX_COMPILE_S, ProgramPool, max_programs_in_memory

_ESTIMATE_S = 0.2
"""Seconds of the first estimate of the baseline's step."""

_RACING_SHARE = 1 / 2
"""Share of a search's racing time."""


@dataclass
class AutoSearch:
    """Compiled plans beside the eager one, of a Task on one device.

    Attributes:
        eager: the plan without a compilation; if slower than the baseline, `last`, the baseline with the user's axes.
        memory: saves what was found until Ctrl-C ended the search.
        compile_limit_s: seconds that compiling a plan may take.
    """

    context: RunContext
    eager: Plan
    last: Plan
    memory: RaceHistory
    compile_limit_s: float = MAX_COMPILE_S
    _timings: dict[str, Timing] = field(default_factory=dict)
    _copying_s: float = 0.0
    _busy: str = ""

    def __post_init__(self) -> None:
        assert self.context.facts is not None
        self.task, self.facts, self.say = self.context.task, self.context.facts, self.context.say
        self._pool = ProgramPool(self.task, self._lower_and_report, compile_limit_s=self.compile_limit_s)

    def run(self, ways: Sequence[Plan], most: int, instead: Sequence[Plan] = ()) -> Verdict | None:
        """Races up to `most` compiled plans and a recorded plan; the winner is the fallback plan, or faster and proven.

        Failed compilations are in the Verdict, too. None if the race failed or lacked memory.

        Args:
            instead: plans of which one is compiled if no way can be, whatever the memory.
        """
        began = time.monotonic()
        try:
            winner = self._find_winner(ways, most, instead)
        except Exception as error:  # training explains errors of the Task
            self.say(f"auto goes on eagerly: its plans couldn't be raced ({error_summary(error)[0]})")
            return None
        except KeyboardInterrupt:
            if self.baseline.brief() in self._timings:
                self.memory.save_verdict(self._make_verdict(self.fallback_plan, time.monotonic() - began))
            raise
        finally:
            self._pool.release(list(self._pool.programs))
        return (
            None if self.baseline.brief() not in self._timings else self._make_verdict(winner, time.monotonic() - began)
        )

    @property
    def baseline(self) -> Plan:
        return Plan(device=self.eager.device, workers=self.eager.workers)

    @property
    def fallback_plan(self) -> Plan:
        """The plan to train with if no compiled plan wins."""
        timing = self._timings.get(self.eager.brief())
        slower = timing is not None and timing.behind
        return self.last if slower and self.last == self.baseline else self.eager  # axes that the user sets stay

    def _find_winner(self, ways: Sequence[Plan], most: int, instead: Sequence[Plan]) -> Plan:
        others = list(dict.fromkeys([self.baseline, self.eager]))
        gc.collect()  # the Program that was timed before
        room = max_programs_in_memory(self.facts, self.eager.device) - len(others)
        if room < 1:
            self.say("auto goes on eagerly: there is no memory for a compiled plan beside the eager one")
            return self.eager
        step_s = self._time_baseline()
        if why := missing_memory([self._lower(self.baseline)]):
            self.say(f"auto goes on eagerly: nothing compiled could be proven, since {why}")
            return self.eager
        compiled = [way for way in ways if way.compile != "none"]
        ready = self._lower_compiled(compiled, min(most, room))
        if len(ready) < room:
            ready += self._lower_recorded([way for way in ways if way.compile == "none"])
        if all(way.brief() in self._timings for way in ways):  # all failed
            ready = self._lower_compiled(instead, 1)
        if not ready:
            return self.eager
        names = " and ".join(plan.brief() for plan in ready)
        self.say(f"auto races {names} against the eager plan, and proves the fastest")
        with self.context.reporter.during("racing and proving plans", counted=False):
            self._race(others, ready, step_s)
            return self._prove_fastest(ready)

    def _time_baseline(self) -> float:
        """Returns the seconds of the baseline's step; a lack of memory shows before any compilation."""
        program, name = self._lower(self.baseline), self.baseline.brief()
        wait_until_quiet()
        load = LoadMeter()
        with preserve_generators(*program.devices):
            step_s, self._copying_s = Runner(program).quick_estimate(_ESTIMATE_S)
        self._busy = load.busy()
        program.close()  # stops its loaders during compilations
        self._timings[name] = Timing(name=name, plan=self.baseline.model_dump(), step_ms=1e3 * step_s)
        return step_s

    def _lower_compiled(self, ways: Sequence[Plan], most: int) -> list[Plan]:
        """Returns the first plans that can be lowered; one of each layout before a second of the same."""
        ready, alike = list[Plan](), list[Plan]()
        layouts = {way.layout for way in ways}
        for way in ways:
            if len(layouts) > 1 and any(way.layout == one.layout for one in ready):
                alike.append(way)
            elif len(ready) < most and self._can_be_lowered(way):
                ready.append(way)
        return ready + [way for way in alike[: most - len(ready)] if self._can_be_lowered(way)]

    def _lower_recorded(self, ways: Sequence[Plan]) -> list[Plan]:
        """Returns the first eager step that can be recorded."""
        return next(([way] for way in ways if self._can_be_lowered(way)), [])

    def _can_be_lowered(self, way: Plan) -> bool:
        try:
            self._lower(way)
        except Exception as error:
            why, passing = error_summary(error)
            self._say_skipped(way, why)
            if isinstance(error, PlanError) and not passing:
                self._timings[way.brief()] = Timing(name=way.brief(), plan=way.model_dump(), failure=why)
            return False
        return True

    def _race(self, others: Sequence[Plan], ready: Sequence[Plan], step_s: float) -> None:
        """Races each plan in its own group: a slower plan stays in the race, since the faster may fail its proof."""
        device, steps = torch.device(self.eager.device).type, self.facts.steps
        plans = [*others, *ready]
        seconds = Budget.of(step_s, steps, None, device).race_s(_RACING_SHARE, len(plans) - 1)
        entrants = [Contender(plan.brief(), partial(self._lower, plan), plan, plan.brief()) for plan in plans]
        found = measure(entrants, self.baseline.brief(), steps=steps, time_limit_s=seconds, brief=True)
        self._busy = found.busy or self._busy
        self._timings |= add_startup_cost(found.plans, self.baseline.brief(), self._pool.starts, steps)

    def _prove_fastest(self, ready: Sequence[Plan]) -> Plan:
        """Returns the fastest plan whose proof succeeds, if it is faster than the fallback plan; else that plan."""
        otherwise = self.fallback_plan
        ratio = self._timings[otherwise.brief()].ratio or 1.0
        for plan in sorted(ready, key=lambda one: self._timings[one.brief()].ratio or 0.0, reverse=True):
            timing = self._timings[plan.brief()]
            if timing.failure is not None:
                self._say_skipped(plan, timing.failure)
            elif timing.verdict != "faster" or (timing.ratio or 0.0) <= ratio:
                figures = _describe_speed(timing, ratio)
                self._say_skipped(plan, figures if ratio == 1.0 else f"{figures}, and {otherwise.brief()} {ratio:.2f}")
            elif why := self._why_no_proof(timing, ratio):
                self._say_skipped(plan, why)
            else:
                parity = self._prove(plan)
                self._timings[plan.brief()] = timing.proven(parity)
                if parity.parity in accepted_parities(self.context.wanted.plan):
                    return plan
                self._say_skipped(plan, f"it's {parity.parity}: {parity.reason}")
        if otherwise != self.eager:
            slower = self._timings[self.eager.brief()].ratio or 0.0
            self._say_skipped(self.eager, f"it's {slower:.2f} times as fast as the baseline")
        return otherwise

    def _why_no_proof(self, timing: Timing, ratio: float) -> str:
        """Returns why a proof doesn't pay; empty if it does. `ratio` is the speed of the fallback plan."""
        step_s = (self._timings[self.baseline.brief()].step_ms or 0.0) / 1e3
        steps = (
            None if self.facts.steps is None else self.facts.steps + self.memory.expected_future_steps(self.facts.steps)
        )
        saves_s = saved_steps(steps, timing.gain, ratio) * step_s
        proof_s = estimate_proof_s(step_s, self._copying_s, self.facts.normed)
        if saves_s > proof_s:
            return ""
        looks = " with a check at each epoch whether callbacks change the step" if timing.looking_ms else ""
        return f"it saves {max(0.0, saves_s):.0f} s{looks}, and a proof takes about {proof_s:.0f} s"

    def _prove(self, plan: Plan) -> Parity:
        self._pool.release(self._pool.programs.keys() - {plan.brief()})
        try:
            return prove_programs(self.task, [self._lower(plan)])[0]
        except Exception as error:
            reason, passing = error_summary(error)
            return Parity(plan=plan.brief(), parity="unproven", reason=reason, states=0, short_of_memory=passing)

    def _lower(self, plan: Plan) -> Program:
        return self._pool.get_program(plan.brief(), plan)

    def _lower_and_report(self, task: Task, plan: Plan) -> Program:
        """Lowers a plan; reports compilation alone, since notes of eager plans were reported before."""
        is_reported = plan.compile != "none" or plan.graphs != "none"
        program = lower(task, plan, *((self.say, self.context.reporter.bar) if is_reported else ()))
        program.watched = self.context.has_user_callbacks
        return program

    def _say_skipped(self, plan: Plan, why: str) -> None:
        self.say(f"auto leaves out {plan.brief()}: {why}")

    def _make_verdict(self, winner: Plan, seconds: float) -> Verdict:
        return Verdict(
            task=self.task.name,
            fingerprint=self.facts.fingerprint,
            plans=list(self._timings.values()),
            baseline=self.baseline.brief(),
            winner=winner.brief(),
            steps=self.facts.steps,
            busy=self._busy,
            machine=machine_name(),
            versions=speed_versions(),
            seconds=seconds,
        )


def _describe_speed(timing: Timing, ratio: float) -> str:
    """Returns why a plan isn't taken instead of a plan of speed `ratio`."""
    figures = f"it's {timing.ratio:.2f} times as fast as the baseline"
    if timing.left_out and timing.verdict is None:
        return f"it was left out after {timing.windows} pairs, since {figures}"
    if (timing.ratio or 0.0) <= ratio:
        return figures
    if timing.ratio_low is None:
        return f"{figures}, with too few pairs to be sure ({timing.windows})"
    return f"{figures}, which {timing.windows} pairs don't show ({timing.ratio_low:.2f} to {timing.ratio_high:.2f})"
