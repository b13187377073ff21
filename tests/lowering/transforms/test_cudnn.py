"""cudnn=benchmark: the switch is on in training steps alone, recordings choose anew, and a run says what it can't promise."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hotloop
from hotloop.lowering.steps import cuda_graph
from hotloop.lowering.transforms.cudnn import FreshAlgorithms
from hotloop.plan import Plan
from hotloop.task_file import LoadedTask
from hotloop.tuning.auto import feasibility_facts
from tests.support.fake_graph_recorder import FakeRecorder
from tests.support.programs import a_task
from tests.support.runs import start_run
from tests.support.tasks.model_families import BATCH, family

TIMED = Plan(cudnn="benchmark")


@pytest.fixture(autouse=True)
def on_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for CUDA are lowered on this CPU, whose build of torch has the switch too."""
    monkeypatch.setattr("hotloop.lowering.build._check_plan", lambda parts: None)


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(32, 5))
        self.seen = list[tuple[bool, bool]]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((self.training, torch.backends.cudnn.benchmark))
        return self.layers(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(("plan", "on"), [(TIMED, True), (Plan(), None)])
def test_the_switch_is_set_in_training_steps_and_restored(
    plan: Plan, on: bool | None, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before)
    program = hotloop.lower(family("residual", model=Noting), plan)
    seen = program.model.seen
    seen.clear()
    program.advance(2)
    assert torch.backends.cudnn.benchmark is before
    program.step(tuple(column[:BATCH] for column in family("residual").data))
    with program.inference() as model:
        model(family("residual").data[0][:2])
    assert torch.backends.cudnn.benchmark is before
    assert seen == [(True, before if on is None else on)] * 3 + [(False, before)]


def test_the_switch_is_restored_where_a_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    program = hotloop.lower(family("residual", model=Noting), TIMED)
    monkeypatch.setattr(program.model, "layers", nn.Linear(1, 1))
    with pytest.raises(RuntimeError):
        program.advance(1)
    assert torch.backends.cudnn.benchmark is False


@pytest.mark.parametrize(("cudnn", "apart"), [("benchmark", True), ("default", False)])
def test_a_step_is_recorded_with_the_switch_on_in_one_thread_of_its_own(
    cudnn: str, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch stores choices by thread, and this one has made its own when the baseline ran."""
    recorded = list[tuple[threading.Thread, bool]]()

    class Noted(FakeRecorder):
        def record(self, works: Any, **options: Any) -> Any:
            recorded.append((threading.current_thread(), torch.backends.cudnn.benchmark))
            return super().record(works, **options)

    monkeypatch.setattr(cuda_graph, "GraphRecorder", Noted)
    program = hotloop.lower(a_task(), Plan(graphs=2, residency="device", cudnn=cudnn))
    program.advance(4)
    threads = {thread for thread, _ in recorded}
    assert len(recorded) == 2 and len(threads) == 1  # of one step, and of two
    assert (threading.current_thread() not in threads) is apart
    assert {on for _, on in recorded} == {cudnn == "benchmark"}
    plain = hotloop.lower(a_task())
    plain.advance(4)
    assert torch.allclose(program.model.weight, plain.model.weight, rtol=1e-5)


def test_what_fails_in_the_thread_fails_here() -> None:
    with pytest.raises(ZeroDivisionError):
        FreshAlgorithms()(lambda: 1 // 0)


@pytest.mark.parametrize(("axes", "said"), [({}, True), ({"graphs": "step"}, False)], ids=["eager", "recorded"])
def test_that_a_process_keeps_its_first_choice_is_said_where_it_counts(
    axes: dict[str, Any], said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graph, "GraphRecorder", FakeRecorder)
    lines = list[str]()
    hotloop.lower(a_task(), Plan(cudnn="benchmark", **axes), lines.append)
    assert any("that this process has computed before keeps its algorithm" in line for line in lines) is said
    assert not any("\n" in line for line in lines)


def test_a_run_says_that_a_resumed_one_may_differ(tmp_path: Path) -> None:
    lines = list[str]()
    run, _ = start_run(LoadedTask(a_task(), None, {}), plan=TIMED, run=tmp_path / "run", say=lines.append)
    [reason] = run.record.facts.inexact
    assert reason.startswith("cudnn=benchmark: after a resume cuDNN may choose another algorithm")
    assert lines.count(reason) == 1 and not run.record.facts.exact
    assert json.loads((tmp_path / "run" / "run.json").read_text())["facts"]["exact"] is False
    exact, _ = start_run(LoadedTask(a_task(), None, {}), plan=Plan(), run=tmp_path / "exact")
    assert exact.record.facts.exact and exact.record.facts.inexact == []


@pytest.mark.parametrize(
    ("layer", "convolves"),
    [
        (lambda: nn.Conv1d(6, 3, 1), True),
        (lambda: nn.ConvTranspose1d(6, 3, 1), True),
        (lambda: nn.LazyConv1d(3, 1), True),
        (lambda: nn.Linear(1, 1), False),
    ],
    ids=["over sequences", "transposed", "lazy", "none"],
)
def test_facts_say_whether_a_layer_convolves(layer: Callable[[], nn.Module], convolves: bool) -> None:
    data = torch.randn(12, 6, 1), torch.arange(12) % 3
    facts, _ = feasibility_facts(
        a_task(model=lambda: nn.Sequential(layer(), nn.Flatten(), nn.LazyLinear(3)), data=data), Plan()
    )
    assert facts.has_convolution_layers is convolves and not facts.convolutions
