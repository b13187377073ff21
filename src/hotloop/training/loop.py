"""The training loop: spans of steps, epochs, checkpoints, stopping and resuming."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hotloop.core.callback import Callback, Event, View
from hotloop.core.processes import REASONS, StopRequested, StopSignals
from hotloop.core.random.rng import preserve_generators
from hotloop.core.records.training import EpochRecord
from hotloop.core.state import Position, State
from hotloop.data.sources import Source
from hotloop.distributed.comm_stats import CommReport
from hotloop.distributed.watchdog import RANK_PROGRESS
from hotloop.distributed.world import SINGLE_RANK, World, check_in_step
from hotloop.errors import HotloopError, PartsDifferError, translate_worker_death
from hotloop.lowering.eager_step import epoch_means
from hotloop.lowering.evaluation import evaluate
from hotloop.lowering.failures.explanation import explain_callback_error, explain_rank_error, nonfinite_error_of_ranks
from hotloop.lowering.failures.nonfinite import find_nonfinite, nonfinite_figure_error
from hotloop.lowering.program import Program
from hotloop.task import Task
from hotloop.training.cadence import RANKS_SPAN_S, CheckpointCadence, SpanPacer
from hotloop.training.checkpoint import BestEpoch, Checkpoint, check_storable, has_only_finite_parameters
from hotloop.training.early_stopping import FINISHED, PAUSED, EarlyStopping, RunOutcome
from hotloop.training.rehearsal import Rehearsals
from hotloop.training.repeated_steps import ExpectedSteps, StepRecord
from hotloop.training.resume import check_data, check_schedule, newest_valid_checkpoint, restore_program
from hotloop.training.run import Run

_NEXT_STEPS = 4
_NEXT_STEPS_S = 0.2
"""Most steps that a stopped training takes after its last checkpoint, and their largest duration."""


def train_loop(
    relower: Callable[[], Program],
    run: Run,
    *,
    resume: bool = False,
    compares: bool = False,
    rehearsals: Rehearsals | None = None,
    stop_after_s: float | None = None,
    pause_after_epoch: float = math.inf,
    callbacks: Sequence[Callback] = (),
    say: Callable[[str], None] = lambda line: None,
    drive: Callable[[TrainingLoop], RunOutcome] | None = None,
) -> RunOutcome:
    """Trains to the end of the Task's epochs or to a stop; either way the run can be resumed.

    Args:
        relower: makes the Program; called again to replay an error from the last valid State.
        run: the run's folder, locked by the caller.
        resume: continue from the newest valid checkpoint.
        compares: a resumed run takes the same steps as before, by plan and versions, so that equal bits are expected.
        rehearsals: of the resume, beside the training.
        stop_after_s: stop cleanly after this number of seconds.
        pause_after_epoch: stop cleanly at the end of this epoch, from 1; the Task's `epochs` and schedule stay.
        drive: trains by the loop to its end, in place of the loop itself.

    Raises:
        NonFiniteError, MemoryExhausted, DiskError, TaskError: training can't continue; the last valid checkpoint stays.
        CheckpointError: no checkpoint is valid, or the checkpoint is of another Task.
    """
    interrupts = StopSignals(stop_after_s)  # the time limit includes the preparation of data
    program = relower()
    with preserve_generators(*program.devices), translate_worker_death():
        loop = TrainingLoop(program, run, relower, interrupts, callbacks, say, pause_after_epoch, rehearsals)
        try:
            with loop.interrupts.listen():
                loop.begin(resume, compares)
                return loop.end(loop.train()) if drive is None else drive(loop)
        finally:
            loop.steps.close()
            if rehearsals is not None:
                rehearsals.close(loop, is_interrupted=interrupts.reason() is not None or not loop.is_ended)
            loop.program.close()


@dataclass
class TrainingLoop:
    program: Program
    run: Run
    relower: Callable[[], Program]
    interrupts: StopSignals
    callbacks: Sequence[Callback]
    say: Callable[[str], None]
    pause_after_epoch: float = math.inf
    rehearsals: Rehearsals | None = None
    history: list[EpochRecord] = field(default_factory=list)
    best: BestEpoch | None = None
    pacer: SpanPacer = field(init=False)

    def __post_init__(self) -> None:
        task, judged = self.task, self.program.parts.splits.validation is not None
        self.pacer = SpanPacer() if self.world.is_single else SpanPacer(span_s=RANKS_SPAN_S)
        self.cadence = CheckpointCadence.parse(self.run.record.checkpoint_every)
        rules = dict(stop_below=task.stop_below, patience=task.patience, pause_after_epoch=self.pause_after_epoch)
        self.stopping = EarlyStopping.of(task.monitor, task.goal, judged, **rules)
        self._best_state: State | None = None  # the best epoch's weights, until the next checkpoint writes them
        self._saved: Position | None = None
        self._shown: tuple[EpochRecord, ...] = ()
        self._loss: float | None = None
        self.steps = StepRecord(self.run.path)
        self.expected = ExpectedSteps(0, {})  # what the process before a resume had after the checkpoint
        self.difference, self.is_ended = "", False
        self._comm = CommReport(self.world, self.run.log, self.say)
        self.program.set_stop(self.interrupts.reason, self.interrupts.check)
        self._begin_epoch()

    @property
    def task(self) -> Task:
        return self.program.parts.task

    @property
    def world(self) -> World:
        return self.program.parts.world

    def begin(self, resume: bool, compares: bool = False) -> None:
        """Starts, or restores the newest valid checkpoint; see `train_loop` for `compares`."""
        if resume:
            self._restore_checkpoint()
            if compares and self.world.is_rank_zero:
                self.expected = self.steps.expected_after(self.program.position.step)
        else:
            self.run.log_start("start", step=0, **self.stopping.monitor())
        self.program.check_exactness()
        self.run.note_all_inexact(self.program.inexact, self.say)
        self._check_storable()
        self.run.mark(self.program.position.step)
        self.run.write_metrics(self.history)
        self.cadence.estimate_cost(3 * sum(value.nbytes for value in self.program.model.parameters()))
        self._call_callbacks("start")

    def _restore_checkpoint(self) -> None:
        check_data(self.run.record.facts, self.program)
        found = self.world.broadcast_object(lambda: newest_valid_checkpoint(self.run, self.say))
        if found is not None:
            checkpoint, path = found
            restore_program(self.program, checkpoint, path)
            self.history, self.best = list(checkpoint.history), checkpoint.best
            sums = self.program.read_sums()
            self._read = sums["loss"], sums["weight"]
            self._train_s = self._earlier_s = checkpoint.epoch_s
            self._samples = sums["samples"]
            self._saved = self.program.position
            check_schedule(self.program)
        else:
            self.say("no checkpoint yet: starting from the beginning")
        if found is not None and self.program.parts.splits.order is None:
            self.say("the data has an order of its own: samples that were used are skipped, and the result may differ")
        step, file = self.program.position.step, path.name if found else None
        repeated, monitor = max(0, self.run.reached() - step), self.stopping.monitor()
        self.run.log_start("resume", step=step, file=file, repeated_at_most=repeated, **monitor)

    def train(self) -> str:
        """Runs spans until a stop; returns its reason."""
        reason, steps = self.next_span()
        while reason is None:
            self.run_span(steps)
            reason, steps = self.next_span()
        return reason

    def next_span(self) -> tuple[str | None, int]:
        """Saves if a checkpoint is due; returns why to stop and the steps of the next span, the same on all ranks."""
        position = self.program.position
        if position.batch == 0 and position.epoch >= self.task.epochs:
            return FINISHED, 0
        if position.batch == 0 and (verdict := self.stopping.verdict(self.history)):
            return verdict, 0
        heard, first = REASONS.index(self.interrupts.reason(self._reserve_s)), self.world.is_rank_zero
        rehearsals = self.rehearsals
        is_due = first and position.step > 0 and self.cadence.is_due(position.step)
        is_due = is_due or (rehearsals is not None and rehearsals.wants_checkpoint(self))
        steps = self.pacer.steps() if first else 0
        ahead = None if rehearsals is None else rehearsals.steps_left(self)
        for left in (self.expected.steps_left(position.step), ahead):
            steps = steps if left is None else min(steps, left)
        heard, steps, due = self.world.all_reduce_max([heard, steps, int(is_due)])
        if due and not REASONS[heard] and position != self._saved:
            self._save()
            if rehearsals is not None and (ahead := rehearsals.steps_left(self)) is not None:
                steps = min(steps, ahead)
        left = self.cadence.steps_left(position.step)
        return REASONS[heard], steps if left is None else min(steps, left)

    @RANK_PROGRESS.within("end")
    def end(self, reason: str) -> RunOutcome:
        """Saves, and evaluates the test data if training is over."""
        interrupted = reason in (*REASONS, PAUSED)
        if self._saved != self.program.position or self._best_state is not None:
            self._save()
        final = None
        if not interrupted:
            try:
                final = self._final_figures(reason)
            except StopRequested as stopped:
                reason, interrupted = stopped.reason, True
        self.run.mark(self.program.position.step)  # a span may have ended early, with its epoch
        self._comm.report(self.program.take_spent(), self._train_s - self._earlier_s, self._steps)
        self.run.log("stop", step=self.program.position.step, reason=reason)
        if final is not None:
            self.run.log("final", **final)
        self._call_callbacks("stop", reason=reason)
        if final is not None:
            self._call_callbacks("final", final=final)
        self.is_ended = True
        if interrupted and reason != PAUSED:
            self._record_next_steps()
        return RunOutcome(reason, not interrupted, self.history, final)

    def _record_next_steps(self) -> None:
        """Takes a few steps after the last checkpoint and records their sums: the resumed run compares its own.

        Nothing else of these steps remains, since the process ends here.
        """
        position, batches = self.program.position, self.program.feed.batches
        is_open = position.batch > 0 or not self.program.parts.plan.workers  # starting workers takes seconds
        step_s = self.pacer.step_s
        if not self.world.is_single or self.run.record.source is None or step_s is None or not is_open:
            return
        steps = min(_NEXT_STEPS, int(_NEXT_STEPS_S / max(step_s, 1e-6)), (batches or 0) - position.batch)
        self.program.set_stop(lambda: None)
        with suppress(Exception):  # an error of these steps is reported by the run that takes them again
            for _ in range(steps):
                self.program.advance(1)
                self.steps.add(self.program.position.step, self.program.read_sums())

    def run_span(self, steps: int) -> None:
        """Trains for up to `steps` steps of the epoch."""
        before = self.program.position
        self.run.mark(before.step + steps)
        started = time.perf_counter()
        try:
            outcome = self.program.advance(steps)
            sums = self.program.read_sums()
        except StopRequested:
            return  # from the wait for a batch; `_next_span` returns the reason
        except Exception as error:
            self.run.mark(self.program.position.step)
            self._save_before_error(self.world if isinstance(error, PartsDifferError) else None)
            raise self._explain(error) from error
        elapsed = time.perf_counter() - started
        self.pacer.record_span(outcome.steps, elapsed)
        self._train_s += elapsed
        self._steps += outcome.steps
        self._samples += outcome.samples
        if not math.isfinite(sums["loss"]):
            raise self._find_nonfinite(self.program.position.step)
        self._loss = self._recent_loss(sums)
        if outcome.steps and self.world.is_rank_zero:
            self._note_steps(sums)
        self.run.note_all_inexact(self.program.inexact, self.say)
        if not self.world.is_single and self._saved is None and before.batch + before.epoch == 0:
            check_in_step(self.world, self.program.state())
        if self._steps == outcome.steps and self._saved is None:
            self._check_storable()  # the optimizer makes its state in its first step
        if not outcome.ended:
            self._call_callbacks("progress")
        else:
            self._end_epoch(sums)

    def _note_steps(self, sums: dict[str, float]) -> None:
        """Compares the steps done with those that an earlier process took from the same checkpoint, or records them."""
        step = self.program.position.step
        if step <= self.expected.last:
            state = self.program.state(lent=True) if self.expected.has_state(step) else None
            self.difference = self.expected.difference(step, sums, state)
            if self.difference:
                line = (
                    f"the resumed run repeats the steps after step {self.expected.start:,} and gets other bits: "
                    f"{self.difference}. Name what your code changes in Task(state=...), or go on without an exact resume"
                )
                self.run.note_all_inexact([line], self.say)
                self.expected = ExpectedSteps(step, {})
            elif step == self.expected.last:
                self.run.log("repeated", step=step, steps=step - self.expected.start)
        else:
            self.steps.add(step, sums)
        if self.rehearsals is not None:
            self.rehearsals.after_span(self, sums)

    def _check_storable(self) -> None:
        if self.world.is_single:  # gathering the state of several ranks is a collective operation
            check_storable(self.program.optimizer_state(), "optimizer")
            check_storable(self.task.read_state(), "state")

    def _end_epoch(self, sums: dict[str, float]) -> None:
        """Validates and records an epoch; after an interruption the position stays at the last batch."""
        position, started = self.program.position, time.perf_counter()
        validation: dict[str, float] = {}
        if (source := self.program.parts.splits.validation) is not None:
            try:
                validation = self._evaluate(source, "validation")
            except StopRequested:
                return
        record = EpochRecord(
            epoch=position.epoch + 1,
            step=position.step,
            train=epoch_means(sums),
            validation=validation,
            learning_rate=self.learning_rate,
            samples=int(sums["samples"]),
            seconds=self._train_s + time.perf_counter() - started,
            samples_per_s=self._samples_per_s,
        )
        self._check_figure(record)
        self.history.append(record)
        self.program.end_epoch(self.stopping.value(record))
        self.run.add_metrics(record)
        if (
            validation and self.stopping.best(self.history) is record
        ):  # without validation only the last weights are used
            self._note_best(record)
        self._comm.add_epoch(record.epoch, self.program.take_spent(), self._train_s - self._earlier_s, self._steps)
        self._begin_epoch()
        self._call_callbacks("epoch")

    def _evaluate(self, source: Source, name: str) -> dict[str, float]:
        """Returns metrics of the validation or test data, and reports those that aren't finite."""
        try:
            check, largest = self.interrupts.check, self.program.parts.joint_ranks.all_reduce_max
            values = evaluate(self.program, source, lambda *batch: check(self._reserve_s, largest)).values
        except StopRequested:
            raise
        except Exception as error:
            raise self._explain(error, name) from error
        for figure, value in values.items():
            if not math.isfinite(value):
                self.say(f"the {name} {figure} is {value} after step {self.program.position.step}")
        return values

    def _check_figure(self, record: EpochRecord) -> None:
        """Raises if the metric of early stopping isn't finite."""
        value = self.stopping.value(record)
        if math.isfinite(value):
            return
        if not has_only_finite_parameters(self.program.state(lent=self.world.is_single)):
            raise self._find_nonfinite(record.step)
        source = self.program.parts.splits.validation
        raise nonfinite_figure_error(self.program, source, self.stopping.figure, value, self._saved_step)

    def _note_best(self, record: EpochRecord) -> None:
        """Stores the best weights in memory; the next checkpoint writes them and refers to them."""
        self._best_state = self.program.weights()
        self.best = BestEpoch(record.epoch, self.stopping.value(record), file="")

    @RANK_PROGRESS.within("checkpoint")
    def _save(self) -> None:
        started = time.perf_counter()
        state = self.program.state(lent=self.world.is_single)
        if not has_only_finite_parameters(state):
            raise self._find_nonfinite(state.position.step)
        differing = check_in_step(self.world, state)
        if self.world.is_rank_zero:
            self._write(state)
        self.run.note_all_inexact([*self.program.inexact, *differing], self.say)
        self._best_state, self._saved = None, state.position
        self.cadence.record_cost(time.perf_counter() - started)
        self._call_callbacks("checkpoint")

    def _write(self, state: State) -> None:
        started = time.perf_counter()
        if self._best_state is not None and self.best is not None:
            file = self.run.checkpoints.save_best(self._best_state, self.history)
            self.best = BestEpoch(self.best.epoch, self.best.figure, file)
        path = self.run.checkpoints.save(Checkpoint(state, self.history, self.best, self._train_s))
        self.run.log(
            "checkpoint", step=state.position.step, file=path.name, seconds=round(time.perf_counter() - started, 4)
        )
        if state.position.step > self.expected.last:
            self.steps.clear()
        if self.rehearsals is not None:
            self.rehearsals.begin(self, state, path)

    def _final_figures(self, reason: str) -> dict[str, Any]:
        """Returns metrics of the best epoch's weights by validation; without validation, of the last weights."""
        roles = self.program.parts.splits
        chosen, epoch = "last", self.program.position.epoch
        if roles.validation is not None and (best := self.best) is not None:
            loaded = self.world.broadcast_object(lambda: self.run.checkpoints.load_best(best))
            self.program.restore_weights(loaded.state)
            chosen, epoch = "best", best.epoch
        figures: dict[str, Any] = {"test_loss": None, "test_accuracy": None}
        if (test := roles.test) is not None:
            figures |= {f"test_{name}": value for name, value in self._evaluate(test, "test").items()}
        return {**figures, "weights": chosen, "epoch": epoch, "reason": reason}

    def _recent_loss(self, sums: dict[str, float]) -> float | None:
        """Returns the mean training loss since the last call."""
        loss, weight = sums["loss"] - self._read[0], sums["weight"] - self._read[1]
        self._read = sums["loss"], sums["weight"]
        return loss / weight if weight else self._loss

    def _begin_epoch(self) -> None:
        self._read, self._train_s, self._earlier_s, self._steps, self._samples = (0.0, 0.0), 0.0, 0.0, 0, 0
        self.program.schedule_recheck(self.callbacks)

    @property
    def _reserve_s(self) -> float:  # for saving, when time is limited
        return 2 * self.cadence.cost_s

    @property
    def _saved_step(self) -> int | None:
        return self._saved.step if self._saved else None

    def _explain(self, error: Exception, during: str = "") -> HotloopError:
        return explain_rank_error(error, self.program, self._saved_step, during)

    def _find_nonfinite(self, reached: int) -> HotloopError:
        """Replays from the last valid State to name the step and the module."""
        if not self.world.is_single:
            return nonfinite_error_of_ranks(reached)
        found = self.run.checkpoints.newest(self.say, best_needed=False)
        self.program.close()
        self.program.optimizer.state.clear()  # frees memory for the second Program
        self.say("the loss or a parameter is no longer finite; replaying from the last good state to find the place")
        self.program = self.relower()
        self.program.run_eagerly()
        if found is not None:
            self.program.restore(found[0].state)
        figures = {record.epoch - 1: self.stopping.value(record) for record in self.history}
        losses = [record.train["loss"] for record in self.history] + ([] if self._loss is None else [self._loss])
        return find_nonfinite(self.program, reached, figures, losses)

    @property
    def learning_rate(self) -> float:
        return float(self.program.optimizer.param_groups[0].get("lr", math.nan))  # a user's class may have none

    @property
    def _samples_per_s(self) -> float:
        return self._samples / (self._train_s or math.inf)

    def remaining_s(self) -> float | None:
        position, batches = self.program.position, self.program.feed.batches
        return self.pacer.remaining_s(self.history, self.task.epochs - position.epoch, batches, position.batch)

    @RANK_PROGRESS.within("callbacks")
    def _call_callbacks(self, event: Event, *, reason: str = "", final: dict | None = None) -> None:
        position = self.program.position
        # Copies, so that callbacks can't change the history.
        self._shown += tuple(record.model_copy(deep=True) for record in self.history[len(self._shown) :])
        view = View(
            event=event,
            run=self.run.path,
            epoch=position.epoch,
            epochs=self.task.epochs,
            step=position.step,
            batch=position.batch,
            batches=self.program.feed.batches,
            loss=self._loss,
            samples_per_s=self._samples_per_s,
            remaining_s=self.remaining_s(),
            learning_rate=self.learning_rate,
            history=self._shown,
            reason=reason,
            final=None if final is None else dict(final),
        )
        for callback in self.callbacks:
            try:
                callback(view)
            except Exception as error:
                self._save_before_error()
                raise explain_callback_error(error, callback, view, self._saved_step) from error

    def _save_before_error(self, here: World | None = SINGLE_RANK) -> None:
        """Saves before an error ends training, if all ranks are `here` to take part."""
        self.callbacks = ()  # callbacks don't get an event of this checkpoint
        if here == self.world and self.program.position.step and self._saved != self.program.position:
            self._save()
