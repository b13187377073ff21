"""Changes the Program of a training loop between two spans; the journal has each change before its first step."""

from __future__ import annotations

from collections.abc import Callable

from hotloop.core.files.package_use import PackageUse
from hotloop.core.files.run_folder import SWITCH_EVENT, PlanHistory, PlanSwitch
from hotloop.lowering.build import lower
from hotloop.lowering.program import Program
from hotloop.plan import Plan
from hotloop.task import Task
from hotloop.training.live.replay import runnable_plan
from hotloop.training.loop import TrainingLoop
from hotloop.training.monitor import RunMonitor
from hotloop.training.run import Run


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
