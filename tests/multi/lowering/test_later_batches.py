"""Ranks compare later batches, too: all of them end together before the first step that would learn something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotloop
from hotloop.distributed.world import World
from hotloop.errors import HotloopError, PartsDifferError
from hotloop.lowering.build import lower
from hotloop.plan import Plan
from tests.support.processes.rank_processes import of_ranks

pytestmark = pytest.mark.more

PLANS = [Plan(parallel=parallel, ranks=2) for parallel in ("data", "sharded", "towers", "local")]
DRAWS = torch.Generator().manual_seed(1)
X, Y = torch.randn(24, 6, 4, generator=DRAWS), torch.randint(0, 3, (24, 6), generator=DRAWS)
PADDED = Y.clone()
for row in range(8, 24):
    PADDED[row, 1 + row % 5 :] = -100
"""The first two batches of 4 have no padding."""


def flat(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def masked(model: nn.Module, batch: Any) -> Tensor:
    x, target = batch
    mask = target != -100
    return ((model(x) - 1).square().mean(-1) * mask).sum() / mask.sum()


def normed() -> nn.Module:
    """Has buffers, which a forward pass changes."""
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(3, 3))


def a_task(loss: Any = flat, **fields: Any) -> hotloop.Task:
    given: dict[str, Any] = dict(model=lambda: nn.Linear(4, 3), data=(X, PADDED), batch_size=4, epochs=2, shuffle=False)
    return hotloop.Task(loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.5), **given | fields)


MISCOUNTED = {
    "ignored targets": a_task(),
    "a mask in a step": a_task(None, step=masked),
    "buffers and draws": a_task(model=normed),
}
HONEST = {
    "a weight": a_task(weight=lambda batch: (batch[1] != -100).sum()),
    "no padding": a_task(lambda o, t: o.square().mean(), data=(X, Y)),
    "buffers and draws": a_task(model=normed, weight=lambda batch: (batch[1] != -100).sum()),
}


def outcome(task: hotloop.Task, plan: Plan) -> tuple[str, int, list[Tensor], list[str]]:
    lines: list[str] = []
    program, error = lower(task, plan, lines.append), ""
    try:
        program.advance(6)
    except HotloopError as raised:
        error = f"{type(raised).__name__}: {raised}"
    state = program.state()
    return error, program.position.step, [*state.parameters.values(), *state.buffers.values()], lines


def compute(world: World) -> dict[Any, Any]:
    cases = [("wrong", name, task) for name, task in MISCOUNTED.items()]
    cases += [("right", name, task) for name, task in HONEST.items()]
    return {(plan.parallel, sort, name): outcome(task, plan) for plan in PLANS for sort, name, task in cases}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return of_ranks(tmp_path_factory.mktemp("later"), PLANS[0], compute)


def alone(task: hotloop.Task, steps: int) -> list[Tensor]:
    program = lower(task)
    program.advance(steps)
    state = program.state()
    return [*state.parameters.values(), *state.buffers.values()]


def close(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.allclose(a.float(), b.float(), atol=1e-5) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("parallel", ["data", "sharded", "towers"])
@pytest.mark.parametrize("name", MISCOUNTED)
def test_all_ranks_end_before_the_step_that_would_learn_something_else(
    seen: list[Any], parallel: str, name: str
) -> None:
    for rank in seen:
        error, step, state, _ = rank[parallel, "wrong", name]
        assert error.startswith(f"PartsDifferError: step 3: parallel={parallel} changes the gradient of ")
        assert "give the Task a weight(batch): what its loss divides by" in error
        assert step == 2
        assert close(state, alone(MISCOUNTED[name], 2))


@pytest.mark.parametrize("parallel", ["data", "sharded", "towers"])
@pytest.mark.parametrize("name", HONEST)
def test_what_adds_up_is_trained_as_by_one_process(seen: list[Any], parallel: str, name: str) -> None:
    error, step, state, _ = seen[0][parallel, "right", name]
    assert not error and step == 6
    assert close(state, alone(HONEST[name], 6))


def test_ranks_that_train_by_themselves_say_so_and_go_on(seen: list[Any]) -> None:
    error, step, _, lines = seen[0]["local", "wrong", "ignored targets"]
    assert not error and step == 6
    assert [line for line in lines if "computes with the whole batch" in line]
    *_, lines = seen[0]["local", "right", "a weight"]
    assert not [line for line in lines if "computes with the whole batch" in line]


def test_the_state_is_saved_and_a_weight_mends_the_run(tmp_path: Path) -> None:
    fit: Callable[..., Any] = hotloop.fit
    with pytest.raises(PartsDifferError, match=r"^step 3: parallel=data changes the gradient"):
        fit(a_task(), run=tmp_path / "run", plan=PLANS[0], progress=False)
    mended = HONEST["a weight"]
    run = fit(mended, run=tmp_path / "run", resume=True, progress=False)
    assert [event["step"] for event in run.journal() if event["event"] == "resume"] == [2]
    model = hotloop.load_model(run, task=mended, weights="last")
    program = lower(mended)
    while program.position.epoch < 2:
        program.advance(6)
        program.end_epoch()
    assert close([value.detach() for value in model.parameters()], list(program.state().parameters.values()))
