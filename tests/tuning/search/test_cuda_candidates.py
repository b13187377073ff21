"""Which compiled and recorded plans a search considers on a made-up CUDA device, and in which order."""

from __future__ import annotations

from typing import Any

import pytest

from hotloop.core.feasibility import violations
from hotloop.core.records.training import TaskFacts
from hotloop.plan import Plan
from hotloop.tuning.candidates import LARGE_WORK, compiled_changes, cuda_variants, graph_changes
from hotloop.tuning.candidates import compiled_variants as tuned
from hotloop.tuning.rules import MIN_COMPILED_STEPS, rank_plans
from tests.support.tuning.fake_machines import A_GPU, a_machine, facts

GPU = a_machine(A_GPU)
CONVOLVES = {"convolutions": True, "has_convolution_layers": True}
KINDS: dict[str, dict[str, Any]] = {
    "small images": CONVOLVES,
    "large images": {**CONVOLVES, "parameters": 11_000_000, "batch_size": 128, "inputs": [[3, 32, 32], []]},
    "volumes": {**CONVOLVES, "inputs": [[1, 8, 8, 8], []]},
    "sound": {"images": False, "has_convolution_layers": True, "inputs": [[1, 16_000], []]},
    "words": {"images": False, "parameters": 10_000_000, "batch_size": 256, "inputs": [[128]]},
    "rows": {"images": False, "inputs": [[784], []], "implementations": ["forloop", "foreach"]},
    "recurrent": {"images": False, "recurrent": True, "inputs": [[50, 8], []]},
}

REWRITTEN, TIMED, LAID = (
    "compile=step rewrites=all",
    "compile=step cudnn=benchmark",
    "layout=channels_last compile=step",
)
FIRST = {
    ("small images", "fp32"): [REWRITTEN, f"{REWRITTEN} cudnn=benchmark", "optimizer=fused cudnn=benchmark",
                               f"{LAID} cudnn=benchmark"],
    ("large images", "fp32"): [TIMED, "optimizer=fused cudnn=benchmark", f"{LAID} cudnn=benchmark", REWRITTEN],
    ("large images", "default"): [f"{LAID} cudnn=benchmark", "layout=channels_last optimizer=fused cudnn=benchmark", TIMED,
                                  REWRITTEN],
    ("large images", "bf16"): [f"{LAID} cudnn=benchmark", "layout=channels_last optimizer=fused cudnn=benchmark", TIMED,
                               REWRITTEN],
    ("volumes", "fp32"): [REWRITTEN, f"{REWRITTEN} cudnn=benchmark", "optimizer=fused cudnn=benchmark"],
    ("sound", "fp32"): [REWRITTEN, f"{REWRITTEN} cudnn=benchmark", "optimizer=fused cudnn=benchmark"],
    ("words", "fp32"): [REWRITTEN, "optimizer=fused"],
    ("words", "bf16"): [REWRITTEN, "optimizer=fused"],
    ("rows", "fp32"): [REWRITTEN, "optimizer=foreach"],
}  # fmt: skip
"""What differs from the baseline beside device, precision, residency and graphs, likeliest first; then the plain step."""


def of_kind(kind: str, **changed: Any) -> TaskFacts:
    return facts(**{"steps": MIN_COMPILED_STEPS, **KINDS[kind], **changed})


def recorded(told: TaskFacts, precision: str = "fp32") -> Plan:
    """The compiled step that is recorded, with the Task's own form of the update."""
    eager = rank_plans(told, GPU, Plan(precision=precision))[0].plan  # type: ignore[arg-type]
    return eager.with_axes(optimizer="default", compile="step", **graph_changes(told)[0])


def brief(plan: Plan) -> str:
    return plan.with_axes(device="cpu", precision="default", residency="stream", graphs="none").brief()


@pytest.mark.parametrize(("kind", "precision"), FIRST, ids=" ".join)
def test_the_likeliest_stand_first_and_follow_from_what_the_task_is(kind: str, precision: str) -> None:
    told = of_kind(kind)
    ways = cuda_variants(recorded(told, precision), told, GPU, ())
    assert [brief(way) for way in ways] == [*FIRST[kind, precision], "compile=step"]
    assert {way.precision for way in ways} == {precision}


@pytest.mark.parametrize("kind", KINDS)
def test_every_plan_can_be_run(kind: str) -> None:
    told = of_kind(kind)
    ways = cuda_variants(recorded(told), told, GPU, ())
    assert (len(ways) > 1) == (kind != "recurrent")
    assert [violations(way, told, GPU) for way in ways[:-1]] == [[]] * (len(ways) - 1)


def test_recurrent_layers_are_said_to_be_the_reason_on_cuda() -> None:
    why = rank_plans(of_kind("recurrent"), GPU, Plan())[0].why
    assert any("cuDNN reads the weights of recurrent layers" in line for line in why)


def test_the_rules_compile_nothing_on_cuda_and_name_the_search_that_does() -> None:
    choices = rank_plans(of_kind("small images"), GPU, Plan())
    assert {choice.plan.compile for choice in choices} == {"none"}
    assert any("--tune searches before the training" in line for line in choices[0].why)


def test_how_much_a_step_computes_decides_whether_rewrites_or_the_algorithm_stand_first() -> None:
    for parameters, first in ((LARGE_WORK // 64 - 1, REWRITTEN), (LARGE_WORK // 64, TIMED)):
        told = of_kind("small images", parameters=parameters, batch_size=64)
        assert brief(cuda_variants(recorded(told), told, GPU, ())[0]) == first


@pytest.mark.parametrize("axis", ["layout", "cudnn", "optimizer", "rewrites", "graphs", "compile"])
def test_axes_that_the_user_set_stay(axis: str) -> None:
    told = of_kind("large images")
    start = recorded(told, "bf16")
    ways = cuda_variants(start, told, GPU, {axis})
    assert ways and {getattr(way, axis) for way in ways} == {getattr(start, axis)}
    assert len(set(ways)) == len(ways)


def test_only_a_recorded_step_has_cudnn_time_its_algorithms() -> None:
    """A process keeps its first choice, and the baseline has made it by then."""
    told = of_kind("large images")
    unrecorded = recorded(told).with_axes(graphs="none")
    ways = [way for start in (recorded(told), unrecorded) for way in cuda_variants(start, told, GPU, ())]
    assert any(way.cudnn == "benchmark" for way in ways)
    assert all(way.graphs != "none" for way in ways if way.cudnn == "benchmark")


@pytest.mark.parametrize("kind", ["small images", "large images", "words", "rows", "recurrent"])
def test_tune_races_the_same_and_the_step_as_it_is_last(kind: str) -> None:
    told, base = of_kind(kind), Plan(device="cuda:0", residency="device")
    for change in compiled_changes(told, GPU, base):
        way = base.with_axes(**change)
        plans = tuned(way, told, GPU, base, {"device"}, pooled=False)
        assert plans == cuda_variants(way, told, GPU, {"device"}) and plans[-1] == way
        assert (len(plans) > 1) == (kind != "recurrent" and (change != {"compile": "forward"} or "images" in kind))


def test_tune_keeps_the_layout_that_won_eagerly_as_one_of_them() -> None:
    told, base = of_kind("large images"), Plan(device="cuda:0", residency="device")
    way = base.with_axes(layout="channels_last", compile="step", graphs=32)
    plans = tuned(way, told, GPU, base, {"device"}, pooled=False)
    assert plans[-1] == way and {plan.layout for plan in plans[:-1]} == {"contiguous", "channels_last"}
