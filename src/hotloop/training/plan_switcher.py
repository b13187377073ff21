"""Trainings that change their plan between two steps, and runs that repeat those changes (`--plan replay:RUN`).

The journal has each change before its first step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hotloop.core.files.package_use import PackageUse
from hotloop.core.files.run_folder import SWITCH_EVENT, PlanHistory, PlanSwitch
from hotloop.core.hardware import limits
from hotloop.core.hardware.machine import result_versions
from hotloop.core.plan_request import AXES_BESIDE_AUTO, PlanRequest
from hotloop.core.records.training import RunRecord
from hotloop.errors import RunError
from hotloop.lowering.build import lower
from hotloop.lowering.program import Program
from hotloop.plan import Plan
from hotloop.task import Task
from hotloop.training.loop import TrainingLoop
from hotloop.training.monitor import RunMonitor
from hotloop.training.run import Run
from hotloop.tuning.run_context import RunContext


def record_switch(run: Run, history: PlanHistory, switch: PlanSwitch) -> None:
    """Writes a switch to the run's journal, durably, and then to the history."""
    run.log(SWITCH_EVENT, **switch.fields())
    history.add(switch)


class PlanSwitcher:
    """The Programs of one training by plan, and the history of its plans.

    Args:
        loop: has begun; its Program has the plan `plan`.
        task: as the user gave it.
        history: of the run's journal; empty for a new run.
    """

    def __init__(
        self, loop: TrainingLoop, task: Task, plan: Plan, history: PlanHistory, say: Callable[[str], None]
    ) -> None:
        self.loop, self.plan, self.history, self._task, self._say = loop, plan, history, task, say
        self._programs: dict[Plan, Program] = {plan: loop.program}

    def write(self, plan: Plan, reason: str, *, is_window: bool = False, is_searching: bool = True) -> None:
        """Records in the journal that the next steps have this plan."""
        step = self.loop.program.position.step
        switch = self.history.next_switch(step, plan, reason, is_window=is_window, is_searching=is_searching)
        record_switch(self.loop.run, self.history, switch)
        if not is_window:
            self.loop.run.keep(plan=plan)

    def switch(self, plan: Plan, reason: str, *, is_window: bool = False) -> None:
        """Records a plan in the journal, and makes the next steps with it."""
        if plan == self.plan and self.history.at(self.loop.program.position.step).is_window == is_window:
            return
        self.write(plan, reason, is_window=is_window)
        self.enter(plan)

    def follow(self) -> int | None:
        """Makes the next steps with the journal's plan; returns the steps until the journal's next switch, if any."""
        step = self.loop.program.position.step
        switch = self.history.at(step)
        self.enter(switch.plan)
        if not switch.is_window:
            self.loop.run.keep(plan=switch.plan)
        following = self.history.next_step(step)
        return None if following is None else following - step

    @property
    def is_at_epoch_end(self) -> bool:
        """Whether the epoch's last step is done and its evaluation isn't, which belongs to the plan of that step."""
        position, batches = self.loop.program.position, self.loop.program.feed.batches
        return batches is not None and position.batch >= batches

    def enter_before_end(self) -> None:
        """Takes the plan of the epoch's last step for its evaluation."""
        self.enter(self.history.at(self.loop.program.position.step - 1).plan)

    def prepare(self, plan: Plan, package: str = "") -> Program:
        """Returns the Program of a plan, lowered if it isn't in memory.

        Args:
            package: SHA-256 of the only package that the plan may use; empty for any package.

        Raises:
            PlanError: the plan can't be run here.
        """
        if plan not in self._programs:
            state = self.loop.program.state()
            try:
                self._programs[plan] = lower(self._task, runnable_plan(plan), self._say, package=PackageUse(package))
            finally:
                self.loop.program.restore(state)  # building a second model may call functions of the Task
        return self._programs[plan]

    def enter(self, plan: Plan) -> None:
        """Moves the training's State to the Program of a plan."""
        if plan == self.plan:
            return
        loop, program = self.loop, self.prepare(plan)
        program.restore(loop.program.state())
        program.set_stop(loop.interrupts.reason, loop.interrupts.check)
        program.schedule_recheck(loop.callbacks)
        for callback in loop.callbacks:
            if isinstance(callback, RunMonitor):
                callback.follow(program)
        loop.program, self.plan = program, plan

    def drop(self, plan: Plan) -> None:
        """Closes the Program of a plan that isn't in use."""
        if plan != self.plan and plan in self._programs:
            self._programs.pop(plan).close()

    def close(self) -> None:
        """Closes all Programs but the one in use, which the loop closes."""
        for plan in list(self._programs):
            self.drop(plan)


def with_replayed_plan(context: RunContext) -> RunContext:
    """Returns the context with the first plan of the run to repeat; unchanged without such a run.

    Raises:
        RunError: the run has no switches of its plan, or a damaged journal.
    """
    if context.replay is None:
        return context
    plan = runnable_plan(replayed_history(context.replay).at(0).plan)
    return replace(context, plan=plan, axes={}, is_live=False)


def without_live_request(context: RunContext, path: Path) -> RunContext:
    """Returns the context of a resumed run without `--plan auto` if the run searches already, with the axes that are set."""
    if not context.is_live or not PlanHistory.from_journal((run := Run.open(path)).journal()):
        return context
    asked = PlanRequest.from_value(None, context.axes).plan
    is_same = all(getattr(asked, axis) == getattr(run.plan, axis) for axis in asked.model_fields_set)
    if not is_same or asked.model_fields_set - AXES_BESIDE_AUTO:  # a search may change another axis later
        return context
    return replace(context, plan=None, axes={}, is_live=False)


def runnable_plan(plan: Plan) -> Plan:
    """Returns a plan without an allocator that this machine doesn't have; the results have the same bits."""
    return plan if limits.active_allocator() is not None else plan.with_axes(allocator="default")


def replayed_history(path: Path) -> PlanHistory:
    """Returns the plans of a run by step.

    Raises:
        RunError: as `with_replayed_plan`.
    """
    run = Run.open(path)
    if not (path / "journal.jsonl").is_file():
        raise RunError(f"{path} has no journal.jsonl", expected="the run's journal", fix="restore it from a copy")
    if damages := run._events().damage(path / "journal.jsonl", "its plans can't be repeated"):
        raise RunError(damages[0], expected="the file as hotloop wrote it", fix="restore it from a copy")
    history = PlanHistory.from_journal(run.journal())
    if not history:
        raise RunError(
            f"{path} used one plan throughout",
            expected="a run that changed its plan while it trained",
            fix=f"use its plan: --plan {path / 'plan.toml'}",
        )
    return history


def check_same_task(record: RunRecord, path: Path | None, *, has_schedule: bool) -> list[str]:
    """Returns a line if other versions or settings of torch may change the last bits of the repeated run `path`.

    Args:
        has_schedule: whether the learning rate depends on the number of steps.

    Raises:
        RunError: the new run's Task, data, order or seed aren't those of the run to repeat.
    """
    if path is None:
        return []
    other = Run.open(path).record
    facts, then = record.facts, other.facts
    checks = {
        "Task": ((facts.fingerprint, _parameters(record)), (then.fingerprint, _parameters(other))),
        "data": ((facts.samples, record.reader), (then.samples, other.reader)),
        "order of the data or seed": ((facts.order, _seed(record)), (then.order, _seed(other))),
        "number of steps": (facts.steps, then.steps) if has_schedule else (0, 0),
    }
    if differing := [name for name, (now, before) in checks.items() if now != before]:
        raise RunError(
            f"{path} was trained with another {' and another '.join(differing)}",
            expected="the same Task, data, seed and number of epochs",
            fix="use the command that the run printed at its end",
        )
    changed = [
        f"{name} {other.versions[name]} then, {now} now"
        for name, now in result_versions().items()
        if other.versions.get(name, now) != now
    ]
    changed += ["torch had other float32 settings"] * (record.switches != other.switches)
    return [f"{', '.join(changed)}: the result may differ in its last bits"] if changed else []


def _parameters(record: RunRecord) -> dict[str, object]:
    return {} if record.source is None else dict(record.source.parameters)


def _seed(record: RunRecord) -> object:
    return record.overrides.get("seed")
