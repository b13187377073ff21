"""`profile`: a Task or a script is watched, held against this machine's limits, diagnosed; remedies are raced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import hotloop
from hotloop.core.hardware.probe import measure_hardware, probe_hardware
from hotloop.core.plan_request import PlanRequest
from hotloop.core.records.hardware import Figure, Speed
from hotloop.core.records.profile import GroupTime, OperatorTime, OptimizerUse, Profile, ThreadUse
from hotloop.core.records.race import Timing, Verdict
from hotloop.errors import PlanError, TimeOverError
from hotloop.plan import BASELINE, Plan
from hotloop.profiler import profile as inspecting
from hotloop.profiler.profile import oversubscription
from hotloop.task_file import LoadedTask


def task(**fields: Any) -> hotloop.Task:
    given = dict(
        model=lambda: nn.Linear(4, 3),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters),
        data=(torch.randn(20, 4), torch.arange(20) % 3),
        batch_size=5,
        epochs=2,
    )
    return hotloop.Task(**(given | fields))


def seen(**fields: Any) -> Profile:
    """Of a step that is half an update in a loop over parameters."""
    update = OptimizerUse(
        kind="Adam",
        where="train.py:9",
        implementation="forloop",
        groups=[GroupTime(name="0", tensors=50, numbers=500, ms=None)],
        steps=1,
        ms=5.0,
    )
    given = dict(source="task", plan="baseline", steps=20, step_ms=10.0, phases={"forward": 5.0, "update": 5.0})
    return Profile(**(given | {"optimizers": [update]} | fields))


@pytest.fixture(autouse=True)
def measured(monkeypatch) -> Iterator[list[str]]:
    """A machine whose limits are known at once; the devices that were asked for."""
    asked: list[str] = []

    def probe(device: str, progress: Any) -> Any:
        asked.append(device)
        speed = Speed({"fp32": Figure(1e11, "flop_per_s", "measured")}, Figure(1e10, "bytes_per_s", "measured"))
        hardware = probe_hardware(device)
        return replace(hardware, devices=tuple(replace(one, speed=speed) for one in hardware.devices))

    monkeypatch.setattr(inspecting, "measure_hardware", probe)
    yield asked


def raced_as(monkeypatch, ratio: float | None, **fields: Any) -> list[Any]:
    """Races that end like this; the contests that were asked for."""
    contests: list[Any] = []

    def raced(loaded: LoadedTask, contest: Any, **options: Any) -> Verdict:
        contests.append(contest)
        bounds = {} if ratio is None else dict(ratio=ratio, ratio_low=ratio - 0.1, ratio_high=ratio + 0.1)
        plans = [
            Timing(name=plan.brief(), plan=plan.model_dump(), **bounds, **fields)
            for plan in (contest.baseline, *contest.plans)
        ]
        given = dict(task="task", fingerprint="", baseline="baseline", winner=None, steps=None, seconds=1.0)
        return Verdict(plans=plans, notes=["the machine was busy"], machine="", versions={}, **given)

    monkeypatch.setattr(inspecting, "race_loaded", raced)
    return contests


def watched_as(monkeypatch, profile: Profile) -> None:
    monkeypatch.setattr(inspecting, "record_task", lambda *args, **options: profile)


def test_what_was_seen_is_held_against_the_machine_and_diagnosed(monkeypatch, measured) -> None:
    watched_as(monkeypatch, seen())
    found = hotloop.profile(task(), progress=False)
    assert measured == ["cpu"] and found.limits.flop_per_s == {"fp32": 1e11} and found.machine
    [remedy] = found.remedies
    assert remedy.axes == {"optimizer": "fused"} and remedy.won is None


@pytest.mark.parametrize("plan", [Plan(optimizer="fused")])
def test_a_plan_that_has_the_axis_already_is_not_told_to_set_it(monkeypatch, plan: Plan) -> None:
    watched_as(monkeypatch, seen())
    assert hotloop.profile(task(), plan=plan, progress=False).remedies[0].axes == {}


def test_a_profile_of_auto_compiles_nothing_that_training_may_not_compile() -> None:
    assert inspecting.resolve_plan(task(epochs=10_000), PlanRequest.from_value("auto", {"device": "cpu"})) == Plan(
        optimizer="fused"
    )
    asked = PlanRequest.from_value("auto", {"device": "cpu", "compile": "step"})
    assert inspecting.resolve_plan(task(), asked).compile == "step"


def test_an_axis_that_cannot_be_run_is_not_proposed(monkeypatch) -> None:
    watched_as(monkeypatch, seen())
    own = task(optimizer=lambda parameters: torch.optim.LBFGS(parameters))
    assert hotloop.profile(own, progress=False).remedies[0].axes == {}


def test_remedies_are_raced_against_the_plan(monkeypatch) -> None:
    watched_as(monkeypatch, seen())
    contests = raced_as(monkeypatch, 1.5, parity="bitwise", parity_reason="planted")
    found = hotloop.profile(task(), try_remedies=True, progress=False)
    assert [contest.baseline for contest in contests] == [BASELINE]
    assert contests[0].plans == [Plan(optimizer="fused")]
    assert found.remedies[0].won == (1.5, 1.4, 1.6)
    assert "bitwise" in found.remedies[0].evidence and "the machine was busy" in found.notes


def test_a_remedy_that_could_not_be_raced_says_so(monkeypatch) -> None:
    watched_as(monkeypatch, seen())
    raced_as(monkeypatch, None, failure="it broke")
    found = hotloop.profile(task(), try_remedies=True, progress=False)
    assert found.remedies[0].won is None and any("it broke" in note for note in found.notes)


def test_nothing_is_raced_where_no_plan_could_help(monkeypatch) -> None:
    watched_as(monkeypatch, seen(optimizers=[]))
    contests = raced_as(monkeypatch, 1.5)
    found = hotloop.profile(task(), try_remedies=True, progress=False)
    assert contests == [] and any("none of the remedies" in note for note in found.notes)


@pytest.mark.more
def test_a_real_race_fills_in_what_was_won(monkeypatch) -> None:
    monkeypatch.setattr("hotloop.tuning.races.measure.WARM_UP_S", 0.01)
    monkeypatch.setattr("hotloop.tuning.races.rounds._WINDOW_S", {"cpu": 0.0005})
    plain = inspecting._diagnose(seen(), lambda doing, share: None)
    found = inspecting.race_remedies(LoadedTask(task(), None, {}), plain, BASELINE, time_limit="60s", prove=None)
    assert found.remedies[0].won is not None and len(found.remedies[0].won) == 3


def test_a_script_has_no_plan() -> None:
    with pytest.raises(PlanError, match="make the training a Task"):
        hotloop.profile("train.py", progress=False, plan=BASELINE)


def overhead(**fields: Any) -> Profile:
    """A step of so many small operations that compiling may win."""
    small = [
        OperatorTime(name="aten::mul", phase="forward", module=f"n{n}", calls=2, ms=0.02, shapes=["8x4"])
        for n in range(200)
    ]
    return seen(optimizers=[], operators=small, phases={"forward": 8.0, "backward": 2.0}, step_ms=10.0, **fields)


@pytest.mark.parametrize("ratio", [2.0, 1.05, None])
def test_only_a_race_that_was_won_makes_compiling_a_remedy(ratio: float | None, monkeypatch) -> None:
    """The made interval is 0.1 to each side."""
    watched_as(monkeypatch, overhead())
    before = hotloop.profile(task(), progress=False)
    assert before.remedies == [] and any("--try measures it" in line for line in before.advice)
    contests = raced_as(monkeypatch, ratio)
    found = hotloop.profile(task(), try_remedies=True, progress=False)
    assert [plan.compile for plan in contests[0].plans] == ["step"]
    if ratio == 2.0:
        assert [one.axes for one in found.remedies] == [{"compile": "step"}] and found.remedies[0].gain == 0.5
    else:
        assert found.remedies == [] and "compile=step" in found.advice[0] and "hotloop tune" in found.advice[0]


def test_a_race_that_a_time_limit_ends_keeps_the_profile(monkeypatch) -> None:
    def raced(*given: Any, **options: Any) -> Verdict:
        raise TimeOverError("preparing baseline was ended: 0 s are left of the time limit")

    watched_as(monkeypatch, seen())
    monkeypatch.setattr(inspecting, "race_loaded", raced)
    found = hotloop.profile(task(), try_remedies=True, time_limit="1s", progress=False)
    assert found.remedies and any("no remedy was raced: preparing baseline was ended" in note for note in found.notes)


@pytest.mark.parametrize(
    ("threads", "says"),
    [
        (ThreadUse(torch=2, cores=2, busy=1.0, others=1.0), "set OMP_NUM_THREADS=1 and run again"),
        (ThreadUse(torch=1, cores=2, busy=1.0, others=1.0), "run again when the machine is quiet"),
        (ThreadUse(torch=2, cores=2, busy=2.0, others=0.1), ""),
        (ThreadUse(torch=64, cores=64, busy=9.0, others=1.0), ""),
        (None, ""),
    ],
)
def test_a_busy_machine_is_said_first(threads: ThreadUse | None, says: str, monkeypatch) -> None:
    monkeypatch.setattr("hotloop.profiler.profile.oversubscription", lambda many, few: 1.0)
    watched_as(monkeypatch, overhead(threads=threads))
    found = hotloop.profile(task(), progress=False)
    assert says in found.busy and bool(found.busy) is bool(says)
    assert bool(found.candidates) is not bool(says)  # what starting an operation takes is absolute


def test_limits_measured_under_load_are_marked_and_nothing_is_judged_by_them(monkeypatch) -> None:
    watched_as(monkeypatch, seen())
    real = inspecting.measure_hardware
    monkeypatch.setattr(
        inspecting, "measure_hardware", lambda *given, **options: replace(real(*given, **options), busy="busy")
    )
    found = hotloop.profile(task(), progress=False)
    assert found.limits.busy and "busy" in found.notes
    assert all(one.limit_share is None for one in found.modules)


def test_threads_beyond_the_cores_are_measured(monkeypatch) -> None:
    monkeypatch.setattr("hotloop.profiler.profile.oversubscription", lambda threads, cores: 4.0)
    watched_as(monkeypatch, seen(threads=ThreadUse(torch=16, cores=2, busy=1.0, others=0.0), optimizers=[]))
    [remedy] = hotloop.profile(task(), progress=False).remedies
    assert "too many threads" in remedy.cause and remedy.gain == pytest.approx(0.75)
    assert remedy.axes == {"threads": 2}


@pytest.mark.parametrize(
    ("used", "slower", "told"),
    [
        (ThreadUse(torch=2, cores=2, busy=1.0, others=0.99), 30.0, ["30.0 times as long as with 1"]),
        (ThreadUse(torch=2, cores=2, busy=1.0, others=0.99), 1.1, []),
        (ThreadUse(torch=2, cores=2, busy=1.9, others=0.3), 30.0, []),
        (ThreadUse(torch=1, cores=2, busy=1.0, others=1.0), 30.0, []),
    ],
    ids=["they wait", "they hardly do", "nobody else", "one thread"],
)
def test_programs_that_hold_cores_are_told(used: ThreadUse, slower: float, told: list[str], monkeypatch) -> None:
    monkeypatch.setattr("hotloop.profiler.profile.oversubscription", lambda threads, cores: slower)
    watched_as(monkeypatch, seen(threads=used, optimizers=[]))
    found = hotloop.profile(task(), progress=False)
    notes = [note for note in found.notes if "other programs kept" in note]
    assert len(notes) == len(told) and all(part in note for part, note in zip(told, notes, strict=True))
    assert not any("threads" in remedy.cause for remedy in found.remedies)


def test_a_script_that_never_trained_needs_no_limits(monkeypatch, measured) -> None:
    nothing = Profile(source="train.py", steps=0, step_ms=None, notes=["it never trained here"])
    monkeypatch.setattr(inspecting, "record_script", lambda *args, **options: nothing)
    found = hotloop.profile("train.py", progress=False)
    assert measured == [] and found.notes == nothing.notes and found.machine


@pytest.mark.parametrize(("seconds", "slower"), [({1: 3.0, 2: 2.0, 16: 8.0}, 4.0), ({1: 1.0, 2: 4.0, 16: 3.0}, 3.0)])
def test_crowded_threads_are_held_against_the_better_of_enough_and_one(monkeypatch, seconds, slower) -> None:
    monkeypatch.setattr("hotloop.profiler.profile._time_matmuls", lambda inputs, threads: seconds[threads])
    assert oversubscription(16, 2) == slower


def test_threads_are_as_before_after_they_were_tried() -> None:
    before = torch.get_num_threads()
    assert oversubscription(before + 3, before) >= 1
    assert torch.get_num_threads() == before


def interrupted(device: str, progress: Any) -> Any:
    raise KeyboardInterrupt


def test_what_was_seen_on_a_device_that_cannot_be_measured_is_kept(monkeypatch) -> None:
    watched_as(monkeypatch, seen(device="hpu:0"))
    monkeypatch.setattr(inspecting, "measure_hardware", measure_hardware)
    found = hotloop.profile(task(), progress=False)
    assert found.phases and "limits of hpu:0 are unknown: hotloop can't measure such a device" in found.notes


def test_what_was_seen_is_kept_where_ctrl_c_ends_the_measuring_of_the_machine(monkeypatch) -> None:
    watched_as(monkeypatch, seen())
    monkeypatch.setattr(inspecting, "measure_hardware", interrupted)
    found = hotloop.profile(task(), progress=False)
    assert found.phases and "limits of this machine are unknown: Ctrl-C ended the measurement" in found.notes
