"""The parallel axis for split linear layers: each rank has a part of them, and computes the whole batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel

from hotloop.core.random.rng import RandomStreams, preserve_generators
from hotloop.core.state import full_tensor
from hotloop.core.task_parts.models import copy_model, set_training
from hotloop.core.torch_private import TorchDispatchMode
from hotloop.data.batch_tree import to_device
from hotloop.data.feeds.feed import first_batch
from hotloop.errors import PlanError, describe_error
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.eager_step import EagerStep
from hotloop.lowering.steps.splittable_layers import SplittableLayers, find_splittable
from hotloop.task import StepResult


def shard_linear_layers(model: nn.Module, columns: Sequence[str], rows: Sequence[str], device: torch.device) -> None:
    """Shards the weights of linear layers in place: by outputs for `columns`, by inputs for `rows`."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    plan: dict[str, Any] = {name: ColwiseParallel(use_local_output=False) for name in columns}
    parallelize_module(model, mesh, plan | {name: RowwiseParallel() for name in rows})


@contextmanager
def run_as_whole(device: torch.device) -> Iterator[None]:
    """Makes a forward pass on sharded values compute the same as on whole ones."""
    with ExitStack() as stack:
        stack.enter_context(implicit_replication())  # for tensors that all ranks have, such as masks
        if device.type == "cpu":
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # DTensor has no rule for the CPU's flash kernel
        stack.enter_context(_ReplicatedDraws())
        yield


class _ReplicatedDraws(TorchDispatchMode):
    """Draws for whole tensors, of which each rank takes its part: DTensor's own draws are for GPUs, and differ."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in function.tags or not args or not isinstance(args[0], DTensor):
            return function(*args, **kwargs)
        x = args[0]
        whole = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if function.overloadpacket.__name__ == "native_dropout":
            p, train = args[1:]
            keep = _replicate_like(x, function(whole.fill_(1), p, train)[1])
            return x * keep / (1 - p if p < 1 else math.inf), keep
        drawn = _replicate_like(x, function(whole, *args[1:], **kwargs))
        return x.copy_(drawn) if function.overloadpacket.__name__.endswith("_") else drawn


def _replicate_like(x: DTensor, whole: Tensor) -> DTensor:
    """Shards a tensor that all ranks have like `x`."""
    return distribute_tensor(whole, x.device_mesh, x.placements, src_data_rank=None)


def clip_sharded_norm(parameters: Sequence[Tensor], largest: float) -> None:
    """Applies `clip_grad_norm_` to sharded and whole gradients together, whose operators accept one kind at a time."""
    kinds = _gradient_kinds(parameters)
    gradients = [[value.grad for value in kind if value.grad is not None] for kind in kinds]
    norms = [torch.nn.utils.get_total_norm(values, foreach=False) for values in gradients]
    total = torch.linalg.vector_norm(torch.stack(list(map(full_tensor, norms))))
    for kind in kinds:
        torch.nn.utils.clip_grads_with_norm_(kind, largest, total, foreach=False)


def clip_sharded_value(parameters: Sequence[Tensor], largest: float) -> None:
    """Applies `clip_grad_value_` to sharded and whole gradients."""
    for kind in _gradient_kinds(parameters):
        torch.nn.utils.clip_grad_value_(kind, largest, foreach=False)


def _gradient_kinds(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    kinds = [[value for value in parameters if isinstance(value, DTensor) is kind] for kind in (False, True)]
    return [kind for kind in kinds if kind]


_MAX_SHOWN = 3
"""Number of layers named in a line."""

_ROUNDING = 1e4
"""Permitted error of gradients of a split model, in units of a dtype's epsilon; any mistake is 100 times larger."""


class TensorStep(EagerStep):
    """One training step of all ranks, each of which computes everything but the other ranks' parts of split layers."""

    def __init__(self, parts: LoweringContext) -> None:
        found = _find_splittable(parts)
        _try_split(parts, found)
        _split_model(parts.model, found, parts.device)  # before the optimizer is built
        super().__init__(parts)
        for group in self.optimizer.param_groups:
            # a kernel over lists of parameters can't mix sharded and whole tensors
            group.update({key: False for key in ("foreach", "fused") if key in group})
        self.draws.always = True
        parts.say(_describe_split(found))

    def _compute(self, batch: Any) -> StepResult:
        with run_as_whole(self.parts.device):
            return super()._compute(batch)

    def _backward_of(self, loss: Tensor) -> None:
        with run_as_whole(self.parts.device):
            super()._backward_of(loss)

    def clip(self, parameters: list[Tensor]) -> None:
        task = self.parts.task
        if task.clip_norm is not None:
            clip_sharded_norm(parameters, task.clip_norm)
        if task.clip_value is not None:
            clip_sharded_value(parameters, task.clip_value)

    @contextmanager
    def full_model(self) -> Iterator[None]:
        with run_as_whole(self.parts.device):
            yield


def _find_splittable(parts: LoweringContext) -> SplittableLayers:
    """Returns the layers to split.

    Raises:
        PlanError: no layer can be split; the message names layers and reasons.
    """
    if parts.task.average is not None:
        raise PlanError("parallel=tensor with an average of the weights", fix="use parallel=data, or leave average out")
    with preserve_generators(parts.device):
        model = copy_model(parts.model)
        found = find_splittable(model, parts.world.ranks)
    if not found.groups:
        raise PlanError(
            f"parallel=tensor finds nothing to split: {_describe_reasons(parts.model, found) or 'there is no linear layer'}",
            expected="two linear layers with pointwise operations between, or an attention with layers of its own for "
            "q, k and v, in a forward that doesn't branch on values",
            fix="use parallel=data or sharded",
        )
    return found


def _describe_reasons(model: nn.Module, found: SplittableLayers) -> str:
    reasons = found.unsplit_reasons.items()
    lines = [f"{name!r} ({type(model.get_submodule(name)).__name__}): {why}" for name, why in reasons]
    more = len(lines) - _MAX_SHOWN
    return "; ".join(lines[:_MAX_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _describe_split(found: SplittableLayers) -> str:
    split = [name for group in found.groups for name in (*group.columns, group.rows)]
    more = f" and {len(split) - _MAX_SHOWN} more" if len(split) > _MAX_SHOWN else ""
    whole = list(found.unsplit_reasons)
    rest = f"; whole on each rank: {', '.join(whole[:_MAX_SHOWN])}" if whole else ""
    return f"split over the ranks: {', '.join(split[:_MAX_SHOWN])}{more}{rest}{', ...' * (len(whole) > _MAX_SHOWN)}"


def _split_model(model: nn.Module, found: SplittableLayers, device: torch.device) -> None:
    columns = [name for group in found.groups for name in group.columns]
    shard_linear_layers(model, columns, [group.rows for group in found.groups], device)


def _try_split(parts: LoweringContext, found: SplittableLayers) -> None:
    """Compares loss and gradients of a split copy with those of a whole one, on two samples.

    Raises:
        PlanError: the split copy fails, or its gradients differ.
    """
    names = ", ".join(repr(group.rows) for group in found.groups[:_MAX_SHOWN])
    with preserve_generators(parts.device):
        expected = _full_gradients(parts, copy_model(parts.model))
        model = copy_model(parts.model)
        try:
            _split_model(model, found, parts.device)
            with run_as_whole(parts.device):
                actual = _full_gradients(parts, model)
        except Exception as error:
            raise PlanError(
                f"parallel=tensor can't run the model with {names} split: {describe_error(error)}",
                fix="use parallel=data",
            ) from error
    size = sum(float(value.norm()) ** 2 for value in expected.values()) ** 0.5
    for name, value in expected.items():
        difference = float((actual[name] - value).norm())
        if not difference <= _ROUNDING * torch.finfo(value.dtype).eps * (float(value.norm()) + 0.01 * size):
            raise PlanError(
                f"the model has another result with {names} split: the gradient of {name!r} differs by "
                f"{difference:.2g}",
                expected="the same result except for rounding",
                fix="use parallel=data",
            )


def _full_gradients(parts: LoweringContext, model: nn.Module) -> dict[str, Tensor]:
    """Returns the whole gradient of each parameter that has one, and the loss as `loss`."""
    batch = to_device(first_batch(parts.splits), parts.device)
    RandomStreams(parts.task.seed, parts.device).reseed("look")
    loss = parts.compute(set_training(model, parts.in_eval), batch).loss
    loss.backward()
    parameters = model.named_parameters()
    gradients = {name: full_tensor(value.grad) for name, value in parameters if value.grad is not None}
    return gradients | {"loss": full_tensor(loss.detach())}
