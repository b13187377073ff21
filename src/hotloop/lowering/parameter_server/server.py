"""The parameter server: parameters and their optimizer, with an update for each worker's gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hotloop.errors import PlanError


@dataclass(frozen=True)
class StalenessPolicy:
    """Treatment of gradients whose parameters have changed since.

    Attributes:
        bound: number of further batches that a worker may begin while another computes one (see `BatchScheduler`); None
            for no bound.
        divide: whether the step size is divided by the staleness, the number of updates since the assignment
            (Zhang, Gupta, Lian, Liu: Staleness-aware async-SGD for distributed deep learning, 2015, arXiv 1511.05950).
    """

    bound: int | None = None
    divide: bool = True

    def __post_init__(self) -> None:
        if self.bound is not None and self.bound < 0:
            raise PlanError(f"a staleness bound of {self.bound}", expected="0 or more, or None")

    def factor(self, staleness: int) -> float:
        """Returns the factor of the step size."""
        return 1 / max(1, staleness) if self.divide else 1.0


@dataclass(frozen=True)
class WeightVersion:
    """A copy of the model's tensors for workers; nothing changes it.

    Attributes:
        version: number of updates before the copy.
        parameters, buffers: in the model's order.
    """

    version: int
    parameters: list[Tensor]
    buffers: list[Tensor]


class ParameterServer:
    """Parameters, their optimizer and a policy, independent of workers and of the way of gradients.

    Args:
        model: the model to train.
        optimizer: of torch; its step size is the Task's, and is restored after each update.
        clip: clips the gradients in place.

    Attributes:
        version: number of updates.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        policy: StalenessPolicy = StalenessPolicy(),
        clip: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.optimizer, self.policy = model, optimizer, policy
        self.version = 0
        self._parameters = list(model.parameters())
        self._clip = clip
        self._copy: WeightVersion | None = None

    @torch.no_grad()
    def weights(self) -> WeightVersion:
        """Returns a copy on the CPU; the same copy until the next update."""
        if self._copy is None:
            buffers = [value.detach().to("cpu", copy=True) for value in self.model.buffers()]
            self._copy = WeightVersion(
                self.version, [v.detach().to("cpu", copy=True) for v in self._parameters], buffers
            )
        return self._copy

    @torch.no_grad()
    def update(self, gradients: Sequence[Tensor | None], version: int, buffers: Sequence[Tensor] = ()) -> int:
        """Updates the parameters; returns the staleness of the gradients.

        Args:
            gradients: of each parameter, in the model's order; None for a parameter without gradient.
            version: of the weights that they were computed with.
            buffers: the worker's buffers; they replace the present ones.
        """
        staleness = self.version - version
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        self._clip()
        with self._step_size(self.policy.factor(staleness)):
            self.optimizer.step()
        for buffer, value in zip(self.model.buffers(), buffers, strict=bool(buffers)):
            buffer.copy_(value)
        self.changed()
        return staleness

    def changed(self) -> None:
        """Counts a change of the parameters."""
        self.version += 1
        self._copy = None

    @contextmanager
    def _step_size(self, factor: float) -> Iterator[None]:
        groups = self.optimizer.param_groups
        before = [group["lr"] for group in groups]
        if factor != 1:
            for group in groups:
                group["lr"] = group["lr"] * factor
        try:
            yield
        finally:
            for group, rate in zip(groups, before, strict=True):
                group["lr"] = rate
