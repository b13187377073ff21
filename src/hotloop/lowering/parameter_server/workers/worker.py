"""The Task's model on a worker: the gradient of one batch under the server's weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from hotloop.core.float32_switches import apply_switches, read_switches
from hotloop.core.number_formats import Float32Switches
from hotloop.core.random.rng import preserve_generators
from hotloop.core.records.training import SourceRecord
from hotloop.core.state import Position, put_values
from hotloop.core.task_parts.models import set_training
from hotloop.data.feeds.rank_rows import RandomAccessFeed
from hotloop.errors import HotloopError, NonFiniteError, PlanError, TaskError, TrainingError, describe_error
from hotloop.lowering.build import lower
from hotloop.lowering.eager_step import EagerStep
from hotloop.lowering.failures.explanation import explain_error
from hotloop.lowering.failures.location import step_under_way
from hotloop.lowering.parameter_server.scheduler import Gradient, WorkerAnswer, WorkerReady, WorkItem
from hotloop.lowering.parameter_server.server import WeightVersion
from hotloop.plan import Plan
from hotloop.task import StepResult, Task, override_fields
from hotloop.task_file import load_from_run


class WorkerReplica:
    """Computes gradients; random draws depend on the place of the batch, not on the worker or the time.

    Args:
        plan: how to run the step in this process alone.
    """

    def __init__(self, task: Task, plan: Plan) -> None:
        self._program = lower(task, plan)
        parts = self._program.parts
        self._model: nn.Module = parts.model
        self._step = _GradientStep(parts)
        self._step.draws.always = True
        self._positions = RandomAccessFeed(self._program.feed)

    def gradient(self, work: WorkItem, weights: WeightVersion) -> Gradient:
        """Returns the gradient of the mean loss of a batch.

        Raises:
            NonFiniteError: loss or gradient aren't finite, and would spoil the weights of all workers.
            HotloopError: the Task's own code raised an error, or memory ran out.
        """
        number = work.epoch * (self._program.feed.batches or 0) + work.batch
        self._program.position = Position(number, work.epoch, work.batch)
        try:
            with preserve_generators(self._program.device):
                self._load(weights)
                return self._check(self._compute(work, number))
        except HotloopError:
            raise
        except Exception as error:
            raise explain_error(error, self._program, None) from error

    def _compute(self, work: WorkItem, number: int) -> Gradient:
        parts = self._program.parts
        batch, samples = self._positions.at(work.epoch, work.batch)
        set_training(self._model, parts.in_eval)
        with ExitStack() as stack:
            for context in parts.around:
                stack.enter_context(context())
            self._step.begin_span()
            computed = self._step.gradients_of(batch, samples, number)
        weight = parts.weigh(batch, samples)
        return Gradient(
            work=work,
            samples=samples,
            loss=computed.loss.detach().cpu(),
            weight=weight.detach().cpu() if isinstance(weight, Tensor) else weight,
            gradients=[None if value.grad is None else value.grad.cpu() for value in self._model.parameters()],
            buffers=[value.detach().to("cpu", copy=True) for value in self._model.buffers()],
            scalars={name: value.detach().cpu() for name, value in computed.scalars.items()},
        )

    def _check(self, gradient: Gradient) -> Gradient:
        gradients = [value for value in gradient.gradients if value is not None]
        if any(value.is_sparse for value in gradients):
            raise PlanError(
                "parallel=async with sparse gradients, which can't be sent to a server",
                expected="dense ones",
                fix="leave out sparse=True of the embedding, or use parallel=none",
            )
        for what, values in (("the loss", [gradient.loss]), ("a gradient", gradients)):
            if not bool(torch.isfinite(torch.nn.utils.get_total_norm(values, float("inf")))):
                raise NonFiniteError(
                    f"{step_under_way(self._program.position)}: {what} is NaN or infinite",
                    fix="use a smaller learning rate, or train with parallel=none, which finds the module",
                )
        return gradient

    @torch.no_grad()
    def _load(self, weights: WeightVersion) -> None:
        for target, value in zip(self._model.parameters(), weights.parameters, strict=True):
            target.copy_(value)
        for buffer, value in zip(self._model.buffers(), weights.buffers, strict=True):
            put_values(buffer, value)


class _GradientStep(EagerStep):
    """A step that ends before the update: the server clips and updates."""

    def gradients_of(self, batch: object, samples: int, number: int) -> StepResult:
        """Computes the parameters' gradients; `number` seeds the step's random draws."""
        return self._backward(batch, samples, number)

    def clip(self, parameters: list[Tensor]) -> None:
        pass


@dataclass(frozen=True)
class RemoteTask:
    """A Task in a form that other processes of this machine can load.

    Attributes:
        source, record: the copy of the Task's source in a run's folder, and the part to load; or
        pickled: a Task made in Python, with functions and classes of `__main__` and of notebooks by value.
        overrides: fields of the Task that the command sets.
        switches: torch's float32 switches in the process that creates this object.
    """

    source: Path | None = None
    record: SourceRecord | None = None
    pickled: bytes = b""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    switches: Float32Switches = field(default_factory=read_switches)

    @classmethod
    def from_task(
        cls, task: Task, source: Path, record: SourceRecord | None, overrides: Mapping[str, Any]
    ) -> RemoteTask:
        """Returns the remote form of a run's Task.

        Raises:
            TaskError: the Task was made in Python, of parts that can't be pickled.
        """
        if record is not None:
            return cls(source.resolve(), record, overrides=dict(overrides))
        try:
            return cls(pickled=cloudpickle.dumps(replace(task, callbacks=())))
        except Exception as error:
            raise TaskError(
                f"the Task can't be sent to other processes: {describe_error(error)}",
                expected="functions, data sets and arrays that can be pickled",
                fix="put the Task into a file, and run: hotloop train file.py",
            ) from error

    def task(self) -> Task:
        """Loads the Task in another process."""
        if self.record is None or self.source is None:
            loaded: Task = cloudpickle.loads(self.pickled)
            return loaded
        return override_fields(load_from_run(self.source, self.record), self.overrides)


class WorkerHost:
    """Builds a replica from a remote Task when needed; returns errors as answers.

    Args:
        workers: number of workers that share the machine's cores.
    """

    def __init__(self, recipe: RemoteTask, plan: Plan, workers: int) -> None:
        self._recipe, self._plan, self._workers = recipe, plan, workers
        self._replica: WorkerReplica | None = None

    def make_ready(self) -> WorkerAnswer:
        if self._plan.threads is None:
            torch.set_num_threads(max(1, torch.get_num_threads() // self._workers))
        try:
            task = self._recipe.task()  # its file may set other switches than the run has
            with apply_switches(self._recipe.switches, torch.device(self._plan.device).type):
                self._replica = WorkerReplica(task, self._plan)
        except Exception as error:
            return _error_answer(error)
        return WorkerReady()

    def gradient(self, work: WorkItem, weights: WeightVersion) -> WorkerAnswer:
        if self._replica is None and isinstance(answer := self.make_ready(), HotloopError):
            return answer
        assert self._replica is not None
        try:
            return self._replica.gradient(work, weights)
        except Exception as error:
            return _error_answer(error)

    def pid(self) -> int:
        """Returns the process id."""
        return os.getpid()


def _error_answer(error: Exception) -> HotloopError:
    return error if isinstance(error, HotloopError) else TrainingError(f"a worker raised {describe_error(error)}")
