"""Plans on a CUDA device: each gives what the baseline gives there, and its State is the baseline's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import hotloop
from hotloop.core.state import State, differing_paths
from hotloop.errors import PlanError
from hotloop.lowering.steps.cuda_graph import RecordedGraph
from hotloop.plan import Plan
from tests.lowering.test_cpu_plans import STEPS, after, assert_equal_within_rounding, changed
from tests.support.programs import through_file
from tests.support.tasks.model_families import BATCH, FAMILIES, family

pytestmark = pytest.mark.gpu

ON = "cuda:0"
PLANS = [
    Plan(device=ON, layout="channels_last"),
    Plan(device=ON, residency="device"),
    Plan(device=ON, compile="forward"),
    Plan(device=ON, compile="step"),
    Plan(device=ON, graphs="step"),
    Plan(device=ON, graphs="step", optimizer="forloop"),
    Plan(device=ON, graphs="step", compile="step"),
    Plan(device=ON, graphs=2, residency="device"),
    Plan(device=ON, graphs=2, residency="device", compile="step"),
]
IMAGES = ("mlp", "residual", "vae")
"""Those that can be laid out otherwise; `cnn` draws for images, and a GPU draws in the order of memory."""

CAPTURED = [plan for plan in PLANS if plan.compile != "none" or plan.graphs != "none"]
RUNS = [
    (name, plan)
    for name in FAMILIES
    for plan in PLANS
    if (name in IMAGES or plan.layout == "contiguous") and not (name == "lstm" and plan in CAPTURED)
]
RUNS += [(name, Plan(device=ON, graphs="step", accumulation=3)) for name in ("mlp", "gpt")]


@pytest.fixture(autouse=True)
def in_fp32() -> Iterator[None]:
    """cuDNN takes tf32 for convolutions unless told otherwise, and may sum in another order at each run."""
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


_BASELINES: dict[str, State] = {}


def baseline(name: str) -> State:
    if name not in _BASELINES:
        _BASELINES[name] = after(hotloop.lower(family(name), Plan(device=ON)), STEPS)
    return _BASELINES[name]


@pytest.mark.parametrize(("name", "plan"), RUNS, ids=[f"{name}-{changed(plan)}" for name, plan in RUNS])
def test_it_runs_as_the_baseline_does_and_its_state_round_trips(
    name: str, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays: list[int] = []
    replay = RecordedGraph.replay
    monkeypatch.setattr(
        RecordedGraph, "replay", lambda self, seeds: replays.append(len(self.outputs)) or replay(self, seeds)
    )
    program = hotloop.lower(family(name), plan)
    state = after(program, STEPS)
    assert_equal_within_rounding(state, baseline(name))
    assert sum(replays) == (STEPS - 1 - STEPS // 4 if plan.graphs != "none" else 0)

    program.restore(through_file(state))
    assert differing_paths(program.state(), state) == []
    further = after(program, 3)
    under_the_baseline = hotloop.lower(family(name), Plan(device=ON))
    under_the_baseline.restore(state)
    assert_equal_within_rounding(further, after(under_the_baseline, 3))


@pytest.mark.parametrize("plan", CAPTURED, ids=changed)
def test_recurrent_layers_of_cudnn_are_refused_in_one_line(plan: Plan) -> None:
    with pytest.raises(PlanError, match="lstm is one of torch's recurrent layers") as caught:
        hotloop.lower(family("lstm"), plan)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("which", ["all", "mm_as_sum"])
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_rewritten_steps_come_to_the_same(name: str, which: str) -> None:
    plan = Plan(device=ON, residency="device", graphs=2, compile="step", rewrites=which)
    assert_equal_within_rounding(after(hotloop.lower(family(name), plan), STEPS), baseline(name))


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_reduced_precisions(precision: str) -> None:
    plan = Plan(device=ON, precision=precision)
    if precision != "fp16" and torch.cuda.get_device_capability(0) < (8, 0):
        pytest.skip(f"{precision} is there from NVIDIA's compute capability 8.0 on")
    state, plain = (
        after(hotloop.lower(family("mlp"), plan), 10),
        after(hotloop.lower(family("mlp"), Plan(device=ON)), 10),
    )
    name = "1.weight"
    error = (state.parameters[name] - plain.parameters[name]).norm() / plain.parameters[name].norm()
    assert error < 1e-1
    assert {value.dtype for value in state.parameters.values()} == {torch.float32}


@pytest.mark.parametrize("compiled", ["none", "step"])
def test_replays_draw_anew_at_each_step_and_the_same_at_the_same_step(compiled: str) -> None:
    """On one batch, with weights that don't move, the losses of a net with dropout differ, and those of a restart don't."""
    task = family("cnn", optimizer=lambda p: torch.optim.SGD(p, lr=0.0), schedule=None, shuffle=False)
    program = hotloop.lower(task, Plan(device=ON, graphs="step", compile=compiled))
    batch = tuple(column[:BATCH] for column in task.data)
    program.step(batch)
    state = program.state()
    losses = [float(program.step(batch)) for _ in range(4)]
    assert len(set(losses)) == len(losses)
    program.restore(state)
    assert [float(program.step(batch)) for _ in range(4)] == losses


@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RMSprop", "Adadelta"])
@pytest.mark.parametrize("how", ["default", "fused"])
def test_optimizers_keep_their_state_on_the_device(name: str, how: str) -> None:
    if how == "fused" and not name.startswith("Adam"):
        pytest.skip(f"{name} has no fused form")

    def schedule(optimizer: torch.optim.Optimizer, total: int) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=total, cycle_momentum=False)

    task = family("mlp", optimizer=lambda p: getattr(torch.optim, name)(p, lr=0.01), schedule=schedule)
    state = after(hotloop.lower(task, Plan(device=ON, graphs="step", optimizer=how)), 9)
    assert_equal_within_rounding(state, after(hotloop.lower(task, Plan(device=ON)), 9))
