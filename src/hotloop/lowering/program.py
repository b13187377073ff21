"""Program: a Plan lowered onto a Task, ready to run."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
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
from hotloop.core.task_parts.models import evaluation_mode, modules_in_eval, set_training
from hotloop.core.task_parts.optimizers import restore_optimizer
from hotloop.core.task_parts.schedules import restore_schedule, schedule_state, steps_left_in_schedule
from hotloop.data.batch_tree import to_device
from hotloop.data.dataset_changes import dataset_summary
from hotloop.data.feeds.batches import RowBatches
from hotloop.data.feeds.feed import Feed, SamplesFeed, StreamFeed, TableFeed
from hotloop.data.feeds.loader_workers import Check, never_stop
from hotloop.data.row_count import count_rows
from hotloop.data.seeded_dataset import SampleWatch
from hotloop.data.sources import Samples, Table
from hotloop.distributed.comm_stats import CommTime
from hotloop.distributed.watchdog import RANK_PROGRESS
from hotloop.errors import PlanError
from hotloop.lowering.checks.batch_rows import BatchChecks
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.eager_step import EagerStep
from hotloop.lowering.object_state.attributes import TaskAttributes, preserve_attributes, worker_changes
from hotloop.lowering.transforms.allocator import keeps_freed_memory, restore_allocator
from hotloop.task import StepResult


@dataclass(frozen=True)
class AdvanceResult:
    """The result of `Program.advance`.

    Attributes:
        steps, samples: numbers of steps and samples run.
        ended: whether the epoch's last batch is done.
    """

    steps: int
    samples: int
    ended: bool


class Program:
    """Runs the steps of a Task under a Plan; losses and sums stay on the device until they are read.

    Attributes:
        position: position of training in the data.
        checks: checks of each batch before its step.
        watched: whether training calls callbacks of the user, which may change the step.
        inexact: a line for each reason found so far why a resumed run may differ from an uninterrupted one.
        check: raises StopRequested while training waits for a batch; see `set_stop`.
        compile_s: seconds of capturing and compiling the step, or of loading a compiled one; 0 without one.
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
        """This rank's averaged weights by parameter name; empty if the Task has no average."""
        return self._step.average

    @property
    def compiled_steps(self) -> int | None:
        """Number of steps that the compiled program ran so far; None without one."""
        return self._step.steps_run

    @property
    def captured(self) -> GraphModule | None:
        """The graph of a compiled or recorded step; None for an eager step."""
        return self._step.graph

    @property
    def recheck_s(self) -> float:
        """Seconds per epoch of checking whether callbacks changed the captured step; see `schedule_recheck`."""
        return self._step.recheck_s if self.watched else 0.0

    @property
    def device(self) -> torch.device:
        return self.parts.device

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices of the program; the plan's device comes first."""
        return self.parts.devices

    def advance(self, steps: int) -> AdvanceResult:
        """Runs up to `steps` steps from the current position, at most to the end of the epoch."""
        self._attributes.begin()
        self._data_changes.begin()
        if self._tells_users:
            self._step.invalidate_bindings()
            self._note_thawed()
            if self._mode.enter_with(self.parts.plan.parallel):
                self._step.schedule_recheck()
        epoch, first = self.position.epoch, self.position.batch
        number, samples = (start := self.position.step), 0
        self.begin_span()
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
        # The length that a stream reports may be wrong: it ends with the first missing batch.
        ended = done < steps or (self.parts.splits.is_exact and first + done == self.feed.batches)
        return AdvanceResult(done, samples, ended)

    def step(self, batch: Any) -> Tensor:
        """Runs one step on a batch of the caller's own loop; returns the loss, 0-dim, detached.

        The batch is moved to the device; the caller applies `prepare` and `augment`, and calls `end_epoch`. The step
        has random streams of its own, so the caller's generators keep their state.
        """
        self.begin_span()
        with preserve_generators(*self.devices), self.around():
            batch = to_device(batch, self.device)
            if self.checks.is_needed:
                self.checks.check(batch, count_rows(batch).number, self.position.step)
            loss = self._step(batch, count_rows(batch).number, self.position.step)
        self.position = Position(self.position.step + 1, self.position.epoch, self.position.batch + 1)
        return loss

    def begin_span(self) -> None:
        self._attributes.begin()
        self._mode.set()
        self._step.begin_span()

    @contextmanager
    def around(self) -> Iterator[None]:
        """Enters the contexts of training steps."""
        with ExitStack() as stack:
            for context in self.parts.around:
                stack.enter_context(context())
            yield

    def prime(self) -> bool:
        """Applies the plan's settings of the process; returns whether the allocator's setting changed."""
        before = keeps_freed_memory()
        with self.around():
            return keeps_freed_memory() != before

    def prepare(self, batch: Any, samples: int) -> None:
        """Compiles or records the step for batches like this one; the State stays the same.

        Raises:
            PlanError: the step can't be captured, compiled or recorded.
        """
        before = self.state()
        self._mode.set()
        with self.around():
            self._step.warm_up(batch, samples)
        self.restore(before)

    def set_stop(self, reason: Callable[[], str | None], check: Check = never_stop) -> None:
        """Sets how the program asks for a reason to stop while a step waits for others, or the training for a batch.

        Ranks stop together, so no rank ends a wait by itself.

        Args:
            reason: returns the reason to stop, or None.
            check: raises StopRequested if there is a reason.
        """
        if self.parts.world.is_single:
            self.check = check
            if isinstance(self.feed, SamplesFeed | StreamFeed):
                self.feed.check = check

    def schedule_recheck(self, callbacks: Iterable[Any]) -> None:
        """Makes a compiled step check that a new capture equals the compiled one, if a callback is the user's.

        Each later call of `advance` binds the current tensors, which callbacks may have replaced.
        """
        self._tells_users = has_user_callbacks(callbacks)
        if self._tells_users:
            self._step.schedule_recheck()
            self._data_changes.report()

    def seed_all(self) -> None:
        """Seeds Python's and NumPy's generators at each later step, drawn from or not."""
        self._step.draws.spare = False

    def run_eagerly(self) -> None:
        """Runs all later steps operation by operation with all generators seeded: a replay that hooks can observe."""
        self._step.run_eagerly()
        self.seed_all()

    def read_sums(self) -> dict[str, float]:
        """Returns the epoch's sums so far as numbers; waits for the device. A collective call."""
        return {name: float(value) for name, value in self._step.totals().items()}

    def take_spent(self) -> CommTime:
        """Returns this rank's communication time since the last call."""
        return self.parts.meter.take()

    def end_epoch(self, figure: float | None = None) -> None:
        """Moves to the next epoch; `figure` is the monitored figure for plateau schedulers."""
        self._step.end_epoch(figure)
        self.position = Position(self.position.step, self.position.epoch + 1, 0)
        self._batches.reset()
        self._data_changes.report_seldom()

    @contextmanager
    def inference(self) -> Iterator[nn.Module]:
        """Yields the model in evaluation mode, without gradients, with averaged weights if the Task has them.

        Afterwards all weights have their former bits: averages are set before `eval()`, which may merge weights.
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
            parameters[name].data, self._step.average[name] = average, parameters[name].data

    def evaluation_model(self, batch: Any, samples: int) -> StepResult | None:
        """Returns the forward pass of a batch within `inference`; None if another rank has the result."""
        return self._step.evaluation_model(batch, samples)

    def check_exactness(self) -> None:
        """Adds to `inexact` the reasons that modules and a data set in worker processes show before training."""
        self.inexact += [*self._step.inexact, *self._attributes.compiled_attributes()]
        self.inexact += worker_changes(self.parts.task, self.parts.plan.workers, self.parts.world.ranks)

    def optimizer_state(self) -> dict[str, Any]:
        """Returns the optimizer's part of the State in training's own memory. A collective call."""
        return self._step.optimizer_state(lent=True)

    def weights(self) -> State:
        """Returns the weights of an evaluation, copied to the CPU. A collective call."""
        self._step.sync_ranks()
        with evaluation_mode([self.model], self._switched) if self._switched else nullcontext():
            return self._step.gather_state(self._weights())

    def state(self, *, lent: bool = False) -> State:
        """Returns all that training changes, on the CPU. A collective call.

        Args:
            lent: skips the copy of tensors on the CPU, for callers that finish with the State before the next step.
        """
        self._step.sync_ranks()
        state = replace(
            self._weights(lent=lent),
            optimizer=self._step.optimizer_state(lent=lent),
            schedule=host_copy(schedule_state(self._step.schedule)),
            sums=sums_on_host(self._step.totals()),
            scaler={} if self._step.scaler is None else self._step.scaler.state_dict(),
        )
        return self._step.gather_state(state)

    def _weights(self, *, lent: bool = False) -> State:
        return State(
            **capture_model(self.model, lent=lent),
            average=to_host(self._step.average, lent=lent),
            loss=host_copy(self._loss_buffers()),
            position=self.position,
            in_eval=sorted(self._mode.in_eval),
            drawn=self._step.draws.drawn,
            attributes=self._changed_attributes(),
            named=self.parts.task.read_state(),
        )

    def _changed_attributes(self) -> dict[str, Any]:
        contents, reasons = self._attributes.changed()
        self.inexact = list(dict.fromkeys([*self.inexact, *reasons]))
        return contents

    def _loss_buffers(self) -> dict[str, Tensor]:
        loss = self.parts.task.loss
        return dict(loss.named_buffers()) if isinstance(loss, nn.Module) else {}

    def restore(self, state: State) -> None:
        """Restores a State, bit by bit.

        Raises:
            CheckpointError: the State belongs to another model or optimizer.
        """
        self._restore_model(state, below=())
        self._restore_optimizer(state)
        restore_schedule(self._step.schedule, state.schedule)
        self._step.reset_sums()
        self._step.sums.update(to_device(host_copy(state.sums), self.device))
        if self._step.scaler is not None and state.scaler:
            self._step.scaler.load_state_dict(dict(state.scaler))
        self._step.on_state_restored()
        self._step.draws.drawn = state.drawn
        self._attributes.restore(state.attributes)
        self.parts.task.restore_state(state.named)
        self.position = state.position
        self._batches.reset()

    def restore_weights(self, state: State) -> None:
        """Restores only the part of a State that an evaluation needs.

        Raises:
            CheckpointError: the State belongs to another model or loss.
        """
        self._restore_model(state, below=("model/", "loss/"))
        if not state.optimizer:  # the State has the weights of an evaluation
            self._switched = []
        elif self._step.switched:
            self._restore_optimizer(state)

    def _restore_model(self, state: State, below: tuple[str, ...]) -> None:
        self._attributes.begin()  # the optimizer's load_state_dict may set attributes
        with self._step.full_parameters():
            restore_model(self.model, state)
            self._step.restore_average(state.average)
        copy_into(self._loss_buffers(), state.loss, "buffer of the loss")
        self._mode.in_eval = frozenset(state.in_eval)
        self._attributes.restore(state.attributes, below)
        self._note_thawed()

    def _restore_optimizer(self, state: State) -> None:
        name = type(self.optimizer).__name__
        changed = restore_optimizer(self.optimizer, self._step.holder, state.optimizer)
        self.inexact += [f"load_state_dict of {name} doesn't restore {path.strip('/')} bit by bit" for path in changed]
        self._switched = self._step.switched

    def _note_thawed(self) -> None:
        """Schedules a recheck if the set of trainable parameters changed."""
        trainable = self._step.trainable()
        if trainable != self._trainable:
            self._trainable = trainable
            self._step.invalidate_bindings()
            self._step.schedule_recheck()

    def schedule_left(self) -> int | None:
        """Returns the steps left in the learning-rate schedule, or the epochs if it steps by epoch; None: no end."""
        return steps_left_in_schedule(self._step.schedule)

    def steps_left(self) -> int | None:
        """Returns the training steps left in the learning-rate schedule; None if schedule or epoch has no end."""
        left, batches = self.schedule_left(), self.feed.batches
        if left is None or self.parts.task.schedule_every != "epoch":
            return left
        return None if batches is None else max(0, left * batches - self.position.batch)

    def close(self) -> None:
        """Ends worker processes, and frees the memory that was cached for steps."""
        self._batches.reset()
        self.feed.close()
        restore_allocator(self.parts)


class TrainingMode:
    """The modes of a model's modules during training.

    Attributes:
        in_eval: names of the modules that stay in evaluation mode.
    """

    def __init__(self, model: nn.Module, in_eval: Collection[str]) -> None:
        self.in_eval = frozenset(in_eval)
        self._model = model

    def set(self) -> None:
        """Switches the model to training mode, except for the modules that stay in evaluation mode."""
        set_training(self._model, self.in_eval)

    def enter_with(self, parallel: str) -> bool:
        """Adopts the modes of single modules that a callback switched; returns whether there are any.

        A switch of the whole model, such as for an evaluation, has no effect.

        Raises:
            PlanError: the plan has several processes, and the callback runs in one of them.
        """
        modes = {module.training for module in self._model.modules()}
        if len(modes) == 1 or (found := modules_in_eval(self._model)) == self.in_eval:
            return False
        if parallel != "none":
            raise PlanError(
                f"parallel={parallel}, and a callback switches the mode of {min(found ^ self.in_eval)!r}",
                expected="modules that stay in the mode in which the model factory returned them",
                fix="use parallel=none",
            )
        self.in_eval = found
        return True


_SHARE = 0.01
"""Largest share of the time that comparisons take, except after callbacks."""


class DataChanges:
    """Compares the Task's data set with its state at the last comparison."""

    def __init__(self, parts: LoweringContext) -> None:
        given = parts.task.roles.train
        is_read = isinstance(given, Samples) and isinstance(parts.splits.train, Table)
        self._dataset = given.dataset if is_read and isinstance(given, Samples) else None
        self._samples, self._task = given, parts.task
        self._watch: SampleWatch | None = None
        self._say = parts.say
        self._summary: tuple[Any, ...] | None = None
        self._next_s = 0.0  # of time.perf_counter()

    def begin(self) -> None:
        """Records the data set before the first step; only the first call has an effect."""
        if self._summary is None:
            self.report()

    def report_seldom(self) -> None:
        """Reports a change as `report` does, as often as the share of the time allows."""
        if self._dataset is not None and time.perf_counter() >= self._next_s:
            self.report()

    def report(self) -> None:
        """Reports once that the data set has changed since it was read."""
        if self._dataset is None:
            return
        began, is_other = time.perf_counter(), False
        now = dataset_summary(self._dataset)
        with preserve_attributes(self._task):  # a data set may count its reads
            if self._watch is None and isinstance(self._samples, Samples):
                self._watch = SampleWatch(self._samples, self._task.seed)
            elif self._watch is not None:
                is_other = self._watch.has_changed()
        if is_other or (self._summary is not None and self._summary != now):
            self._dataset = None
            self._say(
                "the data set has changed since it was read into memory, and training goes on with what was read:"
                " set deterministic=False in the Task, or residency=stream in the plan"
            )
        self._summary = now
        ended = time.perf_counter()
        self._next_s = ended + (ended - began) / _SHARE


class BatchCursor:
    """Opens the feed at the position of training; each call continues until `reset`."""

    def __init__(self, step: EagerStep, checks: BatchChecks) -> None:
        self._step, self._checks = step, checks
        self._batches: Iterator[tuple[Any, int]] | None = None

    @property
    def is_open(self) -> bool:
        return self._batches is not None

    def take(self, feed: Feed, position: Position, steps: int) -> Iterator[tuple[Any, int]]:
        """Returns up to `steps` checked batches of the position's epoch."""
        if self._batches is None:
            self._batches = self._open(feed, position)
            self._step.row_arrays = _row_arrays(feed)
        taken: Iterator[Any] = (
            self._batches.take(steps) if isinstance(self._batches, RowBatches) else islice(self._batches, steps)
        )
        if not self._step.parts.world.is_single:
            taken = _record_batches(taken, position.step)
        return self._checks.check_while_passing(taken, position.step) if self._checks.is_needed else taken

    def reset(self) -> None:
        """Closes the feed. The next `take` reopens the feed, and repeats batches that weren't used for training."""
        self._batches = None

    def _open(self, feed: Feed, position: Position) -> Iterator[tuple[Any, int]]:
        if self._step.cuts_batches and not self._checks.is_needed and isinstance(feed, TableFeed) and feed.is_untouched:
            return feed.row_batches(position.epoch, position.batch)
        return feed.epoch(position.epoch, position.batch)


def _record_batches(batches: Iterator[tuple[Any, int]], step: int) -> Iterator[tuple[Any, int]]:
    for number, batch in enumerate(batches, step + 1):
        RANK_PROGRESS.begin_step(number)
        yield batch


def _row_arrays(feed: Feed) -> Any:
    """Returns the arrays whose rows are the batches; None if batches are transformed or on another device."""
    if isinstance(feed, TableFeed) and feed.is_untouched and feed.treatment.device.type == "cpu":
        return feed.table.columns
    return None
