"""What batches of recorded steps are and count: laid out with gaps, of several views, weighted, read from a data set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.errors import PlanError
from hotloop.lowering.steps import cuda_graph
from hotloop.lowering.steps.cuda_graph import CudaGraphStep
from hotloop.plan import Plan
from tests.lowering.steps.test_cuda_graph import TWO, on_a_stand_in, replays  # noqa: F401  `on_a_stand_in` is a fixture of all tests
from tests.lowering.test_cpu_plans import changed
from tests.support.fake_graph_recorder import FakeRecorder, RecallingRecorder
from tests.support.programs import a_task, advance


def views(x: Tensor, draws: Any) -> Tensor:
    return torch.cat([x, x.flip(1) + 0.1])


def with_gaps(x: Tensor, draws: Any) -> Tensor:
    return torch.cat([x, x], 1)[:, ::2]


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).unflatten(0, (2, -1)).mean(0)


class Words(torch.utils.data.Dataset):
    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"x": torch.full((6,), float(number)), "name": f"sample {number}"}

    def __len__(self) -> int:
        return 12


CLASSES_IGNORED = torch.tensor([0, 1, 2, -100, 1, 0, -100, 2, 1, 0, 2, 1])
CASES: dict[str, dict[str, Any]] = {
    "two views of each sample": dict(model=Halves, augment=views),
    "rows with gaps": dict(augment=with_gaps),
    "weights": dict(weight=lambda batch: batch[1].sum() + 1.0),
    "ignored targets": dict(data=(torch.randn(12, 6, generator=torch.Generator().manual_seed(4)), CLASSES_IGNORED)),
    "an odd size": dict(batch_size=5),
    "plain": {},
}


@pytest.mark.few("plain-*", "ignored targets-*", "rows with gaps-*")
@pytest.mark.parametrize("compiled", ["none", "step"])
@pytest.mark.parametrize("plan", [Plan(graphs="step"), TWO], ids=changed)
@pytest.mark.parametrize("case", CASES)
def test_whatever_a_batch_is_and_counts(case: str, plan: Plan, compiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "GraphRecorder", RecallingRecorder if compiled == "step" else FakeRecorder)
    fields = {"batch_size": 4, "schedule": None, **CASES[case]}
    states = []
    for one in (plan.with_axes(compile=compiled), Plan()):
        program = hotloop.lower(a_task(**fields), one)
        program.advance(3)
        states.append(program.state())
        assert one.graphs == "none" or sum(replays(program)) == 3
    found, expected = states
    torch.testing.assert_close(found.parameters, expected.parameters, rtol=1e-5, atol=1e-6)
    assert found.sums.keys() == expected.sums.keys()
    for name, value in expected.sums.items():
        assert float(found.sums[name]) == pytest.approx(float(value), rel=1e-6), name


def test_names_of_samples_are_refused_in_one_line() -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["x"]).pow(2).mean()

    with pytest.raises(PlanError, match="a batch holds str") as caught:
        hotloop.lower(a_task(data=Words(), loss=None, step=step), Plan(graphs="step"))
    assert "\n" not in str(caught.value)


def test_batches_that_were_taken_when_a_step_failed_are_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    program = hotloop.lower(a_task(batch_size=2), TWO)
    advance(program, 1)
    replay = CudaGraphStep._replay
    monkeypatch.setattr(CudaGraphStep, "_replay", lambda self, group, step: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        program.advance(2)
    monkeypatch.setattr(CudaGraphStep, "_replay", replay)
    plain = hotloop.lower(a_task(batch_size=2))
    advance(program, 3)
    advance(plain, 4)
    torch.testing.assert_close(program.state().parameters, plain.state().parameters)
