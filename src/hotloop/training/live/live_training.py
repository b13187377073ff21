"""A training whose plan changes between steps: by the journal, by the journal of a repeated run, or by a search."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hotloop.core.files.run_folder import PlanHistory
from hotloop.errors import RunError
from hotloop.lowering.program import Program
from hotloop.parity.proof import missing_memory
from hotloop.plan import Plan
from hotloop.training.early_stopping import RunOutcome
from hotloop.training.live.live_search import EVENT as CANDIDATE
from hotloop.training.live.live_search import LiveSearch, SearchSettings
from hotloop.training.live.plan_switcher import PlanSwitcher, record_switch
from hotloop.training.live.replay import replayed_history
from hotloop.training.live.spare_core import with_fewer_threads
from hotloop.training.loop import TrainingLoop
from hotloop.training.run import FollowerRun, Run
from hotloop.tuning.live.spare_time import IdleCores
from hotloop.tuning.live.stored_speed import store_speed
from hotloop.tuning.run_context import RunContext
from hotloop.tuning.search.payoff import accepted_parities
from hotloop.tuning.search.program_pool import max_programs_in_memory

SEARCH = "plan_search"
"""The journal's event of a search's candidates, which a resumed run reads."""

Drive = Callable[[TrainingLoop], RunOutcome]


def live_drive(context: RunContext, handle: Run, plan: Plan) -> Drive | None:
    """Returns the training loop of a run whose plan may change; None for a run with one plan.

    Args:
        plan: of the first Program.

    Raises:
        RunError: the journal's switches are damaged, or those of the run to repeat.
    """
    if isinstance(handle, FollowerRun):
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
