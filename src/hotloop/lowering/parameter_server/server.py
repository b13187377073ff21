"""The parameter server: parameters and their optimizer, and an update for each gradient that a worker brings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hotloop.errors import PlanError
from hotloop.plan import Plan

_COMPENSATION = 0.04
"""What the paper of `StalenessPolicy.compensation` takes for images."""


@dataclass(frozen=True)
class StalenessPolicy:
    """What is done about gradients of parameters that have changed since.

    Attributes:
        bound: how many further batches a worker may begin while another computes one (see `BatchScheduler`); None: any number.
        divide: the step size is divided by the staleness, the updates since the gradient's parameters were handed out
            (Zhang, Gupta, Lian, Liu: Staleness-aware async-SGD for distributed deep learning, 2015, arXiv 1511.05950).
        compensation: lambda of `g + lambda * g * g * (w_now - w_then)`, a guess at the gradient where the parameters are
            now (Zheng et al.: Asynchronous stochastic gradient descent with delay compensation, 2016, arXiv 1609.08326);
            0 leaves it out.
    """

    bound: int | None = None
    divide: bool = True
    compensation: float = 0.0

    def __post_init__(self) -> None:
        if self.bound is not None and self.bound < 0:
            raise PlanError(f"a staleness bound of {self.bound}", expected="0 or more, or None")
        if not (math.isfinite(self.compensation) and self.compensation >= 0):
            raise PlanError(f"compensation={self.compensation}", expected="0 or more, such as 0.04")

    @classmethod
    def from_plan(cls, plan: Plan) -> StalenessPolicy:
        """What a plan asks for."""
        compensation = _COMPENSATION if plan.correction in ("compensate", "both") else 0.0
        return cls(plan.staleness, plan.correction in ("divide", "both"), compensation)

    def factor(self, staleness: int) -> float:
        """What the step size is multiplied by."""
        return 1 / max(1, staleness) if self.divide else 1.0


@dataclass(frozen=True)
class WeightVersion:
    """A copy of what a worker needs of the model; nothing changes it.

    Attributes:
        version: updates that the parameters had had.
        parameters, buffers: in the model's order.
    """

    version: int
    parameters: list[Tensor]
    buffers: list[Tensor]


class ParameterServer:
    """Parameters, their optimizer and a policy; knows nothing of workers, nor of how gradients reach it.

    Args:
        model: whose parameters are trained.
        optimizer: of torch; its step size is the Task's, and is put back after each update.
        clip: clips the gradients in place, once they are corrected.

    Attributes:
        version: updates so far.
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
        """A copy as of now, on the CPU; the same one until the next update."""
        if self._copy is None:
            buffers = [value.detach().to("cpu", copy=True) for value in self.model.buffers()]
            self._copy = WeightVersion(
                self.version, [v.detach().to("cpu", copy=True) for v in self._parameters], buffers
            )
        return self._copy

    @torch.no_grad()
    def update(self, gradients: Sequence[Tensor | None], then: WeightVersion, buffers: Sequence[Tensor] = ()) -> int:
        """One update; returns the staleness of the gradients.

        Args:
            gradients: of each parameter of the model, in its order; None where it has none.
            then: what they were computed with.
            buffers: of the model after that; they replace the present ones, as those of the worker that came last.
        """
        staleness = self.version - then.version
        for parameter, gradient, old in zip(self._parameters, gradients, then.parameters, strict=True):
            parameter.grad = None if gradient is None else self._correct(gradient, parameter, old, staleness)
        self._clip()
        with self._step_size(self.policy.factor(staleness)):
            self.optimizer.step()
        for buffer, value in zip(self.model.buffers(), buffers, strict=bool(buffers)):
            buffer.copy_(value)
        self.changed()
        return staleness

    def changed(self) -> None:
        """Notes that the parameters are others now."""
        self.version += 1
        self._copy = None

    def _correct(self, gradient: Tensor, now: Tensor, then: Tensor, staleness: int) -> Tensor:
        gradient, strength = gradient.to(now.device), self.policy.compensation
        if not strength or not staleness:
            return gradient
        return gradient + strength * gradient * gradient * (now - then.to(now.device))

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
