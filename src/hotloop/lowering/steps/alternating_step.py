"""The step of a Task with several optimizers, whose `step` yields a loss for each update."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing, nullcontext
from typing import Any

import torch
from torch import Tensor

from hotloop.core.task_parts.losses import YieldedLoss, YieldedLosses
from hotloop.core.task_parts.models import default_device
from hotloop.core.task_parts.optimizers import NamedOptimizers
from hotloop.errors import TaskError, type_name
from hotloop.lowering.checks.first_step import check_clipping, check_losses
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.eager_step import WEIGHT_SUMS, EagerStep, needs_closure
from hotloop.lowering.transforms.optimizer import flush_subnormals
from hotloop.lowering.transforms.precision import autocast_context
from hotloop.task import StepResult


class AlternatingStep(EagerStep):
    """Updates one optimizer's parameters after each loss that the Task's `step` yields; then `step` continues."""

    optimizer: NamedOptimizers

    def __init__(self, parts: LoweringContext) -> None:
        super().__init__(parts)
        self._updated: set[str] = set()  # names of the optimizers that updated parameters in this batch
        for name, member in self.optimizer.members.items():
            if needs_closure(member):
                raise TaskError(
                    f"the optimizer {name!r} ({type(member).__name__}) calls the loss itself, and a yielded loss can't be"
                    " called again",
                    fix="use another optimizer",
                )

    def _clear_gradients(self) -> None:
        for value in self._filled:
            value.grad = None

    def _list_parameters(self) -> None:
        super()._list_parameters()
        self._own: dict[str, list[Tensor]] = {
            name: [value for group in member.param_groups for value in group["params"]]
            for name, member in self.optimizer.members.items()
        }

    def _run(self, batch: Any, samples: int, step: int) -> StepResult:
        self.draws.seed(step)
        self._clear_gradients()
        self._updated.clear()
        watched = nullcontext() if self._checked else check_losses(self.parts, batch)
        # The contexts stay open between updates, because `step` opens its own contexts inside them.
        with watched, default_device(self.parts.model), autocast_context(self.parts):
            generator = self._generator(batch)
            turns = YieldedLosses(generator)
            with closing(generator):
                for turn in turns:
                    self._update_member(turn)
        self._checked = True
        if self._sweeps:
            flush_subnormals(self.optimizer, step)
        loss, scalars = turns.figures()
        return StepResult(loss, None, scalars)

    def _generator(self, batch: Any) -> Generator[Any, Any, Any]:
        assert self.parts.task.step is not None
        made = self.parts.task.step(self.parts.model, batch)
        if not isinstance(made, Generator):
            raise TaskError(
                f"step returned {type_name(made)}, and the Task has the optimizers {self._names}",
                expected="a generator, which yields (name, loss) for each update",
                fix="yield the loss of each optimizer in turn",
            )
        return made

    def _update_member(self, turn: YieldedLoss) -> None:
        """Computes the gradients of one yielded loss and updates its optimizer's parameters."""
        name, loss = turn.name, turn.loss
        if name not in self._own:
            raise TaskError(f"step yielded a loss for {name!r}", expected=f"one of the optimizers {self._names}")
        values = [value for value in self._own[name] if value.requires_grad]
        if not values:
            raise TaskError(
                f"step yielded a loss for {name!r}, whose parameters are all frozen",
                fix="yield none while they are, or set requires_grad before the yield",
            )
        if name not in self._updated and any(value.grad is not None for value in values):
            raise TaskError(
                f"step called backward() itself, and so gave gradients to the parameters of {name!r}",
                expected="losses alone: each yield clears the gradients of its optimizer",
                fix="yield the sum of the losses, or use torch.autograd.grad for a gradient inside of a loss",
            )
        self._updated.add(name)
        member = self.optimizer.members[name]
        if type(member).zero_grad is not torch.optim.Optimizer.zero_grad:
            member.zero_grad()
        for value in self._own[name]:
            value.grad = None
        with torch.autocast(self.parts.device.type, enabled=False):  # `step` may have enabled autocast
            if loss.requires_grad:
                loss.backward(inputs=values)
            if all(value.grad is None for value in values):
                raise TaskError(
                    f"the loss yielded for {name!r} depends on no parameter of that optimizer",
                    expected="a loss to differentiate by its parameters",
                    fix="check the name, detach() and torch.no_grad()",
                )
            if not self._checked:
                check_clipping(self.parts.task, self._trainable)
            self.clip(values)
            member.step()
        torch.clear_autocast_cache()  # the cache has casts of the weights before the update

    @property
    def _names(self) -> str:
        return ", ".join(map(repr, self._own))

    def _add(self, loss: Tensor, scalars: dict[str, Tensor], weight: Any) -> None:
        """Adds the weight per figure as well, because a batch may have no loss for one of the optimizers."""
        super()._add(loss, scalars, weight)
        for name in scalars:
            self.sums[WEIGHT_SUMS + name] = self.sums.get(WEIGHT_SUMS + name, 0) + weight
