"""Running Programs step by step: what several tests of models and Tasks share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hotloop
from hotloop.core.state import State, differing_paths
from hotloop.lowering.program import Program
from hotloop.plan import Plan
from hotloop.training.checkpoint import Checkpoint, decode, encode


def labelled(samples: int = 24, features: int = 6, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (samples, features) whose label is where their largest of the first few features is."""
    x = torch.randn(samples, features, generator=torch.Generator().manual_seed(1))
    return x, x[:, :classes].argmax(1)


def a_task(**fields: Any) -> hotloop.Task:
    """A small classification, with some of Task's fields changed."""
    given: dict[str, Any] = dict(
        model=lambda: torch.nn.Linear(6, 3),
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, weight_decay=1e-4),
        data=labelled(),
        batch_size=5,
    )
    if "step" in fields:
        del given["loss"]
    return hotloop.Task(**given | fields)


def seeing(model: Callable[[], torch.nn.Module], **fields: Any) -> hotloop.Task:
    """The same of images (16, 1, 12, 12)."""
    images = torch.randn(48, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    data = images, images.flatten(1)[:, :4].argmax(1)
    return a_task(model=model, data=data, **dict(batch_size=16, optimizer=torch.optim.Adam) | fields)


def advance(program: Program, steps: int, figure: float = 1.0) -> None:
    """Runs steps across the ends of epochs; `figure` is what each epoch came to."""
    while steps:
        outcome = program.advance(steps)
        steps -= outcome.steps
        if outcome.ended:
            program.end_epoch(figure)


def state_after(task: hotloop.Task, steps: int, *, workers: int | None = None) -> State:
    """The State after some steps of a fresh start."""
    program = hotloop.lower(task, Plan(workers=workers))
    advance(program, steps)
    program.close()
    return program.state()


def through_file(state: State) -> State:
    """A State written to a checkpoint's bytes and read back."""
    return decode(b"".join(encode(Checkpoint(state))), Path("memory")).state


def assert_resumes(task: hotloop.Task, *, stop: int = 3, steps: int = 7) -> State:
    """The State round-trips bitwise, and a stopped and resumed training ends like one that never stopped.

    The defaults stop within the first epoch of `labelled` data in batches of 5, and end in the second.
    """
    start = state_after(task, 0)
    whole = state_after(task, steps)
    trainable = {name for group in whole.optimizer["groups"] for name in group["params"]}
    still = [n for n in trainable if whole.parameters[n].equal(start.parameters[n]) and whole.parameters[n].numel()]
    assert not still, f"training left {still} as they were"
    early = state_after(task, stop)
    read = through_file(early)
    assert differing_paths(read, early) == []
    program = hotloop.lower(task)
    program.restore(read)
    assert differing_paths(program.state(), early) == []
    advance(program, steps - stop)
    program.close()
    assert differing_paths(program.state(), whole) == []
    return whole


def trained(task: hotloop.Task, path: Path, **options: Any) -> hotloop.Run:
    """The run of a whole training on the CPU, under the baseline unless another plan is given."""
    return hotloop.fit(task, run=path, device="cpu", **{"plan": "baseline", "progress": False} | options)


def last_state(run: hotloop.Run) -> State:
    """The State that a run ended with."""
    found = run.checkpoints.newest()
    assert found is not None
    return found[0].state
