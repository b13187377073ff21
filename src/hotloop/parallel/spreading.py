"""Linear layers whose weights are spread over the ranks by torch's DTensor; each rank computes the whole batch."""

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
from torch.utils._python_dispatch import TorchDispatchMode


def spread(model: nn.Module, columns: Sequence[str], rows: Sequence[str], device: torch.device) -> None:
    """Spreads the weights of linear layers in place: the outputs of some over the ranks, the inputs of others."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    plan: dict[str, Any] = {name: ColwiseParallel(use_local_output=False) for name in columns}
    parallelize_module(model, mesh, plan | {name: RowwiseParallel() for name in rows})


@contextmanager
def as_one(device: torch.device) -> Iterator[None]:
    """Has a forward pass on spread values come to what it would come to on whole ones."""
    with ExitStack() as stack:
        stack.enter_context(implicit_replication())  # masks and the like, which all ranks have
        if device.type == "cpu":
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # the CPU's own kernel can't be spread
        stack.enter_context(_WholeDraws())
        yield


class _WholeDraws(TorchDispatchMode):
    """Draws for whole tensors, of which each rank takes its part: DTensor's own draws are for GPUs, and others."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in function.tags or not args or not isinstance(args[0], DTensor):
            return function(*args, **kwargs)
        x = args[0]
        whole = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if function.overloadpacket.__name__ == "native_dropout":
            p, train = args[1:]
            keep = _like(x, function(whole.fill_(1), p, train)[1])
            return x * keep / (1 - p if p < 1 else math.inf), keep
        drawn = _like(x, function(whole, *args[1:], **kwargs))
        return x.copy_(drawn) if function.overloadpacket.__name__.endswith("_") else drawn


def _like(x: DTensor, whole: Tensor) -> DTensor:
    """A tensor that all ranks have, spread as x is."""
    return distribute_tensor(whole, x.device_mesh, x.placements, src_data_rank=None)


def clip_norm(parameters: Sequence[Tensor], largest: float) -> None:
    """`clip_grad_norm_` of spread and whole gradients together, whose operators take one kind at a time."""
    kinds = _kinds(parameters)
    norms = [torch.nn.utils.get_total_norm([value.grad for value in kind if value.grad is not None], foreach=False)
             for kind in kinds]  # fmt: skip
    total = torch.linalg.vector_norm(torch.stack([_whole(norm) for norm in norms]))
    for kind in kinds:
        torch.nn.utils.clip_grads_with_norm_(kind, largest, total, foreach=False)


def clip_value(parameters: Sequence[Tensor], largest: float) -> None:
    """`clip_grad_value_`, likewise."""
    for kind in _kinds(parameters):
        torch.nn.utils.clip_grad_value_(kind, largest, foreach=False)


def _kinds(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    found = [[one for one in parameters if isinstance(one, DTensor) is kind] for kind in (False, True)]
    return [kind for kind in found if kind]


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
