"""Program: a Plan lowered onto a Task, ready to run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from hotloop.core.callback import has_user_callbacks
from hotloop.core.random.rng import preserve_generators
from hotloop.core.state import (
    Position,
    State,
    capture_model,
    copy_into,
    host_copy,
    restore_model,
    sums_on_host,
    to_host,
)
from hotloop.core.task_parts.module_modes import evaluation_mode
from hotloop.core.task_parts.optimizer_state import restore_state as restore_optimizer
from hotloop.core.task_parts.schedules import schedule_state
from hotloop.data.batch_tree import to_device
from hotloop.data.feeds.feed import Feed, SamplesFeed, StreamFeed
from hotloop.data.feeds.loader_workers import Check, never_stop
from hotloop.data.row_count import count_rows
from hotloop.distributed.comm_stats import CommTime
from hotloop.lowering.batch_cursor import BatchCursor
from hotloop.lowering.checks.batch_rows import BatchChecks
from hotloop.lowering.checks.dataset_staleness import DataChanges
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.eager_step import EagerStep
from hotloop.lowering.object_state.attributes import TaskAttributes, worker_changes
from hotloop.lowering.object_state.schedule_state import restore_schedule, steps_left_in_schedule
from hotloop.lowering.training_mode import TrainingMode
from hotloop.lowering.transforms.allocator import keeps_freed_memory, restore_allocator
from hotloop.task import StepResult


@dataclass(frozen=True)
class AdvanceResult:
    """What a call of `advance` did.

    Attributes:
        steps, samples: how many were run.
        ended: whether the epoch's last batch is done.
    """

    steps: int
    samples: int
    ended: bool


class Program:
    """Runs the steps of a Task under a Plan; losses and sums stay on the device until they are read.

    Attributes:
        position: where in the data training stands.
        checks: of each batch before its step.
        watched: whether callbacks of the user's are called in training, which may change what the step does.
        inexact: a line for each reason found so far why a resumed run may differ from an uninterrupted one.
        check: raises Stopped, for who waits for a batch; see `set_stop`.
        compile_s: seconds that capturing and compiling the step took, or loading it compiled; 0 if it isn't.
    """

    def __init__(self, parts: LoweringContext, step: EagerStep, feed: Feed) -> None:
        self.parts = parts
        self.feed = feed
        self.position = Position()
        self.compile_s = 0.0
        self.check: Check = never_stop
        self.watched = has_user_callbacks(parts.task.callbacks)
        self.inexact: list[str] = []
        self.checks = BatchChecks(parts)
        self._step = step
        self._mode = TrainingMode(parts.model, parts.in_eval)
        self._switched = step.switched
        self._trainable = step.trainable()
        self._attributes = TaskAttributes(parts.task, step.objects(), step.saved_tensors)
        self._batches = BatchCursor(step, self.checks)
        self._tells_users = False
        self._data_changes = DataChanges(parts)
        if feed.reseeds or not parts.world.is_single:
            self.seed_all()

    @property
    def model(self) -> nn.Module:
        return self.parts.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._step.optimizer

    @property
    def average(self) -> dict[str, Tensor]:
        """Averaged weights by parameter name, of what this rank holds; empty if the Task has no average."""
        return self._step.average

    @property
    def compiled_steps(self) -> int | None:
        """How many steps its compiled program took so far; None where none was compiled."""
        return self._step.steps_run

    @property
    def captured(self) -> GraphModule | None:
        """The graph of the step that was compiled or recorded; None where it runs operation by operation."""
        return self._step.graph

    @property
    def recheck_s(self) -> float:
        """Seconds in each epoch of seeing whether callbacks have changed what was compiled; see `schedule_recheck`."""
        return self._step.look_s if self.watched else 0.0

    @property
    def device(self) -> torch.device:
        return self.parts.device

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All that it computes on, the plan's first."""
        return self.parts.devices

    def advance(self, steps: int) -> AdvanceResult:
        """Runs up to `steps` steps from the present position, not past the end of the epoch."""
        self._attributes.begin()
        if self._tells_users:
            self._step.invalidate_bindings()
            self._note_thawed()
            if self._mode.enter_with(self.parts.plan.parallel):
                self._step.schedule_recheck()
        epoch, first = self.position.epoch, self.position.batch
        number = start = self.position.step
        self._mode.set()
        self._step.begin_span()
        samples = 0
        try:
            with self.around():
                for done, size in self._step.run(self._batches.take(self.feed, self.position, steps), start):
                    number += done
                    samples += size
        except BaseException:
            self._batches.reset()
            raise
        finally:
            done = number - start
            self.position = Position(number, epoch, first + done)
        self.inexact += self._step.owned.find_late()
        # A stream's own word on its length may be wrong: it has ended when nothing comes any more.
        ended = done < steps or (self.parts.splits.is_exact and first + done == self.feed.batches)
        return AdvanceResult(done, samples, ended)

    def step(self, batch: Any) -> Tensor:
        """Runs one step on a batch of the caller's, for a loop of one's own; returns the loss, 0-dim, detached.

        The batch is moved to the device; `prepare`, `augment` and `end_epoch` are the caller's affair. The caller's
        random generators stay as they are, since the step's draws come from streams of its own.
        """
        self._attributes.begin()
        self._mode.set()
        self._step.begin_span()
        with preserve_generators(*self.devices), self.around():
            batch = to_device(batch, self.device)
            if self.checks.is_needed:
                self.checks.check(batch, count_rows(batch).number, self.position.step)
            loss = self._step(batch, count_rows(batch).number, self.position.step)
        self.position = Position(self.position.step + 1, self.position.epoch, self.position.batch + 1)
        return loss

    @contextmanager
    def around(self) -> Iterator[None]:
        """The contexts that training steps run in."""
        with ExitStack() as stack:
            for context in self.parts.around:
                stack.enter_context(context())
            yield

    def prime(self) -> bool:
        """Sets what the plan changes in the process; whether the process kept memory by another plan before."""
        before = keeps_freed_memory()
        with self.around():
            return keeps_freed_memory() != before

    def prepare(self, batch: Any, samples: int) -> None:
        """Compiles or records the step for batches like this one; the State stays as it is.

        Raises:
            PlanError: it can't be captured, compiled or recorded.
        """
        before = self.state()
        self._mode.set()
        with self.around():
            self._step.warm_up(batch, samples)
        self.restore(before)

    def set_stop(self, reason: Callable[[], str | None], check: Check = never_stop) -> None:
        """Says how to ask why to stop, if there is a reason: for who may wait for others within a step, or for a batch.

        Ranks go on together, so that none of them gives up a wait by itself.

        Args:
            check: raises Stopped if there is a reason.
        """
        if self.parts.world.is_single:
            self.check = check
            if isinstance(self.feed, SamplesFeed | StreamFeed):
                self.feed.check = check

    def schedule_recheck(self, callbacks: Iterable[Any]) -> None:
        """Has a compiled step see whether it still does what was compiled, if one of these callbacks is the user's.

        From then on each call of `advance` begins with the tensors that are there, which callbacks may have replaced.
        """
        self._tells_users = has_user_callbacks(callbacks)
        if self._tells_users:
            self._step.schedule_recheck()
            self._data_changes.report()

    def seed_all(self) -> None:
        """From now on, seeds Python's and NumPy's generators at each step, drawn from or not."""
        self._step.draws.spare = False

    def run_eagerly(self) -> None:
        """From now on, runs operation by operation whatever was compiled, with all seeded: a replay that hooks can see."""
        self._step.run_eagerly()
        self.seed_all()

    def read_sums(self) -> dict[str, float]:
        """The epoch's sums so far as numbers; waits for the device, and all ranks ask for them together."""
        return {name: float(value) for name, value in self._step.totals().items()}

    def take_spent(self) -> CommTime:
        """What this rank has spent on the others since the last call."""
        return self.parts.meter.take()

    def end_epoch(self, figure: float | None = None) -> None:
        """Goes on to the next epoch; `figure` is the monitored one, which plateau schedulers watch."""
        self._step.end_epoch(figure)
        self.position = Position(self.position.step, self.position.epoch + 1, 0)
        self._batches.reset()

    @contextmanager
    def inference(self) -> Iterator[nn.Module]:
        """The model in evaluation mode, without gradients, with averaged weights if the Task has them.

        Afterwards all weights have the bits that they had: averages come before `eval()`, which may merge weights.
        """
        loss = self.parts.task.loss
        modules = [self.model, loss] if isinstance(loss, nn.Module) else [self.model]
        self._step.sync_ranks()
        with torch.no_grad(), self._step.full_model():
            self._swap_average()
            try:
                with evaluation_mode(modules, self._switched):
                    yield self.model
            finally:
                self._swap_average()

    def _swap_average(self) -> None:
        parameters = dict(self.model.named_parameters())
        for name, average in self._step.average.items():
            live = parameters[name].data
            parameters[name].data, self._step.average[name] = average, live

    def evaluation_model(self, batch: Any, samples: int) -> StepResult | None:
        """Within `inference`, the forward pass of a batch; None where another rank has what came of it."""
        return self._step.evaluation_model(batch, samples)

    def check_exactness(self) -> None:
        """Notes before training what shows then that a resumed run may differ: in modules, and in a data set that workers have."""
        self.inexact += self._attributes.compiled_attributes()
        self.inexact += worker_changes(self.parts.task, self.parts.plan.workers, self.parts.world.ranks)

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's part of the State, in training's own memory; of several ranks all must ask."""
        return self._step.optimizer_state(lent=True)

    def weights(self) -> State:
        """The weights that an evaluation uses, copied to the CPU; of several ranks all must ask."""
        self._step.sync_ranks()
        with evaluation_mode([self.model], self._switched) if self._switched else nullcontext():
            return self._step.gather_state(self._weights())

    def state(self, *, lent: bool = False) -> State:
        """Everything that training changes, on the CPU; of several ranks all must ask.

        Args:
            lent: what lies there already isn't copied, for who is done with it before anything is trained on.
        """
        self._step.sync_ranks()
        own = replace(
            self._weights(lent=lent),
            optimizer=self._step.optimizer_state(lent=lent),
            schedule=host_copy(schedule_state(self._step.schedule)),
            sums=sums_on_host(self._step.totals()),
            scaler={} if self._step.scaler is None else self._step.scaler.state_dict(),
            outer=to_host(self._step.outer, lent=lent),
        )
        return self._step.gather_state(own)

    def _weights(self, *, lent: bool = False) -> State:
        """This process' own."""
        return State(
            **capture_model(self.model, lent=lent),
            average=to_host(self._step.average, lent=lent),
            loss=host_copy(self._loss_buffers()),
            position=self.position,
            in_eval=sorted(self._mode.in_eval),
            drawn=self._step.draws.drawn,
            attributes=self._changed_attributes(),
        )

    def _changed_attributes(self) -> dict[str, Any]:
        contents, reasons = self._attributes.changed()
        self.inexact = list(dict.fromkeys([*self.inexact, *reasons]))
        return contents

    def _loss_buffers(self) -> dict[str, Tensor]:
        loss = self.parts.task.loss
        return dict(loss.named_buffers()) if isinstance(loss, nn.Module) else {}

    def restore(self, state: State) -> None:
        """Goes to a State, bit by bit.

        Raises:
            CheckpointError: it belongs to another model or optimizer.
        """
        self._restore_model(state, below=())
        self._restore_optimizer(state)
        restore_schedule(self._step.schedule, state.schedule)
        self._step.reset_sums()
        self._step.sums.update(to_device(host_copy(state.sums), self.device))
        if self._step.scaler is not None and state.scaler:
            self._step.scaler.load_state_dict(dict(state.scaler))
        if self._step.outer:
            copy_into(self._step.outer, state.outer or host_copy(self._step.outer), "outer momentum")
        self._step.on_state_restored()
        self._step.draws.drawn = state.drawn is not False
        self._attributes.restore(state.attributes)
        self.position = state.position
        self._batches.reset()

    def restore_weights(self, state: State) -> None:
        """Goes to what an evaluation depends on alone.

        Raises:
            CheckpointError: it belongs to another model or loss.
        """
        self._restore_model(state, below=("model/", "loss/"))
        if not state.optimizer:  # the weights that an evaluation uses were saved
            self._switched = []
        elif self._step.switched:
            self._restore_optimizer(state)

    def _restore_model(self, state: State, below: tuple[str, ...]) -> None:
        self._attributes.begin()  # before the optimizer's load_state_dict sets some
        with self._step.full_parameters():
            restore_model(self.model, state)
            self._step.restore_average(state.average)
        copy_into(self._loss_buffers(), state.loss, "buffer of the loss")
        if state.in_eval is not None:
            self._mode.in_eval = frozenset(state.in_eval)
        self._attributes.restore(state.attributes, below)
        self._note_thawed()

    def _restore_optimizer(self, state: State) -> None:
        name = type(self.optimizer).__name__
        changed = restore_optimizer(self.optimizer, self._step.holder, state.optimizer)
        self.inexact += [f"load_state_dict of {name} doesn't restore {path.strip('/')} bit by bit" for path in changed]
        self._switched = self._step.switched

    def _note_thawed(self) -> None:
        """Has the step check whether it does the same, if other parameters are trainable than before."""
        trainable = self._step.trainable()
        if trainable != self._trainable:
            self._trainable = trainable
            self._step.invalidate_bindings()
            self._step.schedule_recheck()

    def schedule_left(self) -> int | None:
        """Steps that the learning-rate schedule can still take, or epochs if it goes by these; None if it has no end."""
        return steps_left_in_schedule(self._step.schedule)

    def steps_left(self) -> int | None:
        """Training steps that the learning-rate schedule allows from here; None if it has no end, or an epoch none."""
        left, batches = self.schedule_left(), self.feed.batches
        if left is None or self.parts.task.schedule_every != "epoch":
            return left
        return None if batches is None else max(0, left * batches - self.position.batch)

    def close(self) -> None:
        """Ends worker processes, and gives back the memory that was kept for steps."""
        self._batches.reset()
        self.feed.close()
        restore_allocator(self.parts)
