"""A run that continues with other numbers of ranks, in each mode: from 2 to 3, to one process and back to 2."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hotloop
from hotloop.core.plan_request import PlanRequest
from hotloop.distributed.launch import launch
from hotloop.errors import HotloopError
from hotloop.plan import Plan
from hotloop.training.run import Run
from tests.multi.distributed.test_ddp import distance
from tests.support.processes import rank_processes  # noqa: F401 - imports what each fork would
from tests.support.processes.resumed_training import last_checkpoint
from tests.support.runs import resume_run

MODES: dict[str, dict[str, Any]] = {
    "data": {},
    "sharded": {},
    "towers": {},
    "tensor": {},
    "stages": {"microbatches": 2},
    "local": {"sync_every": 1},
    "async": {},
}
"""With SGD, `local` is synchronous training if it averages after each step."""

EVERY = 2
STOPS = (4, 8, 12)
"""Steps after which the run changes its ranks: within the first, the second and the third of three epochs of 5 steps."""


class Stopping:
    """A callback that raises an error at a checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, view: hotloop.View) -> None:
        if view.event == "checkpoint" and view.step >= self.step:
            raise RuntimeError("stopped here")


def layers() -> nn.Module:
    """Layers of which each of 3 ranks can have some, or a part of each."""
    widths = (6, 12, 12, 12, 4)
    linear = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*(module for block in linear for module in block)).double()


def task(**fields: Any) -> hotloop.Task:
    x = torch.randn(36, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    given: dict[str, Any] = dict(
        model=layers,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        data=(x, x[:, :4].argmax(1)),
        validation=(x[:7], x[:7, :4].argmax(1)),
        batch_size=8,
        epochs=3,
    )
    return hotloop.Task(**given | fields)


def continued(run: Path, given: hotloop.Task, axes: dict[str, Any]) -> None:
    """Does what `hotloop train --resume` does with these axes."""
    plan = PlanRequest.from_value(Run.open(run).plan, axes).plan
    if plan.ranked:
        launch(plan.ranks or 0, lambda: resume_run(run, task=given, axes=axes), print)
    else:
        resume_run(run, task=given, axes=axes)


def saved(run: Path) -> list[int]:
    return [event["step"] for event in Run.open(run).journal() if event["event"] == "checkpoint"]


def reached(run: Path) -> Any:
    rows = Run.open(run).epochs
    figures = [{name: row[name] for name in ("train_loss", "validation_loss", "validation_accuracy")} for row in rows]
    return last_checkpoint(Run.open(run)).state, figures, {}


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=() if mode == "data" else pytest.mark.more) for mode in MODES]
)
def test_other_numbers_of_ranks_continue_to_the_end_of_one_process(mode: Any, tmp_path: Path) -> None:
    run, alone = tmp_path / "run", tmp_path / "alone"
    first = Plan(parallel=mode, ranks=2, **MODES[mode])
    with pytest.raises(HotloopError, match="stopped here"):
        stopping = task(callbacks=[Stopping(STOPS[0])])
        hotloop.fit(stopping, run=run, plan=first, checkpoint_every=str(EVERY), progress=False)
    changes: list[dict[str, Any]] = [{"ranks": 3}, {"parallel": "none"}]
    for stop, axes in zip(STOPS[1:], changes, strict=True):
        with pytest.raises(HotloopError, match="stopped here"):
            continued(run, task(callbacks=[Stopping(stop)]), axes)
    continued(run, task(), {"parallel": mode, "ranks": 2, **MODES[mode]})

    hotloop.fit(task(), run=alone, plan=Plan(), checkpoint_every=str(EVERY), progress=False)
    resumed = [event["step"] for event in Run.open(run).journal() if event["event"] == "resume"]
    rows = [[(row["step"], row["samples"]) for row in Run.open(path).epochs] for path in (run, alone)]
    assert rows[0] == rows[1]
    if mode == "async":  # a checkpoint includes the gradients that workers compute meanwhile
        assert all(0 <= step - stop < EVERY for step, stop in zip(resumed, STOPS, strict=True))
        return
    assert tuple(resumed) == STOPS
    assert saved(run) == saved(alone) == [2, 4, 6, 8, 10, 12, 14, 15]
    assert max(distance(reached(run), reached(alone)).values()) < 1e-10
