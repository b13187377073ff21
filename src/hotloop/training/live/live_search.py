"""The search of `auto` while training goes on: one candidate after the other is compiled, proven and raced."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from hotloop.core.format import format_milliseconds
from hotloop.errors import describe_error
from hotloop.lowering.program import Program
from hotloop.plan import Plan
from hotloop.task import Task
from hotloop.training.live.plan_switcher import PlanSwitcher
from hotloop.training.live.spare_core import BUSY_CORES, SpareCore
from hotloop.tuning.live.candidate_process import CandidateProcess, PreparedPlan
from hotloop.tuning.live.live_payoff import EAGER_GAIN, LATER_GAIN, LivePayoff
from hotloop.tuning.live.spare_time import MAX_LOSS
from hotloop.tuning.live.stored_speed import ProvenPlan
from hotloop.tuning.live.window_race import WindowRace
from hotloop.tuning.races.statistics import MIN_PAIRS

EVENT = "plan_candidate"
"""The journal's event of a candidate that isn't used, or that won."""

_FIRST_S, _FIRST_SPANS = 0.5, 4
"""Least seconds and spans of training before the first candidate: they give the seconds of a step."""

_LAST_S, _LAST_RACE_S = 5.0, 20.0
"""Least seconds that are left in a run for a child, and for a race of a plan that has raced before or with the baseline."""

_RECENT_SPANS = 30
"""Spans whose median is the step's present time."""

_SLOWER = 1.3
"""A step's time over that in its race, from which the race opens again."""

_MIN_REST_S, _REST_FACTOR = 30.0, 2.0
"""Least seconds between two races of the same plans, and the factor from one such pause to the next."""


@dataclass(frozen=True)
class SearchSettings:
    """What a live search may do.

    Attributes:
        candidates: plans to try, best first; eager plans after the compiled ones.
        eager: the plan that needs no compiling.
        accepted: classes of a proof that are enough.
        normed: whether the step normalises over the batch.
        baseline: races last, so that the speed over it can be stored; None if nothing is stored.
        store: stores the race of the plan in use with the baseline; returns a note on failure.
        fewer: the eager plan with one thread fewer, for steps beside a child; None if there is no such plan.
        idle_cores: returns the number of cores without work since the last call.
        why_no_memory: returns why there is no memory for a further Program like this and a proof; empty if there is.
    """

    candidates: tuple[Plan, ...]
    eager: Plan
    accepted: tuple[str, ...]
    normed: bool
    why_no_memory: Callable[[Program], str]
    baseline: Plan | None = None
    store: Callable[[WindowRace, ProvenPlan], list[str]] = lambda race, proven: []
    fewer: Plan | None = None
    idle_cores: Callable[[], float] = lambda: 1.0


class LiveSearch:
    """Chooses the plan of the next span from the spans before.

    Args:
        switcher: of the training.
        tried: plans that the run's journal excludes.
        steps_left: returns the steps until the end of the run, as far as it is known.
    """

    def __init__(
        self,
        switcher: PlanSwitcher,
        task: Task,
        settings: SearchSettings,
        tried: Iterable[str],
        steps_left: Callable[[float], int],
        say: Callable[[str], None],
    ) -> None:
        self._switcher, self._task, self._settings, self._say = switcher, task, settings, say
        excluded = set(tried)
        self._waiting = [plan for plan in settings.candidates if plan.brief() not in excluded]
        self._has_gain = len(self._waiting) < len(settings.candidates)
        self._steps_left = steps_left
        self._child: CandidateProcess | None = None
        self._race: WindowRace | None = None
        self._is_stored = self._is_of_threads = False
        self._watch: _Watch | None = None
        self._recent: deque[float] = deque(maxlen=_RECENT_SPANS)
        self._proven: dict[Plan, ProvenPlan] = {}
        self._trained_s, self._spans = 0.0, 0
        self._spare_core: SpareCore | None = None
        self._switch_s, self._lost_s = 0.0, 0.0

    def before_span(self, steps: int) -> int:
        """Chooses the plan of the next span, and returns its steps, at most `steps`."""
        if self._child is not None and self._left_s < _LAST_S:
            self.close()
            self._use_all_threads()
            self._stop_search("the run ends soon")
        if self._child is not None and (found := self._child.poll()) is not None:
            lost_s, self._child = self._child.spare_time.lost_s, None
            self._lost_s += lost_s
            self._use_all_threads()
            self._finish_child(found, lost_s)
        if self._race is not None and self._race.is_over:
            self._finish_race(self._race)
        if self._race is None and self._child is None:
            self._begin_next()
        if self._child is not None:
            self._share_cores(self._child)
        if self._race is None:
            return steps
        plan, in_use = self._race.next_plan, self._race.plan
        reason = f"a window of the race of {self._race.rival.brief()} with {in_use.brief()}"
        self._switcher.switch(plan, reason, is_window=plan != in_use)
        return self._race.most_steps(steps)

    def after_span(self, steps: int, seconds: float) -> None:
        """Records a span: its steps and seconds."""
        if not steps:
            return
        if self._race is not None:
            self._race.record(steps, seconds)
            return
        self._spans += 1
        self._trained_s += seconds
        if self._spans == 1:
            self._settings.idle_cores()  # the start of a run uses one core
        if self._child is not None:
            self._child.spare_time.record(steps, seconds + self._switch_s)
        else:
            self._recent.append(seconds / steps)

    @property
    def _left_s(self) -> float:
        """Seconds until the end of the run, by the last spans without a child or a race."""
        step_s = statistics.median(self._recent)
        return self._steps_left(step_s) * step_s

    def close(self) -> None:
        """Ends the child."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def _begin_next(self) -> None:
        if self._trained_s < _FIRST_S or self._spans < _FIRST_SPANS or not self._recent:
            return
        step_s = statistics.median(self._recent)
        is_long = self._left_s > _LAST_RACE_S
        if is_long and self._watch is not None and (race := self._watch.race_again(step_s, len(self._recent))):
            self._say(
                f"auto: a step takes {format_milliseconds(1e3 * step_s)} now, more than in the race of its plan, so "
                f"{race.rival.brief()} races again"
            )
            self._begin_race(race)
            return
        if self._switcher.plan.compile != "none":  # an eager plan is slower
            self._waiting = [one for one in self._waiting if one.compile != "none"]
        idle_cores = self._settings.idle_cores() if self._waiting else 0.0
        if self._waiting and idle_cores < BUSY_CORES and self._begin_thread_race(step_s):
            return
        while self._waiting:
            plan = self._waiting[0]
            payoff = self._payoff(plan, step_s, idle_cores)
            if not payoff.is_worthwhile:
                self._skip_alike(plan, str(payoff))
            elif why := self._settings.why_no_memory(self._switcher.loop.program):
                self._stop_search(why)
            else:
                self._start_child(payoff, step_s)
                return
        if is_long:
            self._race_baseline()

    def _payoff(self, plan: Plan, step_s: float, idle_cores: float) -> LivePayoff:
        gain = EAGER_GAIN if plan.compile == "none" else LATER_GAIN if self._has_gain else None
        payoff = LivePayoff(
            self._settings.eager,
            self._steps_left(step_s),
            step_s,
            self._settings.normed,
            plan.rewrites != "none",
            gain,
            is_compiled=plan.compile != "none",
            idle_cores=idle_cores,
        )
        if (spare := self._usable_core) is None:
            return payoff
        budget_s = MAX_LOSS * (self._trained_s + self._left_s) - self._lost_s
        return replace(payoff, idle_cores=1.0, loss=spare.loss, budget_s=max(0.0, budget_s))

    def _begin_thread_race(self, step_s: float) -> bool:
        """Begins the race of the plan in use with the same plan with one thread fewer, once; returns whether it begins."""
        fewer = self._settings.fewer
        if fewer is None or self._switcher.plan != self._settings.eager:
            return False
        if not self._payoff(self._waiting[0], step_s, 1.0).is_worthwhile:
            return False
        self._settings = replace(self._settings, fewer=None)
        if self._settings.why_no_memory(self._switcher.loop.program):
            return False
        return self._begin_race(WindowRace(self._switcher.plan, fewer), is_of_threads=True)

    @property
    def _usable_core(self) -> SpareCore | None:
        """The core that the plan in use can leave to a child; None if it can't."""
        spare = self._spare_core
        return spare if spare is not None and self._switcher.plan in (spare.plan, spare.beside) else None

    def _share_cores(self, child: CandidateProcess) -> None:
        """Takes the next steps with one thread fewer while the child runs, and with all threads while the child is paused."""
        if (spare := self._usable_core) is None:
            return
        began, plan = time.monotonic(), spare.plan if child.spare_time.is_paused else spare.beside
        reason = (
            "all threads while the child is paused" if plan == spare.plan else "one thread fewer while the child runs"
        )
        self._switcher.switch(plan, reason, is_window=plan == spare.beside)
        self._switch_s = time.monotonic() - began

    def _use_all_threads(self) -> None:
        if (spare := self._usable_core) is not None:
            self._switcher.switch(spare.plan, "all threads, since no child runs")

    def _race_baseline(self) -> None:
        """Begins the race that later runs profit from, once."""
        plan, baseline = self._switcher.plan, self._settings.baseline
        if baseline is None or plan not in self._proven:
            return
        self._settings = replace(self._settings, baseline=None)
        self._begin_race(WindowRace(plan, baseline, least_pairs=MIN_PAIRS), is_stored=True)

    def _stop_search(self, why: str) -> None:
        self._say(f"auto tries no further plan: {why}")
        self._waiting.clear()

    def _skip_alike(self, plan: Plan, why: str) -> None:
        """Tries no further compiled plan, or no further plan at all if this one is eager."""
        eager = [one for one in self._waiting if one.compile == "none"]
        if not eager or plan.compile == "none":
            self._stop_search(why)
        else:
            self._say(f"auto compiles no further plan: {why}")
            self._waiting = eager

    def _start_child(self, payoff: LivePayoff, step_s: float) -> None:
        plans = [one for one in self._waiting if (one.compile != "none") == payoff.is_compiled]
        try:
            training = self._switcher.loop.program
            self._child = CandidateProcess(self._task, training, plans, self._settings.accepted, payoff, step_s)
        except OSError as error:  # the system allows no further process
            self._stop_search(f"a child process can't be started: {describe_error(error)}")
            return
        verb = "compiles" if payoff.is_compiled else "proves"
        meanwhile = "" if (spare := self._usable_core) is None else f", which meanwhile uses {spare.beside.brief()}"
        self._say(f"auto {verb} {plans[0].brief() if payoff.gain else 'a plan'} beside the training{meanwhile}")

    def _finish_child(self, found: PreparedPlan, lost_s: float) -> None:
        self._recent.clear()
        self._waiting.remove(found.plan)
        if not found.pays:
            self._skip_alike(found.plan, found.why_not)
        elif found.why_not:
            self._leave_out(found.plan, found.why_not)
        else:
            done = "proven" if found.plan.compile == "none" else "compiled and proven"
            self._say(
                f"auto: {found.plan.brief()} was {done} in {found.seconds:.0f} s, which took {lost_s:.1f} s "
                "from the training, and races in real steps"
            )
            assert found.parity is not None
            if self._begin_race(WindowRace(self._switcher.plan, found.plan), package=found.package):
                alike = {one for one in self._waiting if one.compile != "none" and one.layout == found.plan.layout}
                self._waiting = [one for one in self._waiting if one not in alike]
                load_s = self._switcher.prepare(found.plan).compile_s
                if found.plan.compile != "none":  # a later run with a stored eager plan would compile nothing
                    self._proven[found.plan] = ProvenPlan(found.parity, found.compile_s, load_s, time.monotonic())

    def _begin_race(
        self, race: WindowRace, *, is_stored: bool = False, is_of_threads: bool = False, package: str = ""
    ) -> bool:
        """Begins a race unless the rival can't be lowered; returns whether it begins."""
        try:
            self._switcher.prepare(race.rival, package)
        except Exception as error:  # the plan is left out, and training goes on
            self._leave_out(race.rival, describe_error(error))
            self._watch = None
            return False
        self._race, self._is_stored, self._is_of_threads = race, is_stored, is_of_threads
        return True

    def _finish_race(self, race: WindowRace) -> None:
        self._race = None
        self._recent.clear()
        winner = race.winner
        loser = race.plan if winner == race.rival else race.rival
        speed = race.describe()
        self._switcher.switch(winner, speed)
        fields = {"step": self._switcher.loop.program.position.step, "plan": race.rival.brief(), "reason": speed}
        self._switcher.loop.run.log(EVENT, **fields, used=winner == race.rival)
        self._say(f"auto: {speed}; the training goes on with {winner.brief()}")
        if self._is_of_threads:
            self._finish_thread_race(race)
            return
        self._has_gain = True
        if not self._is_stored or winner == race.rival:
            self._watch = _Watch(winner, loser, race.step_s(winner), self._watch)
        self._switcher.drop(loser)
        if self._is_stored and winner == race.plan:
            for note in self._settings.store(race, self._proven[winner]):
                self._say(note)

    def _finish_thread_race(self, race: WindowRace) -> None:
        if race.winner == race.rival:
            self._switcher.drop(race.plan)
        else:
            self._spare_core = SpareCore.from_race(race)

    def _leave_out(self, plan: Plan, why: str) -> None:
        step = self._switcher.loop.program.position.step
        self._switcher.loop.run.log(EVENT, step=step, plan=plan.brief(), reason=why, used=False)
        self._say(f"auto leaves out {plan.brief()}: {why}")


class _Watch:
    """Decides when the race of the plan in use opens again; each time the pause until then doubles.

    Args:
        plan, rival: in use, and the plan that lost.
        step_s: seconds of a step of `plan` in the race.
        before: the watch until this race.
    """

    def __init__(self, plan: Plan, rival: Plan, step_s: float, before: _Watch | None) -> None:
        self._plan, self._rival, self._step_s = plan, rival, step_s
        is_again = before is not None and {before._plan, before._rival} == {plan, rival}
        self._rest_s: float = _REST_FACTOR * before._rest_s if is_again and before is not None else _MIN_REST_S
        self._since = time.monotonic()

    def race_again(self, step_s: float, spans: int) -> WindowRace | None:
        """Returns a race if the plan in use is clearly slower than in its race; None otherwise."""
        has_rested = time.monotonic() - self._since >= self._rest_s and spans >= _RECENT_SPANS
        return WindowRace(self._plan, self._rival) if has_rested and step_s > _SLOWER * self._step_s else None
