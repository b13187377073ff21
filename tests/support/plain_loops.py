"""Training loops written by hand, as references for Programs, and runs that are stopped and resumed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hotloop
from hotloop.core.state import State, differing_paths
from tests.support.programs import labelled, last_state


def plain_loop(task: hotloop.Task, *, each_epoch: Callable[[nn.Module, Any, int], None] | None = None) -> nn.Module:
    """Trains a Task on `labelled` data without hotloop's Program; returns the model in training mode.

    Args:
        each_epoch: called as `(model, optimizer, epoch)` at the end of each epoch, as a validation or a callback is.
    """
    x, y = labelled()
    model = task.build_model()
    in_eval = [module for module in model.modules() if not module.training]
    optimizer, order = task.build_optimizer(model), task.roles.order
    schedule = task.build_schedule(optimizer, task.roles.batches)
    assert order is not None and task.loss is not None
    for epoch in range(task.epochs):
        model.train()
        for module in in_eval:
            module.training = False
        switched: Any = getattr(optimizer, "inner", optimizer)
        if hasattr(switched, "train"):
            switched.train()
        permutation = order.epoch(epoch)
        for number in range(order.batches):
            index = order.batch(permutation, number)
            optimizer.zero_grad()
            task.loss(model(x[index]), y[index]).backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
        if each_epoch is not None:
            each_epoch(model, optimizer, epoch)
    return model


def assert_equal_weights(one: nn.Module, other: nn.Module) -> None:
    for (name, value), expected in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(value, expected), f"{name} differs by {float((value - expected).abs().max()):.2g}"
    for (name, value), expected in zip(one.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(value, expected), name


def interrupt_after(epoch: int) -> Callable[[hotloop.View], None]:
    """A callback that sends SIGINT at the end of an epoch, counted from 1."""

    def callback(view: hotloop.View) -> None:
        if view.event == "epoch" and view.epoch == epoch:
            os.kill(os.getpid(), signal.SIGINT)

    callback.read_only = True  # type: ignore[attr-defined]
    return callback


def fitted(task: hotloop.Task, path: Path, **options: Any) -> hotloop.Run:
    plan = {} if options.get("resume") else {"plan": "baseline"}
    return hotloop.fit(task, run=path, device="cpu", progress=False, **plan | options)


def resumed(make: Callable[[], hotloop.Task], path: Path, epoch: int, **options: Any) -> hotloop.Run:
    """A run that is interrupted after an epoch and resumed with objects made anew, as another process has them."""
    fitted(make(), path, callbacks=[interrupt_after(epoch)], **options)
    return fitted(make(), path, resume=True)


def difference_of_resumed(make: Callable[[], hotloop.Task], path: Path, epoch: int = 2, **options: Any) -> list[str]:
    """Paths of the State at which an interrupted and resumed run differs from one without interruption."""
    whole = last_state(fitted(make(), path / "whole", **options))
    return differing_paths(last_state(resumed(make, path / "parts", epoch, **options)), whole)


def assert_state_equals(one: State, other: State) -> None:
    assert differing_paths(one, other) == []
