"""The Task's model on a worker: the gradient of one batch under given weights."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor, nn

from hotloop.data.positions import Positions
from hotloop.errors import HotloopError, NonFiniteError, PlanError
from hotloop.lowering import lower
from hotloop.lowering.step import EagerStep
from hotloop.modes import set_training
from hotloop.parallel.crew import Gradient
from hotloop.parallel.ledger import Work
from hotloop.parallel.server import Weights
from hotloop.plan import Plan
from hotloop.rng import preserved
from hotloop.state import Position, put_values
from hotloop.task import Computed, Task
from hotloop.trouble import explained
from hotloop.trouble.place import step_under_way


class Replica:
    """Computes gradients; random draws follow from the place of the batch, whoever computes it and when.

    Args:
        plan: how to run the step in this process alone.
    """

    def __init__(self, task: Task, plan: Plan) -> None:
        self._program = lower(task, plan)
        parts = self._program.parts
        self._model: nn.Module = parts.model
        self._step = _GradientStep(parts)
        self._step.draws.always = True
        self._positions = Positions(self._program.feed)

    def gradient(self, work: Work, weights: Weights) -> Gradient:
        """The gradient of the mean loss of a batch.

        Raises:
            NonFiniteError: loss or gradient are no finite numbers, and would spoil what all workers are given.
            HotloopError: the Task's own code raised something, or memory ran out.
        """
        number = work.epoch * (self._program.feed.batches or 0) + work.batch
        self._program.position = Position(number, work.epoch, work.batch)
        try:
            with preserved(self._program.device):
                self._load(weights)
                return self._checked(self._computed(work, number))
        except HotloopError:
            raise
        except Exception as error:
            raise explained(error, self._program, None) from error

    def _computed(self, work: Work, number: int) -> Gradient:
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

    def _checked(self, gradient: Gradient) -> Gradient:
        """The same, if it may be sent."""
        found = [value for value in gradient.gradients if value is not None]
        if any(value.is_sparse for value in found):
            raise PlanError(
                "parallel=async with sparse gradients, which can't be sent to a server",
                expected="dense ones",
                fix="leave out sparse=True of the embedding, or use parallel=none",
            )
        for what, values in (("the loss", [gradient.loss]), ("a gradient", found)):
            if not bool(torch.isfinite(torch.nn.utils.get_total_norm(values, float("inf")))):
                raise NonFiniteError(
                    f"{step_under_way(self._program.position)}: {what} is NaN or infinite",
                    fix="use a smaller learning rate, or train with parallel=none, which finds the module",
                )
        return gradient

    @torch.no_grad()
    def _load(self, weights: Weights) -> None:
        for target, value in zip(self._model.parameters(), weights.parameters, strict=True):
            target.copy_(value)
        for buffer, value in zip(self._model.buffers(), weights.buffers, strict=True):
            put_values(buffer, value)


class _GradientStep(EagerStep):
    """A step that ends before the update: clipping and all that follows is the server's."""

    def gradients_of(self, batch: object, samples: int, number: int) -> Computed:
        """Leaves the gradients in the parameters; `number` is what the step's random draws follow from."""
        return self._backward(batch, samples, number)

    def clip(self, parameters: list[Tensor]) -> None:
        pass
