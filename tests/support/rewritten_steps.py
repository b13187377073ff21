"""Captured steps before and after a rewrite: what several tests of rewrites share."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import hotloop
from hotloop.data.batch_tree import tree_tensors
from hotloop.errors import PlanError
from hotloop.lowering.compile.capture import CapturedStep, capture_step
from hotloop.lowering.compile.inputs import step_tensors
from hotloop.lowering.rewrites import apply_rewrite
from hotloop.lowering.rewrites.fx_nodes import drop_identities
from tests.support.programs import a_task


class Step:
    """The captured step of a Task, and the tensors that it runs on."""

    def __init__(self, task: hotloop.Task, double: bool = False) -> None:
        program = hotloop.lower(task)
        if double:
            program.model.double()
        batch, self.samples = next(program.feed.epoch(0))
        program.model.train()
        if double:
            batch = (batch[0].double(), batch[1])
        program._step(batch, self.samples, 0)
        hyper = {"0/lr": torch.full((), 1e-3, dtype=torch.float64)}
        with torch.random.fork_rng():
            self.captured = capture_step(program._step, batch, self.samples, hyper, whole=True)
        self.flat = [*pytree.tree_leaves(step_tensors(program._step, hyper, whole=True)), *tree_tensors(batch)]

    def after(self, captured: CapturedStep, extra: Callable[[list[Tensor]], Tensor] | None = None) -> list[Tensor]:
        """Loss, and all that the step changes, after it ran operation by operation."""
        flat = [value.detach().clone() for value in self.flat]
        with torch.no_grad():
            (loss, *_) = captured.graph(*flat, *([extra(flat)] if extra else []))
        return [loss, *flat]

    def rewritten(self, which: str) -> dict[str, int]:
        """How often rewrites found something, without those that found nothing."""
        return {name: times for name, times in apply_rewrite(self.captured.graph, which).items() if times}


def apart(ones: list[Tensor], others: list[Tensor]) -> float:
    """The largest distance of two tensors over their size."""
    pairs = [(one.double(), other.double()) for one, other in zip(ones, others, strict=True)]
    return max(float((one - other).norm() / max(float(other.norm()), 1e-12)) for one, other in pairs)


def assert_stays_the_same(step: Step, which: str, found: dict[str, int], within: float = 1e-12) -> None:
    """The step comes to the same after a rewrite that finds so much."""
    plain = step.after(step.captured)
    assert step.rewritten(which) == found
    assert apart(step.after(step.captured), plain) < within


def assert_refused(step: Step, which: str) -> None:
    """The rewrite finds nothing, says so in one line, and leaves the graph as it is."""
    drop_identities(step.captured.graph)
    before = step.captured.graph.code
    with pytest.raises(PlanError, match=f"rewrites={which} changes nothing") as error:
        apply_rewrite(step.captured.graph, which)
    step.captured.graph.recompile()
    assert "\n" not in str(error.value) and step.captured.graph.code == before


def vars_of(task: hotloop.Task) -> dict[str, Any]:
    return {name: getattr(task, name) for name in ("model", "loss", "optimizer", "batch_size", "seed")}


def convolving(*layers: nn.Module, size: int | tuple[int, int] = 8, channels: int = 2) -> hotloop.Task:
    """A classification by layers on images of (channels, *size)."""
    model = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3))
    height, width = (size, size) if isinstance(size, int) else size
    images = torch.randn(12, channels, height, width, generator=torch.Generator().manual_seed(2))
    return a_task(model=lambda: deepcopy(model), data=(images, images[:, 0, 0, :3].argmax(1)), batch_size=6)


class Twice(nn.Module):
    """Convolves the same data with the same weight, each time in its own way."""

    def __init__(self, *hows: dict[str, Any], channels: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, channels, 3, 3, generator=torch.Generator().manual_seed(3)))
        self.hows = hows

    def forward(self, x: Tensor) -> Tensor:
        found = [nn.functional.conv2d(x, self.weight, **how).flatten(1) for how in self.hows]
        return torch.cat([one.mul(number).tanh() for number, one in enumerate(found, 1)], 1)
