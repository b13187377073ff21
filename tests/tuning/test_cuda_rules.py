"""Which compiled and recorded plans are considered on a made-up CUDA device, in which order, and why."""

from __future__ import annotations

from typing import Any

import pytest

from hotloop.core.feasibility import violations
from hotloop.core.records.hardware import Hardware
from hotloop.core.records.training import TaskFacts
from hotloop.plan import Plan
from hotloop.tuning.cuda_rules import LARGE_WORK, auto_cuda_plans, cuda_reasons, cuda_variants
from hotloop.tuning.rules import MIN_COMPILED_STEPS, rank_plans
from hotloop.tuning.search.candidates import compiled_changes
from hotloop.tuning.search.candidates import compiled_variants as tuned
from tests.support.tuning.fake_machines import A_GPU, LBFGS, a_machine, facts

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
    "a closure": LBFGS,
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


def eager(told: TaskFacts, precision: str = "fp32", machine: Hardware = GPU) -> Plan:
    """What `auto` trains with where nothing is compiled, with the Task's own form of the update."""
    choices = rank_plans(told, machine, Plan(precision=precision))  # type: ignore[arg-type]
    return next(one.plan for one in choices if one.plan.compile == "none").with_axes(optimizer="default")


def brief(plan: Plan) -> str:
    return plan.with_axes(device="cpu", precision="default", residency="stream", graphs="none").brief()


@pytest.mark.parametrize(("kind", "precision"), FIRST, ids=" ".join)
def test_the_likeliest_stand_first_and_follow_from_what_the_task_is(kind: str, precision: str) -> None:
    told = of_kind(kind)
    ways = auto_cuda_plans(eager(told, precision), told, GPU, ())
    assert [brief(way) for way in ways if way.graphs == 32][: len(FIRST[kind, precision]) + 1] == [
        *FIRST[kind, precision],
        "compile=step",
    ]
    assert {way.precision for way in ways} == {precision}


@pytest.mark.parametrize("kind", KINDS)
def test_every_plan_can_be_run_and_each_axis_has_its_reason(kind: str) -> None:
    told = of_kind(kind)
    start = eager(told)
    for way in auto_cuda_plans(start, told, GPU, ()):
        assert violations(way, told, GPU) == []
        given = {axis: value for axis, value in way.model_dump().items() if value != getattr(start, axis)}
        if way.compile == "none":
            given["compile"] = "none"
        assert {line.partition(": ")[0] for line in cuda_reasons(way, start, told)} == {
            f"{axis}={value}" for axis, value in given.items()
        }


@pytest.mark.parametrize("kind", ["recurrent", "a closure"])
def test_what_no_graph_can_take_in_is_not_considered(kind: str) -> None:
    told = of_kind(kind)
    assert auto_cuda_plans(eager(told), told, GPU, ()) == []


def test_recurrent_layers_are_said_to_be_the_reason_on_cuda() -> None:
    why = rank_plans(of_kind("recurrent"), GPU, Plan())[0].why
    assert any("cuDNN reads the weights of recurrent layers" in line for line in why)


def test_nothing_is_considered_in_a_run_too_short_to_prove_it() -> None:
    told = of_kind("small images", steps=MIN_COMPILED_STEPS - 1)
    assert auto_cuda_plans(eager(told), told, GPU, ()) == []


def test_how_much_a_step_computes_decides_whether_rewrites_or_the_algorithm_stand_first() -> None:
    for parameters, first in ((LARGE_WORK // 64 - 1, REWRITTEN), (LARGE_WORK // 64, TIMED)):
        told = of_kind("small images", parameters=parameters, batch_size=64)
        assert brief(auto_cuda_plans(eager(told), told, GPU, ())[0]) == first
    told = of_kind("large images")
    [line] = [
        one for one in cuda_reasons(Plan(device="cuda:0", graphs="step"), eager(told), told) if "compile=none" in one
    ]
    assert "11,000,000 parameters and batches of 128" in line


@pytest.mark.parametrize("axis", ["layout", "cudnn", "optimizer", "rewrites", "graphs", "compile"])
def test_axes_that_the_user_set_stay(axis: str) -> None:
    told = of_kind("large images")
    start = eager(told, "bf16")
    ways = auto_cuda_plans(start, told, GPU, {axis})
    assert ways and {getattr(way, axis) for way in ways} == {getattr(start, axis)}
    assert len(set(ways)) == len(ways)


def test_only_a_recorded_step_has_cudnn_time_its_algorithms() -> None:
    """A process keeps its first choice, and the baseline has made it by then."""
    told = of_kind("large images")
    ways = auto_cuda_plans(eager(told), told, GPU, ())
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
