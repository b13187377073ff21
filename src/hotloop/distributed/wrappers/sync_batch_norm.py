"""Batch normalisation over the samples of all ranks, for any module and device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hotloop.distributed.comm_stats import CommMeter


class _BatchNormMode(TorchFunctionMode):
    """Replaces `F.batch_norm` by `_batch_norm`, which has the same arguments."""

    _batch_norm: Callable[..., Tensor]

    def __torch_function__(self, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.batch_norm:
            return function(*args, **(kwargs or {}))
        return self._batch_norm(*args, **(kwargs or {}))


class GlobalBatchNorm(_BatchNormMode):
    """Makes `F.batch_norm` in training normalise over the whole batch, of which this rank has some rows.

    torch's SyncBatchNorm replaces modules, and works on GPUs alone. Here mean and variance are differentiable sums over
    the ranks, in two passes for precision.

    Args:
        samples: number of samples of the whole batch.
        counts: whether the rank's rows belong to the batch; a rank without rows computes a row of another rank.
        meter: measures the rank's waiting, which begins at a step's first norm.
    """

    def __init__(self, samples: int, counts: bool, meter: CommMeter) -> None:
        super().__init__()
        self.samples, self.counts, self.meter = samples, counts, meter

    def _batch_norm(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
        if self.samples * x[0, 0].numel() == 1:  # torch's message in one process
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
        mean, variance, count = global_moments(x, self.counts, self.meter)
        if running_mean is not None and running_var is not None:
            _update_running_stats(running_mean, mean, momentum)
            _update_running_stats(running_var, variance * (count / (count - 1)), momentum)
        shape = (1, -1, *[1] * (x.ndim - 2))
        scale = torch.rsqrt(variance + eps) if weight is None else torch.rsqrt(variance + eps) * weight
        normal = (x - mean.view(shape)) * scale.view(shape)
        return (normal if bias is None else normal + bias.view(shape)).to(x.dtype)


class RankBatchNorm(_BatchNormMode):
    """Makes `F.batch_norm` in training use its running statistics if the rank's rows have no statistics.

    That is so with a single value for each channel, which has no variance, or with rows of another rank.

    Args:
        counts: see `GlobalBatchNorm`.
    """

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts = counts

    def _batch_norm(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        has_own = self.counts and x.numel() > x.shape[1]
        training = training and (has_own or running_mean is None)
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)


def global_moments(x: Tensor, counts: bool, meter: CommMeter) -> tuple[Tensor, Tensor, Tensor]:
    """Returns mean and biased variance (channels,) of x (rows, channels, ...) over all ranks, and the count, 0-dim."""
    wide = torch.promote_types(x.dtype, torch.float32)
    own = (x if counts else x[:0]).to(wide)
    over = [0, *range(2, x.ndim)]
    number = own.new_tensor([own.numel() / own.shape[1]])
    *total, count = _AllReduceSum.apply(torch.cat([own.sum(over), number]), meter).split([x.shape[1], 1])
    mean = total[0] / count
    distance = own - mean.view(1, -1, *[1] * (x.ndim - 2))
    return mean, _AllReduceSum.apply((distance * distance).sum(over), meter) / count, count.detach()


def _update_running_stats(running: Tensor, now: Tensor, momentum: float) -> None:
    with torch.no_grad():
        running.mul_(1 - momentum).add_(now.to(running.dtype), alpha=momentum)


class _AllReduceSum(torch.autograd.Function):
    """The sum over the ranks; its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, meter: CommMeter) -> Tensor:
        total = own.clone()
        ctx.meter = meter
        with meter.measure_waiting():
            dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _AllReduceSum.apply(gradient.contiguous(), ctx.meter), None


def backward_in_modes(loss: Tensor) -> None:
    """Runs `loss.backward()` within modes such as `GlobalBatchNorm`, which checkpointing needs to recompute.

    `Tensor.backward` is a torch function and would disable the modes; torch's engine doesn't.
    """
    torch.autograd._engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
