"""The training loop: spans of steps, epochs, checkpoints, stopping and going on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotloop.core.callback import Callback, Event, View
from hotloop.core.processes.signals import REASONS, Interrupts, Stopped
from hotloop.core.random.rng import preserved
from hotloop.core.records.training import EpochRecord
from hotloop.core.state import Position, State
from hotloop.data.sources import Source
from hotloop.distributed.comm_stats import Waits
from hotloop.distributed.rank_progress import PROGRESS
from hotloop.distributed.world import ALONE, World, check_in_step
from hotloop.errors import HotloopError, PartsDifferError, lost_workers_told
from hotloop.lowering.eager_step import means_of
from hotloop.lowering.evaluation import evaluate
from hotloop.lowering.failures.explanation import explained_of_callback, explained_of_rank, nonfinite_of_ranks
from hotloop.lowering.failures.nonfinite import find_nonfinite, nonfinite_figure
from hotloop.lowering.program import Program
from hotloop.task import Task
from hotloop.training.cadence import RANKS_SPAN_S, Cadence, Pace
from hotloop.training.checkpoint import Best, Checkpoint, all_finite, check_storable
from hotloop.training.early_stopping import FINISHED, Ended, Steering
from hotloop.training.resume import check_data, check_schedule, newest_good, restore
from hotloop.training.run import Run


def train_loop(
    relower: Callable[[], Program],
    run: Run,
    *,
    resume: bool = False,
    stop_after_s: float | None = None,
    callbacks: Sequence[Callback] = (),
    say: Callable[[str], None] = lambda line: None,
) -> Ended:
    """Trains to the end of the Task's epochs, or until something stops it; either way the run can be gone on with.

    Args:
        relower: makes the Program; called again when a trouble must be replayed from the last good State.
        run: the run's folder, locked by the caller.
        resume: go on from the newest good checkpoint.
        stop_after_s: stop cleanly after so many seconds.
        callbacks: see each `View`.
        say: shows a line to the user.

    Raises:
        NonFiniteError, MemoryExhausted, DiskError, TaskError: training can't go on; the last good checkpoint stays.
        CheckpointError: none to go on from is good, or it is another Task's.
    """
    interrupts = Interrupts(stop_after_s)  # the clock runs while data are prepared, too
    program = relower()
    with preserved(*program.devices), lost_workers_told():
        loop = _Loop(program, run, relower, interrupts, callbacks, say)
        try:
            with loop.interrupts.listening():
                loop.begin(resume)
                return loop.end(loop.train())
        finally:
            loop.program.close()


@dataclass
class _Loop:
    program: Program
    run: Run
    relower: Callable[[], Program]
    interrupts: Interrupts
    callbacks: Sequence[Callback]
    say: Callable[[str], None]
    history: list[EpochRecord] = field(default_factory=list)
    best: Best | None = None
    pace: Pace = field(init=False)

    def __post_init__(self) -> None:
        task, judged = self.task, self.program.parts.roles.validation is not None
        self.pace = Pace() if self.world.alone else Pace(span_s=RANKS_SPAN_S)
        self.cadence = Cadence.parse(self.run.record.checkpoint_every)
        self.steering = Steering.of(task.monitor, task.goal, judged, stop_below=task.stop_below, patience=task.patience)
        self._best_state: State | None = None  # the best epoch's weights, until the next checkpoint writes them
        self._saved: Position | None = None
        self._shown: tuple[EpochRecord, ...] = ()
        self._loss: float | None = None
        self._waits = Waits(self.world, self.run.log, self.say)
        self.program.heed(self.interrupts.reason, self.interrupts.check)
        self._begin_epoch()

    @property
    def task(self) -> Task:
        return self.program.parts.task

    @property
    def world(self) -> World:
        return self.program.parts.world

    def begin(self, resume: bool) -> None:
        """Starts, or goes back to the newest good checkpoint."""
        if resume:
            self._go_back()
        else:
            self.run.log("start", step=0, plan=self.run.plan.brief())
        self.program.check_exactness()
        self.run.note_all_inexact(self.program.inexact, self.say)
        self._check_storable()
        self.run.mark(self.program.position.step)
        self.run.write_metrics(self.history)
        self.cadence.expect(3 * sum(value.nbytes for value in self.program.model.parameters()))
        self._tell("start")

    def _go_back(self) -> None:
        check_data(self.run.record.facts, self.program)
        found = self.world.from_first(lambda: newest_good(self.run, self.say))
        if found is not None:
            checkpoint, path = found
            restore(self.program, checkpoint, path)
            self.history, self.best = list(checkpoint.history), checkpoint.best
            sums = self.program.read_sums()
            self._read = sums["loss"], sums["weight"]
            self._train_s = self._earlier_s = checkpoint.epoch_s  # 0 from older versions
            self._samples = sums["samples"] if checkpoint.epoch_s else 0
            self._saved = self.program.position
            check_schedule(self.program)
        else:
            self.say("no checkpoint yet: starting from the beginning")
        if found is not None and self.program.parts.roles.order is None:
            self.say("the data has an order of its own: what was seen is skipped, and the result may come out another")
        step, plan = self.program.position.step, self.run.plan.brief()
        repeated = max(0, self.run.reached() - step)
        self.run.log("resume", step=step, plan=plan, file=path.name if found else None, repeated_at_most=repeated)

    def train(self) -> str:
        """Runs spans until something says stop; returns why."""
        while True:
            at_epoch_start = self.program.position.batch == 0
            if at_epoch_start and self.program.position.epoch >= self.task.epochs:
                return FINISHED
            if at_epoch_start and (verdict := self.steering.verdict(self.history)):
                return verdict
            reason, steps, is_checkpoint_due = self._next()
            if reason:
                return reason
            if is_checkpoint_due and self.program.position != self._saved:
                self._save()
            self._span(steps)

    def _next(self) -> tuple[str | None, int, bool]:
        """Returns why to stop, the steps of the next span, and whether a checkpoint is due: the same on all ranks."""
        heard, first = REASONS.index(self.interrupts.reason(self._reserve_s)), self.world.first
        step = self.program.position.step
        is_due = first and step > 0 and self.cadence.due(step)
        heard, steps, due = self.world.largest([heard, self.pace.steps() if first else 0, int(is_due)])
        return REASONS[heard], steps, bool(due)

    @PROGRESS.within("end")
    def end(self, reason: str) -> Ended:
        """Saves; reads the test data if training is over."""
        interrupted = reason in REASONS
        if self._saved != self.program.position or self._best_state is not None:
            self._save()
        final = None
        if not interrupted:
            try:
                final = self._final(reason)
            except Stopped as stopped:
                reason, interrupted = stopped.reason, True
        self.run.mark(self.program.position.step)  # a span may have ended early, with its epoch
        self._waits.tell(self.program.take_spent(), self._train_s - self._earlier_s, self._steps)
        self.run.log("stop", step=self.program.position.step, reason=reason)
        if final is not None:
            self.run.log("final", **final)
        self._tell("stop", reason=reason)
        if final is not None:
            self._tell("final", final=final)
        return Ended(reason, not interrupted, self.history, final)

    def _span(self, steps: int) -> None:
        before = self.program.position
        if (left := self.cadence.steps_left(before.step)) is not None:
            steps = min(steps, left)
        self.run.mark(before.step + steps)
        started = time.perf_counter()
        try:
            outcome = self.program.advance(steps)
            sums = self.program.read_sums()
        except Stopped:
            return  # the wait for a batch has ended, and `_next` reports why
        except Exception as error:
            self.run.mark(self.program.position.step)
            self._save_before_the_end(self.world if isinstance(error, PartsDifferError) else None)
            raise self._explained(error) from error
        elapsed = time.perf_counter() - started
        self.pace.ran(outcome.steps, elapsed)
        self._train_s += elapsed
        self._steps += outcome.steps
        self._samples += outcome.samples
        if not math.isfinite(sums["loss"]):
            raise self._nonfinite(self.program.position.step)
        self._loss = self._recent(sums)
        self.run.note_all_inexact(self.program.inexact, self.say)
        if not self.world.alone and self._saved is None and before.batch + before.epoch == 0:
            check_in_step(self.world, self.program.state())
        if self._steps == outcome.steps and self._saved is None:
            self._check_storable()  # the optimizer makes its state in its first step
        if not outcome.ended:
            self._tell("progress")
        else:
            self._end_epoch(sums)

    def _check_storable(self) -> None:
        if self.world.alone:  # else all ranks would have to ask together
            check_storable(self.program.optimizer_state(), "optimizer")

    def _end_epoch(self, sums: dict[str, float]) -> None:
        """Validates and records an epoch; if a signal interrupts this, its last batch stays the position."""
        position, started = self.program.position, time.perf_counter()
        validation: dict[str, float] = {}
        if (source := self.program.parts.roles.validation) is not None:
            try:
                validation = self._evaluated(source, "validation")
            except Stopped:
                return
        record = EpochRecord(
            epoch=position.epoch + 1,
            step=position.step,
            train=means_of(sums),
            validation=validation,
            learning_rate=self.learning_rate,
            samples=int(sums["samples"]),
            seconds=self._train_s + time.perf_counter() - started,
            samples_per_s=self._rate,
        )
        self._check_figure(record)
        self.history.append(record)
        self.program.end_epoch(self.steering.value(record))
        self.run.add_metrics(record)
        if validation and self.steering.best(self.history) is record:  # else nobody reads other weights than the last
            self._note_best(record)
        self._waits.note(record.epoch, self.program.take_spent(), self._train_s - self._earlier_s, self._steps)
        self._begin_epoch()
        self._tell("epoch")

    def _evaluated(self, source: Source, name: str) -> dict[str, float]:
        """Figures of the validation or test data; one that is no number is told."""
        try:
            check, largest = self.interrupts.check, self.program.parts.joint.largest
            values = evaluate(self.program, source, lambda *batch: check(self._reserve_s, largest)).values
        except Stopped:
            raise
        except Exception as error:
            raise self._explained(error, name) from error
        for figure, value in values.items():
            if not math.isfinite(value):
                self.say(f"the {name} {figure} is {value} after step {self.program.position.step}")
        return values

    def _check_figure(self, record: EpochRecord) -> None:
        """What steers must be a number."""
        value = self.steering.value(record)
        if math.isfinite(value):
            return
        if not all_finite(self.program.state(lent=self.world.alone)):
            raise self._nonfinite(record.step)
        source = self.program.parts.roles.validation
        raise nonfinite_figure(self.program, source, self.steering.figure, value, self._saved_step)

    def _note_best(self, record: EpochRecord) -> None:
        """Keeps the best weights in memory; they are written with the next checkpoint, which refers to them."""
        self._best_state = self.program.weights()
        self.best = Best(record.epoch, self.steering.value(record), file="")

    @PROGRESS.within("checkpoint")
    def _save(self) -> None:
        started = time.perf_counter()
        state = self.program.state(lent=self.world.alone)
        if not all_finite(state):
            raise self._nonfinite(state.position.step)
        differing = check_in_step(self.world, state)
        if self.world.first:
            self._write(state)
        self.run.note_all_inexact([*self.program.inexact, *differing], self.say)
        self._best_state, self._saved = None, state.position
        self.cadence.wrote(time.perf_counter() - started)
        self._tell("checkpoint")

    def _write(self, state: State) -> None:
        started = time.perf_counter()
        if self._best_state is not None and self.best is not None:
            file = self.run.checkpoints.save_best(self._best_state, self.history)
            self.best = Best(self.best.epoch, self.best.figure, file)
        path = self.run.checkpoints.save(Checkpoint(state, self.history, self.best, self._train_s))
        self.run.log(
            "checkpoint", step=state.position.step, file=path.name, seconds=round(time.perf_counter() - started, 4)
        )

    def _final(self, reason: str) -> dict[str, Any]:
        """Figures of the chosen weights: the best epoch's where validation steers, else the last."""
        roles = self.program.parts.roles
        chosen, epoch = "last", self.program.position.epoch
        if roles.validation is not None and (best := self.best) is not None:
            loaded = self.world.from_first(lambda: self.run.checkpoints.load_best(best))
            self.program.restore_weights(loaded.state)
            chosen, epoch = "best", best.epoch
        figures: dict[str, Any] = {"test_loss": None, "test_accuracy": None}
        if (test := roles.test) is not None:
            figures |= {f"test_{name}": value for name, value in self._evaluated(test, "test").items()}
        return {**figures, "weights": chosen, "epoch": epoch, "reason": reason}

    def _recent(self, sums: dict[str, float]) -> float | None:
        """Mean training loss since the last look."""
        loss, weight = sums["loss"] - self._read[0], sums["weight"] - self._read[1]
        self._read = sums["loss"], sums["weight"]
        return loss / weight if weight else self._loss

    def _begin_epoch(self) -> None:
        self._read, self._train_s, self._earlier_s, self._steps, self._samples = (0.0, 0.0), 0.0, 0.0, 0, 0
        self.program.look_again(self.callbacks)

    @property
    def _reserve_s(self) -> float:  # for saving, when time is limited
        return 2 * self.cadence.cost_s

    @property
    def _saved_step(self) -> int | None:
        return self._saved.step if self._saved else None

    def _explained(self, error: Exception, during: str = "") -> HotloopError:
        return explained_of_rank(error, self.program, self._saved_step, during)

    def _nonfinite(self, reached: int) -> HotloopError:
        """Replays from the last good State to name the step and the module."""
        if not self.world.alone:
            return nonfinite_of_ranks(reached)
        found = self.run.checkpoints.newest(self.say, best_needed=False)
        self.program.close()
        self.program.optimizer.state.clear()  # makes room for the second program
        self.say("the loss or a parameter is no longer finite; replaying from the last good state to find the place")
        self.program = self.relower()
        self.program.run_eagerly()
        if found is not None:
            self.program.restore(found[0].state)
        figures = {record.epoch - 1: self.steering.value(record) for record in self.history}
        losses = [record.train["loss"] for record in self.history] + ([] if self._loss is None else [self._loss])
        return find_nonfinite(self.program, reached, figures, losses)

    @property
    def learning_rate(self) -> float:
        return float(self.program.optimizer.param_groups[0].get("lr", math.nan))  # an own class may have none

    @property
    def _rate(self) -> float:
        return self._samples / (self._train_s or math.inf)

    def _remaining_s(self) -> float | None:
        position, batches = self.program.position, self.program.feed.batches
        return self.pace.remaining_s(self.history, self.task.epochs - position.epoch, batches, position.batch)

    @PROGRESS.within("callbacks")
    def _tell(self, event: Event, *, reason: str = "", final: dict | None = None) -> None:
        position = self.program.position
        # Copies, so that nothing that a callback does to them reaches training.
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
            samples_per_s=self._rate,
            remaining_s=self._remaining_s(),
            learning_rate=self.learning_rate,
            history=self._shown,
            reason=reason,
            final=None if final is None else dict(final),
        )
        for callback in self.callbacks:
            try:
                callback(view)
            except Exception as error:
                self._save_before_the_end()
                raise explained_of_callback(error, callback, view, self._saved_step) from error

    def _save_before_the_end(self, here: World | None = ALONE) -> None:
        """Saves what was trained before an error ends it, if all ranks are `here` to agree."""
        self.callbacks = ()  # none is to hear of that checkpoint
        if here == self.world and self.program.position.step and self._saved != self.program.position:
            self._save()
