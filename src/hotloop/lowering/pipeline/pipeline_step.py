"""The parallel axis with pipeline stages: each rank has some layers, and microbatches pass from stage to stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from hotloop.core.state import State
from hotloop.core.task_parts.losses import weight_mean
from hotloop.data.batch_tree import batch_length, map_tensors
from hotloop.data.feeds.feed import first_batch
from hotloop.distributed.wrappers.global_batch_rng import DrawPattern
from hotloop.errors import PlanError
from hotloop.lowering.checks.first_step import check_clipping, check_loss
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.eager_step import EagerStep
from hotloop.lowering.pipeline.graph_split import LossModule, batch_leaves, draws_error, no_backward_error
from hotloop.lowering.pipeline.microbatch_runner import MicrobatchRunner, ScheduledRng
from hotloop.lowering.pipeline.ownership import StageOwnership
from hotloop.lowering.pipeline.partition import StageChain, example_leaves, microbatch_rows, resolve_split
from hotloop.lowering.steps.data_parallel import find_joint_ops
from hotloop.task import StepResult


class PipelineStep(EagerStep):
    """One training step of all ranks, each with some layers of the model.

    All ranks read the same batch. Losses of microbatches are weighted by their share of the batch's weight, so that the
    sum of their gradients is the batch's gradient.
    """

    def __init__(self, parts: LoweringContext) -> None:
        like = first_batch(parts.splits)
        batch_leaves(like, batch_length(like))
        objective = LossModule(parts.model, parts.task, like, parts.in_eval)
        seen = find_joint_ops(replace(parts, device=torch.device("cpu")))
        if seen.elsewhere:
            raise draws_error()
        if seen.scripted:
            raise no_backward_error(seen.scripted)
        parts = resolve_split(parts, objective)
        chain = StageChain.from_plan(parts, objective.train(), example_leaves(parts, microbatch_rows(parts)))
        self._ownership = StageOwnership(parts.model, chain.stage_holders(), parts.world)
        self._ownership.move_to_owners(parts.device, objective.loss)
        super().__init__(parts)
        computed = chain.traced.result(chain.piece_shapes[-1].leaving)
        check_loss(computed.loss)
        self._checked = True
        self._names = list(computed.scalars)
        check_clipping(self.parts.task, self._trainable)
        self.average = {name: value for name, value in self.average.items() if name in self._ownership.own}
        self._list_parameters()
        self._shared = self._ownership.shared_tensors()
        self._runner = MicrobatchRunner(parts, objective, self._ownership, self._schedule_draws(seen.draws, chain))
        self.draws.always = True  # else ranks would have to agree whether any drew from Python's generator

    def _schedule_draws(self, pattern: DrawPattern, chain: StageChain) -> ScheduledRng | None:
        """Returns the draws of the stages if these can be those of one process; else None."""
        odd = pattern.odd
        if not odd and sum(len(seen.drawings) for seen in chain.piece_shapes) != pattern.count:
            odd = "what draws otherwise when it is exported"
        if not odd:
            return ScheduledRng(pattern, self.parts.world.rank)
        self.draws = self._step_draws(self.parts.device, rank=self.parts.world.rank)
        self.parts.say(f"each rank draws its own random numbers, which differ from those of one process: {odd}")
        return None

    def _backward(self, batch: Any, samples: int, step: int) -> StepResult:
        self.draws.seed(step)
        self._clear_gradients()
        weights = self._weights(batch, samples, self.parts.weigh)
        shares = torch.where(weights == 0, 0.0, weights / weights.sum())
        found = self._runner(batch_leaves(batch, samples), shares)
        for value, group in self._shared:
            if value.grad is None:
                value.grad = torch.zeros_like(value)
            dist.all_reduce(value.grad, group=group)
        computed = self._report(mean_result(found, weights) if found else None)
        self.clip(self._trainable)
        return computed

    def _weights(self, batch: Any, samples: int, weigh: Callable[[Any, int], Any]) -> Tensor:
        """Returns the weight of each microbatch's loss: (microbatches,)."""
        weights = []
        for first, rows in self._runner.sizes(samples):
            part = map_tensors(lambda value, cut=slice(first, first + rows): value[cut], batch)  # type: ignore[misc]
            weights.append(torch.as_tensor(weigh(part, rows), device=self.parts.device).to(self.sums["loss"].dtype))
        return torch.stack(weights)

    def _report(self, found: StepResult | None) -> StepResult:
        values = torch.zeros(1 + len(self._names), dtype=self.sums["loss"].dtype, device=self.parts.device)
        if found is not None:
            values = torch.stack([found.loss, *found.scalars.values()])
        dist.broadcast(values, src=self.parts.world.ranks - 1)
        loss, *scalars = values.unbind()
        return StepResult(loss, None, dict(zip(self._names, scalars, strict=True)))

    def clip(self, parameters: list[Tensor]) -> None:
        """Clips as the Task asks, by the norm of all ranks' gradients together."""
        task = self.parts.task
        if task.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, task.clip_norm, self._norm(parameters))
        if task.clip_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, task.clip_value)

    def _norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Returns the norm of all gradients, each from the rank that owns the parameter.

        The order of the model's parameters makes the norm independent of the split.
        """
        norms = torch.zeros(len(parameters), dtype=torch.float32, device=self.parts.device)
        norms = norms.to(torch.promote_types(torch.float32, parameters[0].dtype))
        for place, value in enumerate(parameters):
            if value.grad is not None and self._ownership.owns_tensor(value):
                norms[place] = torch.linalg.vector_norm(value.grad)
        dist.all_reduce(norms)
        return torch.linalg.vector_norm(norms)

    def restore_average(self, average: dict[str, Tensor]) -> None:
        super().restore_average({name: value for name, value in average.items() if name in self._ownership.own})

    def full_parameters(self) -> AbstractContextManager[None]:
        return self._ownership.full_parameters()

    def gather_state(self, state: State) -> State:
        return self._ownership.gather_state(state)

    def on_state_restored(self) -> None:
        """Drops the restored optimizer state of other ranks' parameters."""
        for value in self._ownership.elsewhere:
            self.optimizer.state.pop(value, None)

    def evaluation_model(self, batch: Any, samples: int) -> StepResult | None:
        """Computes the forward pass of a batch by all stages; only the rank of the last stage gets a result."""
        found = self._runner(batch_leaves(batch, samples))
        if not found:
            return None
        outputs = pytree.tree_map(_join_outputs, *(computed.output for computed in found))
        return mean_result(found, self._weights(batch, samples, self.parts.task.weight_of))._replace(output=outputs)


def mean_result(found: Sequence[StepResult], weights: Tensor) -> StepResult:
    """Returns loss and scalars of a batch from those of its microbatches with these weights: (microbatches,)."""
    wide, total = weights.dtype, weights.sum()

    def mean(values: Sequence[Tensor]) -> Tensor:
        means = [weight_mean(value.to(wide), weight) for value, weight in zip(values, weights, strict=True)]
        return torch.stack(means).sum() / total

    scalars = {name: mean([computed.scalars[name] for computed in found]) for name in found[0].scalars}
    return StepResult(mean([computed.loss for computed in found]), None, scalars)


def _join_outputs(*parts: Any) -> Any:
    if len(parts) == 1 or not isinstance(parts[0], Tensor):
        return parts[0]
    if not parts[0].ndim:
        raise PlanError(
            "parallel=stages, and the model returns a single number for all samples of a batch",
            expected="outputs with a row per sample, which are joined from microbatches",
            fix="use microbatches=1, or leave such an output to a step(model, batch)",
        )
    return torch.cat(parts)
