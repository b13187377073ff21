"""What the peers on PyTorch share: data as tensors, and how the trained network is judged."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import Sampler

from bench.speed.data import load
from bench.speed.job import Evaluate, Job
from bench.speed.models import loss_module
from bench.speed.start import epoch_order
from bench.speed.workloads import Workload

ROWS = 256


def placed(job: Job) -> torch.device:
    """Where it trains; a window ends with what that has computed."""
    device = torch.device(job.device)
    if device.type != "cpu":
        job.marks.sync = lambda: torch.accelerator.synchronize(device)
    return device


class SameOrder(Sampler[int]):
    """The order in which all peers see the samples, another for each epoch."""

    def __init__(self, samples: int) -> None:
        self._samples, self._epoch = samples, 0

    def __len__(self) -> int:
        return self._samples

    def __iter__(self) -> Iterator[int]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        return iter(epoch_order(self._samples, epoch).tolist())


def tensors(workload: Workload) -> list[Tensor]:
    """x, y, and those of the test data: images float32 (N, C, H, W), texts int64 (N, T)."""
    data = load(workload.data).prepared()
    return [torch.from_numpy(part) for part in (data.x, data.y, data.test_x, data.test_y)]


@torch.no_grad()
def judged(model: nn.Module, job: Job) -> tuple[float, float]:
    """Loss on the first training samples, accuracy on test samples, on the CPU.

    In turns with others there are few steps, behind which the averages of batch norms lag by far: they are taken anew from these
    samples, so that it's the weights that are judged.
    """
    x, y, test_x, test_y = tensors(job.workload)
    few, few_y, test_x, test_y = x[job.few], y[job.few], test_x[job.tested], test_y[job.tested]
    if job.marks.in_turns:
        update_bn(few.split(ROWS), model.cpu())
    model = model.cpu().eval()
    loss_of = loss_module(job.workload.name)()
    losses = [float(loss_of(model(a), b)) * len(b) for a, b in _batches(few, few_y)]
    right = [int((model(a).argmax(-1) == b).sum()) for a, b in _batches(test_x, test_y)]
    return sum(losses) / len(few), sum(right) / test_y.numel()


def _batches(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(x.split(ROWS), y.split(ROWS), strict=True)


def judging(model: nn.Module, job: Job) -> Evaluate:
    return lambda: judged(model, job)
