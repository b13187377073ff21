"""Models of one structure as one stack of tensors, and their losses and gradients by one vectorized computation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from hotloop.data.batch_tree import batch_inputs, map_tensors, tree_tensors
from hotloop.lowering.context import LoweringContext
from hotloop.task import StepResult, forward


class ModelStack:
    """The models of several trials; each parameter and buffer of a model is a row of a stacked tensor.

    The optimizer, the checkpoints and the evaluation of a trial use the rows as ordinary tensors.

    Attributes:
        parameters, buffers: name -> tensor (trials, ...).
        shares_batch: whether all trials get the same batch, instead of a stack of batches.
        shares_draws: whether all trials draw the same random numbers; else a draw is an error.
        has_common_loss: whether one loss serves all trials; else each trial's own loss gets its row of the outputs.
    """

    def __init__(
        self, contexts: Sequence[LoweringContext], *, shares_batch: bool, shares_draws: bool, has_common_loss: bool
    ) -> None:
        self.contexts = list(contexts)
        self.shares_batch, self.shares_draws, self.has_common_loss = shares_batch, shares_draws, has_common_loss
        models = [context.model for context in contexts]
        self.parameters = _stack([dict(model.named_parameters()) for model in models])
        self.buffers = _stack([dict(model.named_buffers()) for model in models])
        trainable = {name for name, value in models[0].named_parameters() if value.requires_grad}
        self._leaves = {name: self.parameters[name].requires_grad_() for name in self.parameters if name in trainable}
        self._rows = [[dict(model.named_parameters())[name] for name in self._leaves] for model in models]
        self._template = _Computation(contexts[0], has_loss=has_common_loss)
        self._compute = self._vectorize()

    def _vectorize(self) -> Callable[..., Any]:
        template = self._template

        def compute(parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: Any) -> Any:
            tensors = {f"model.{name}": value for name, value in (parameters | buffers).items()}
            result = functional_call(template, tensors, (batch,))
            return result, {name: tensors[f"model.{name}"] for name in buffers}  # functional_call writes them back

        batch_dim = None if self.shares_batch else 0
        return vmap(compute, in_dims=(0, 0, batch_dim), randomness="same" if self.shares_draws else "error")

    def compute(self, batches: Sequence[Any], active: Sequence[int]) -> list[StepResult]:
        """Computes losses and gradients of all trials, and updates the buffers of the `active` trials.

        Args:
            batches: one for each trial; the first one alone is used if all trials share their batches.

        Returns:
            A result for each trial, without the output. The parameters of all trials have new gradients.
        """
        self._template.train_as(self.contexts[0].model)
        batch = batches[0] if self.shares_batch else _stack_batches(batches)
        buffers = {name: value.clone() for name, value in self.buffers.items()}
        result, changed = self._compute(self.parameters, buffers, batch)
        results = self._results(result, batches)
        total = torch.stack([one.loss for one in results]).sum() if not self.has_common_loss else result[0].sum()
        gradients = torch.autograd.grad(total, list(self._leaves.values()), allow_unused=True)
        self._assign_gradients(gradients)
        self._store_buffers(changed, active)
        return results

    def _results(self, result: Any, batches: Sequence[Any]) -> list[StepResult]:
        count = len(self.contexts)
        if self.has_common_loss:
            losses, scalars = result
            named = [{name: value[trial] for name, value in scalars.items()} for trial in range(count)]
            return [StepResult(loss, None, named[trial]) for trial, loss in enumerate(losses.unbind())]
        rows = [map_tensors(lambda value, trial=trial: value[trial], result) for trial in range(count)]  # type: ignore[misc]
        return [
            StepResult(_own_loss(context, output, batch), None, {})
            for context, output, batch in zip(self.contexts, rows, self._each(batches), strict=True)
        ]

    def _each(self, batches: Sequence[Any]) -> Sequence[Any]:
        return [batches[0]] * len(self.contexts) if self.shares_batch else batches

    def _assign_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for place, gradient in enumerate(gradients):
            # fused kernels read a gradient in the order of memory, as that of its parameter
            parts = [None] * len(self._rows) if gradient is None else gradient.contiguous().unbind()
            for row, part in zip(self._rows, parts, strict=True):
                row[place].grad = part

    @torch.no_grad()
    def _store_buffers(self, changed: dict[str, Tensor], active: Sequence[int]) -> None:
        is_whole = len(active) == len(self.contexts)
        for name, value in changed.items():
            if is_whole:
                self.buffers[name].copy_(value)
            else:
                self.buffers[name][list(active)] = value[list(active)]


def _stack(named: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stacks tensors by name, and makes each of them a view of its row."""
    stacked = {name: torch.stack([one[name].detach() for one in named]) for name in named[0]}
    for name, rows in stacked.items():
        for one, row in zip(named, rows.unbind(), strict=True):
            one[name].data = row
    return stacked


def _stack_batches(batches: Sequence[Any]) -> Any:
    columns = zip(*map(tree_tensors, batches), strict=True)
    stacked = iter([torch.stack(column) for column in columns])
    return map_tensors(lambda _: next(stacked), batches[0])


def _own_loss(context: LoweringContext, output: Any, batch: Any) -> Tensor:
    assert context.task.loss is not None
    return context.task.loss(output, batch[-1])


class _Computation(nn.Module):
    """The forward pass of a trial as a module, whose tensors `functional_call` replaces; the loss is optional."""

    def __init__(self, context: LoweringContext, *, has_loss: bool) -> None:
        super().__init__()
        self.model = copy.deepcopy(context.model)
        self._context, self._has_loss = [context], has_loss  # the list hides the loss module from `modules()`

    def train_as(self, model: nn.Module) -> None:
        """Gives each module the mode of its counterpart."""
        for own, other in zip(self.model.modules(), model.modules(), strict=True):
            own.training = other.training

    def forward(self, batch: Any) -> Any:
        (context,) = self._context
        if self._has_loss:
            computed = context.compute(self.model, batch)
            return computed.loss, computed.scalars
        return forward(self.model, batch_inputs(batch))
