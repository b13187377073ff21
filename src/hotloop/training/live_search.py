"""The search of `--plan auto` while training goes on: candidates are compiled and proven by a child, and race in real steps."""

from __future__ import annotations

import shlex
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from hotloop.core.files.run_folder import PlanHistory
from hotloop.core.format import format_milliseconds
from hotloop.errors import RunError, describe_error
from hotloop.lowering.program import Program
from hotloop.parity.proof import missing_memory
from hotloop.plan import Plan
from hotloop.task import Task
from hotloop.training.early_stopping import RunOutcome
from hotloop.training.loop import TrainingLoop
from hotloop.training.plan_switcher import PlanSwitcher, record_switch, replayed_history
from hotloop.training.run import Run
from hotloop.tuning.candidate_process import CandidateProcess, PreparedPlan
from hotloop.tuning.economics import EAGER_GAIN, LATER_GAIN, LIVE_RACE_S, Payoff, estimate_compile_s, estimate_proof_s
from hotloop.tuning.race_cache import accepted_parities
from hotloop.tuning.races.statistics import MIN_PAIRS
from hotloop.tuning.run_context import RunContext
from hotloop.tuning.search import max_programs_in_memory
from hotloop.tuning.spare_time import MAX_LOSS, IdleCores
from hotloop.tuning.window_race import ProvenPlan, WindowRace, store_speed

CANDIDATE = "plan_candidate"
"""The journal's event of a candidate that isn't used, or that won."""

SEARCH = "plan_search"
"""The journal's event of a search's candidates, which a resumed run reads."""

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

_BUSY_CORES = 0.5
"""Idle cores below which a child would take its time from the training's threads."""


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


@dataclass(frozen=True)
class SpareCore:
    """A core for the child in a training that uses all cores: while the child runs, steps use one thread fewer.

    Attributes:
        plan, beside: while no child runs, and while one does.
        loss: share of the speed that `beside` loses; at least 0.
    """

    plan: Plan
    beside: Plan
    loss: float


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
        if self._waiting and idle_cores < _BUSY_CORES and self._begin_thread_race(step_s):
            return
        while self._waiting:
            plan = self._waiting[0]
            payoff = self._payoff(plan, step_s, idle_cores)
            if not payoff.is_worthwhile:
                self._skip_alike(plan, str(payoff))
            elif why := self._settings.why_no_memory(self._switcher.loop.program):
                self._stop_search(why)
            else:
                self._start_child(payoff)
                return
        if is_long:
            self._race_baseline()

    def _payoff(self, plan: Plan, step_s: float, idle_cores: float) -> Payoff:
        is_compiled = plan.compile != "none"
        payoff = Payoff(
            self._steps_left(step_s),
            step_s,
            gain=(LATER_GAIN if self._has_gain else None) if is_compiled else EAGER_GAIN,
            compile_s=estimate_compile_s(0) if is_compiled else 0.0,
            proof_s=estimate_proof_s(step_s, 0.0, self._settings.normed),
            race_s=LIVE_RACE_S,
            loss=MAX_LOSS,
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

    def _start_child(self, payoff: Payoff) -> None:
        is_compiled, settings = self._waiting[0].compile != "none", self._settings
        plans = [one for one in self._waiting if (one.compile != "none") == is_compiled]
        try:
            training = self._switcher.loop.program
            self._child = CandidateProcess(self._task, training, settings.eager, plans, settings.accepted, payoff)
        except OSError as error:  # the system allows no further process
            self._stop_search(f"a child process can't be started: {describe_error(error)}")
            return
        verb = "compiles" if is_compiled else "proves"
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
        self._switcher.loop.run.log(CANDIDATE, **fields, used=winner == race.rival)
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
            loss = 1 - race.step_s(race.plan) / race.step_s(race.rival)
            self._spare_core = SpareCore(race.plan, race.rival, max(0.0, loss))

    def _leave_out(self, plan: Plan, why: str) -> None:
        step = self._switcher.loop.program.position.step
        self._switcher.loop.run.log(CANDIDATE, step=step, plan=plan.brief(), reason=why, used=False)
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


Drive = Callable[[TrainingLoop], RunOutcome]


def live_drive(context: RunContext, handle: Run, plan: Plan) -> Drive | None:
    """Returns the training loop of a run whose plan may change; None for a run with one plan.

    Args:
        plan: of the first Program.

    Raises:
        RunError: the journal's switches are damaged, or those of the run to repeat.
    """
    if not handle.writes:
        return None
    events = handle.journal()
    history = PlanHistory.from_journal(events)
    if not history and context.replay is not None:
        for switch in replayed_history(context.replay).without_search():
            record_switch(handle, history, switch)
        return LiveTraining(context, plan, history)
    if not history and context.candidates:
        plans = [one.model_dump(mode="json") for one in context.candidates]
        handle.log(SEARCH, eager=plan.model_dump(mode="json"), candidates=plans)
        first = history.next_switch(0, plan, "the plan that needs no compiling", is_searching=True)
        record_switch(handle, history, first)  # before the event `start`: after a kill from here on the search goes on
        return LiveTraining(context, plan, history, settings=_settings(context, handle, plan, context.candidates))
    if not history:
        return None
    if not history.at(0).is_searching and not any(event["event"] == "start" for event in events):
        raise RunError(
            f"{handle.path} was ended while it copied the plans of the run to repeat",
            expected="all of them",
            fix="remove the folder, and start the run again",
        )
    if context.plan is not None or context.axes:
        return LiveTraining(context, plan, history, is_replaced=True)
    if not history.last.is_searching or (found := _stored_search(events)) is None:
        return LiveTraining(context, plan, history)
    eager, candidates = found
    tried = [str(event["plan"]) for event in events if event["event"] == CANDIDATE]
    return LiveTraining(
        context, plan, history, settings=_settings(context, handle, eager, candidates), tried=tuple(tried)
    )


def _stored_search(events: list[dict[str, Any]]) -> tuple[Plan, list[Plan]] | None:
    found = next((event for event in reversed(events) if event["event"] == SEARCH), None)
    if found is None:
        return None
    try:
        return Plan(**found["eager"]), [Plan(**plan) for plan in found["candidates"]]
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            "the run's journal.jsonl is damaged: it has no valid plans of the search",
            expected="the line as hotloop wrote it",
            fix="restore the file from a copy, or name a plan",
        ) from error


def _settings(context: RunContext, handle: Run, eager: Plan, candidates: list[Plan]) -> SearchSettings:
    facts = handle.record.facts

    def why_no_memory(program: Program) -> str:
        if max_programs_in_memory(facts, eager.device) < 2:
            return "there is no memory for a second program beside the training"
        return missing_memory([program])

    settings = SearchSettings(
        tuple(candidates),
        eager,
        accepted_parities(eager),
        facts.normed,
        why_no_memory,
        fewer=with_fewer_threads(eager),
        idle_cores=IdleCores().measure,
    )
    known = context.facts  # with the fingerprint that stored results have; None for a Task from Python
    if known is None or context.source.record is None:
        return settings
    baseline = Plan(device=eager.device, workers=eager.workers)
    return replace(
        settings, baseline=baseline, store=lambda race, proven: store_speed(context.task.name, known, race, proven)
    )


@dataclass
class LiveTraining:
    """Trains by a loop to its end.

    Attributes:
        plan: of the loop's first Program.
        history: of the run's journal.
        settings: of the search that follows the journal; None without a search.
        tried: brief names of plans that the search has tried.
        is_replaced: whether the user resumed the run with another plan.
    """

    context: RunContext
    plan: Plan
    history: PlanHistory
    settings: SearchSettings | None = None
    tried: tuple[str, ...] = ()
    is_replaced: bool = False

    def __call__(self, loop: TrainingLoop) -> RunOutcome:
        switcher = PlanSwitcher(loop, self.context.task, self.plan, self.history, self.context.say)
        if self.is_replaced:
            switcher.write(self.plan, "the run was resumed with this plan", is_searching=False)
        search = None if self.settings is None else self._make_search(switcher, self.settings)
        try:
            reason = self._train(switcher, search)
        finally:
            if search is not None:
                search.close()
            switcher.close()
        outcome = loop.end(reason)
        if len(self.history.switches) > 1:
            self.context.say(f"to repeat this run bit by bit: {_replay_command(self.context, loop.run)}")
        return outcome

    def _make_search(self, switcher: PlanSwitcher, settings: SearchSettings) -> LiveSearch:
        loop, context = switcher.loop, self.context

        def steps_left(step_s: float) -> int:
            epochs = min(float(loop.task.epochs), context.pause_after_epoch)
            steps = epochs * (loop.program.feed.batches or 0) - loop.program.position.step
            return int(max(0.0, min(steps, (context.until - time.monotonic()) / step_s, 1e18)))

        return LiveSearch(switcher, context.task, settings, self.tried, steps_left, context.say)

    def _train(self, switcher: PlanSwitcher, search: LiveSearch | None) -> str:
        loop, is_following = switcher.loop, True
        reason, steps = loop.next_span()
        while reason is None:
            position = loop.program.position
            if switcher.is_at_epoch_end:
                switcher.enter_before_end()
            elif search is None or position.step < self.history.last.step:
                ahead = switcher.follow()
                steps = steps if ahead is None else min(steps, ahead)
            else:
                if is_following:
                    switcher.follow()
                    switcher.switch(self.history.plan_in_use, "the search begins again with this plan")
                    is_following = False
                steps = search.before_span(steps)
            loop.run_span(steps)
            after = loop.program.position
            if search is not None and not is_following and (position.batch > 0 or after.batch == 0):
                search.after_span(after.step - position.step, loop.pacer.last_s)  # an epoch's start opens the data
            reason, steps = loop.next_span()
        return reason


def _replay_command(context: RunContext, run: Run) -> str:
    """Returns the command that trains the same Task with the same plans at the same steps."""
    source = run.record.source
    if source is None:
        return f"hotloop.fit(task, plan='replay:{run.path}')"
    words = ["hotloop", "train", source.reference]
    for name, value in source.parameters.items():
        words += ["-p", f"{name}={value}"]
    for name, value in run.record.overrides.items():
        if name in ("epochs", "batch_size", "seed"):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join([*words, "--plan", f"replay:{run.path}"])


def with_fewer_threads(plan: Plan) -> Plan | None:
    """Returns a plan for the CPU with one thread fewer; None with one thread, or where the user has set their number.

    The number of threads changes the order of sums alone, so the plan needs no proof.
    """
    threads = torch.get_num_threads() - 1
    return plan.with_axes(threads=threads) if plan.device == "cpu" and plan.threads is None and threads else None
