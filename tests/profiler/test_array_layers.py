"""A profile of `engine=arrays`: phases that add up, layers by their modules' names, and nothing that isn't so."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotloop
from hotloop import arrays
from hotloop.core.records.profile import Profile, ThreadUse
from hotloop.core.state import differing_paths
from hotloop.errors import PlanError
from hotloop.lowering.arrays_engine.arrays_step import ArraysStep
from hotloop.lowering.build import lower
from hotloop.lowering.program import Program
from hotloop.plan import BASELINE, Plan
from hotloop.profiler import profile
from hotloop.profiler.detectors import diagnose
from hotloop.profiler.task_profile import record_program
from hotloop.task_file import LoadedTask
from tests.profiler.test_profile import measured, raced_as
from tests.support.profiler.handmade_profiles import module
from tests.support.programs import a_task

__all__ = ["measured"]

ARRAYS = Plan(engine="arrays")


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(self.fc(x)) + x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.Sequential(Half(), nn.Tanh(), Half())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.halves(x))  # type: ignore[no-any-return]


def program_of(**fields: Any) -> Program:
    given = dict(model=Model, optimizer=lambda parameters: torch.optim.Adam(parameters), clip_norm=1.0, average=0.9)
    return lower(a_task(**given | fields), ARRAYS)


def profiled(**fields: Any) -> Profile:
    return record_program(program_of(**fields), steps=20)


def test_phases_add_up_and_layers_go_by_their_modules_names() -> None:
    program = program_of()
    before = program.state()
    found = record_program(program, steps=20, source="a task")
    assert (found.engine, found.plan, found.source, found.steps) == ("arrays", ARRAYS.brief(), "a task", 20)
    assert sum(found.phases.values()) == pytest.approx(found.step_ms)
    assert {"data", "batch", "forward", "loss", "backward", "update", "python"} <= found.phases.keys()
    assert found.batch == ["5x6"] and found.samples_per_step == 5
    assert [(one.name, one.kind) for one in found.modules] == [
        ("", "Model"), ("halves", "Sequential"), ("halves.0", "Half"), ("halves.0.fc", "Linear"), ("halves.1", "Tanh"),
        ("halves.2", "Half"), ("halves.2.fc", "Linear"), ("head", "Linear"),
    ]  # fmt: skip
    for part in ("forward_ms", "backward_ms", "update_ms"):
        whole, *parts = (getattr(one, part) for one in found.modules)
        leaves = [getattr(one, part) for one in found.modules if one.kind in ("Linear", "Tanh")]
        assert whole >= max(parts) and whole >= sum(leaves) * (1 - 1e-9)
        assert all(ms > 0 for ms in leaves) == (part != "update_ms")
    assert all(one.own_forward_ms > 0 for one in found.modules if one.kind == "Half")  # its softplus, and its sum
    [optimizer] = found.optimizers
    assert (optimizer.kind, optimizer.implementation) == ("Adam", "arrays")
    assert not found.operators and found.exit_code is None
    assert [note for note in found.notes if "array operations" not in note] == []
    assert differing_paths(before, program.state()) == []
    step = program._step
    assert isinstance(step, ArraysStep)
    watched = [step, step.network.graph, *(call.layer for call in step.network.calls)]
    assert not [name for one in watched for name in vars(one) if name in ("forward", "backward", "_update", "_arrays")]


SLOW_S = 0.01
LEAST_MS = 1e3 * SLOW_S / 2
"""Of what is planted: times are scaled to a step that isn't watched, and what holds that up is in them."""


def slowed(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    right = getattr(owner, name)

    def slow(*args: Any, **named: Any) -> Any:
        until = time.perf_counter() + SLOW_S
        while time.perf_counter() < until:  # busy: what a thread only waits for is nobody's
            pass
        return right(*args, **named)

    monkeypatch.setattr(owner, name, slow)


PLANTED = {
    "forward": (arrays.Tanh, "forward"),
    "backward": (arrays.Tanh, "backward"),
    "loss": (arrays.CrossEntropy, "backward"),
    "update": (arrays.Adam, "update"),
    "batch": (ArraysStep, "_check_inputs"),
}


@pytest.mark.few("loss")
@pytest.mark.parametrize("phase", PLANTED)
def test_what_takes_long_is_in_its_phase_and_in_its_module(phase: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slowed(monkeypatch, *PLANTED[phase])
    if phase == "batch":
        monkeypatch.setattr(ArraysStep, "_known_inputs", property(lambda self: None, lambda self, value: None), False)
    found = profiled(average=None)
    assert max(found.phases, key=lambda name: found.phases[name]) == phase
    own = {one.name: (one.own_forward_ms or 0.0, one.own_backward_ms or 0.0, one.update_ms) for one in found.modules}
    if phase in ("forward", "backward"):
        place = ("forward", "backward").index(phase)
        assert max(own, key=lambda name: own[name][place]) == "halves.1"
        assert [one.own_backward_ms > LEAST_MS for one in found.modules] == [
            one.name == "halves.1" and phase == "backward" for one in found.modules
        ]
    if phase == "update":
        assert found.optimizers[0].ms > 0.5 * found.step_ms
        assert own["head"][2] > LEAST_MS and own["halves.1"][2] == 0


# --- what is said of it


def seen(**fields: Any) -> Profile:
    """Of a step on two cores of which one is idle, and of which torch would have more threads than there are."""
    given: dict[str, Any] = dict(
        source="task",
        plan="engine=arrays",
        engine="arrays",
        steps=20,
        step_ms=10.0,
        phases={"forward": 5.0, "backward": 4.0, "data": 1.0},
        modules=[module("", "Net", 50, 40), module("a", "Conv2d", 40, 30, own_forward_ms=4.0, own_backward_ms=3.0)],
        threads=ThreadUse(torch=1, cores=2, busy=1.0, others=0.0),
        samples_per_step=128,
    )
    return Profile(**given | fields)


def test_no_remedy_of_torchs_is_given() -> None:
    assert "set_num_threads" in diagnose(seen(engine="eager")).remedies[0].remedy
    found = diagnose(seen())
    assert [one for one in found.remedies if "data" not in one.cause] == []
    assert found.bound == "unknown" and found.limit_ms is None
    said = " ".join(found.bound_evidence)
    assert "array operations 90 %" in said and "input 10 %" in said and "The largest part is a: 70 %" in said


def test_what_takes_more_than_the_layers_bounds_the_step() -> None:
    found = diagnose(seen(phases={"forward": 2.0, "backward": 2.0, "data": 6.0}))
    assert found.bound == "input"
    assert "waiting for data" in found.remedies[0].cause and found.remedies[0].gain == pytest.approx(0.6)


def test_a_step_of_python_says_nothing_of_operations() -> None:
    found = diagnose(seen(phases={"forward": 2.0, "backward": 2.0, "python": 6.0}))
    assert found.bound == "overhead" and not any("operations, each" in said for said in found.bound_evidence)


def test_threads_of_torch_are_not_measured_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.profiler.profile.oversubscription", lambda threads, cores: pytest.fail("measured"))
    crowded = seen(threads=ThreadUse(torch=16, cores=2, busy=1.0, others=0.0))
    monkeypatch.setattr(profile, "record_task", lambda *args, **options: crowded)
    found = hotloop.profile(a_task(), plan="arrays", progress=False)
    assert profile.UNTRIED_TORCH in found.notes and not found.remedies[1:]


def tried() -> Profile:
    return profile.race_remedies(LoadedTask(a_task(), None, {}), seen(notes=[profile.UNTRIED_TORCH]), ARRAYS)


def test_what_torch_would_win_is_raced(monkeypatch: pytest.MonkeyPatch) -> None:
    contests = raced_as(monkeypatch, 1.5, parity="bitwise", parity_reason="planted")
    found = tried()
    assert contests[0].baseline == ARRAYS and contests[0].plans == [BASELINE]
    [remedy] = found.remedies
    assert remedy.axes == {"engine": "eager"} and remedy.won == (1.5, 1.4, 1.6)
    assert remedy.gain == pytest.approx(1 / 3) and "bitwise" in remedy.evidence
    assert profile.UNTRIED_TORCH not in found.notes


@pytest.mark.parametrize(("ratio", "says"), [(0.8, "isn't faster here: 0.80 times"), (None, "couldn't be raced")])
def test_it_is_no_remedy_where_it_wins_nothing(monkeypatch: pytest.MonkeyPatch, ratio: Any, says: str) -> None:
    raced_as(monkeypatch, ratio)
    found = tried()
    assert found.remedies == [] and any(says in note for note in found.notes)


def test_a_trace_is_refused() -> None:
    with pytest.raises(PlanError, match="a trace under engine=arrays"):
        hotloop.profile(a_task(), plan="arrays", trace="trace.json", progress=False)
