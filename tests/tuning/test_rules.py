"""What `--plan auto` makes of made-up Tasks and machines."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from hotloop.core.feasibility import violations
from hotloop.core.records.hardware import Hardware
from hotloop.plan import Plan
from hotloop.tuning.rules import MIN_COMPILED_STEPS, rank_plans, skipped_hints
from tests.support.tuning.fake_machines import A_GPU, GIB, LBFGS, a_device, a_machine, facts

CPU, GPU, NO_COMPILER = a_machine(), a_machine(A_GPU), a_machine(compiler=None)
MAC = a_machine(a_device("mps", ("fp32", "fp16")))
GLIBC, GLIBC_AND_GPU = a_machine(allocator="glibc"), a_machine(A_GPU, allocator="glibc")
SMALL_GPU = a_machine(replace(A_GPU, memory_free=a_device(free=1.5 * GIB).memory_free))
LONG = {"steps": MIN_COMPILED_STEPS}
FOREACH = {"implementations": ["forloop", "foreach"]}

BEST = {
    "a short run on the CPU": (CPU, {}, {"optimizer": "fused"}),
    "a long one": (CPU, LONG, {"optimizer": "fused", "compile": "package"}),
    "fewer steps, which may be of seconds each": (CPU, {"steps": 15_000}, {"optimizer": "fused", "compile": "package"}),
    "one step less": (CPU, {"steps": MIN_COMPILED_STEPS - 1}, {"optimizer": "fused"}),
    "a stream of unknown length": (CPU, {"data": "Stream", "steps": None}, {"optimizer": "fused"}),
    "a long one without a compiler": (NO_COMPILER, LONG, {"optimizer": "fused"}),
    "a long one on a GPU": (GPU, LONG, {"device": "cuda:0", "optimizer": "fused", "residency": "device"}),
    "data as large as the memory": (SMALL_GPU, {}, {"device": "cuda:0", "optimizer": "fused"}),
    "samples": (CPU, {"data": "Samples", "data_bytes": None}, {"residency": "host", "optimizer": "fused"}),
    "samples of a single epoch": (CPU, {"data": "Samples", "data_bytes": None, "steps": 100}, {"optimizer": "fused"}),
    "samples on a GPU": (GPU, {"data": "Samples", "data_bytes": None},
                         {"device": "cuda:0", "residency": "host", "optimizer": "fused"}),
    "no fused update": (CPU, FOREACH, {}),
    "no fused update on a GPU": (GPU, FOREACH, {"device": "cuda:0", "optimizer": "foreach", "residency": "device"}),
    "a long one with recurrent layers": (CPU, {**LONG, "recurrent": True}, {"optimizer": "fused"}),
    "memory that can be kept": (GLIBC, {}, {"allocator": "keep", "optimizer": "fused"}),
    "memory that can be kept, in a long run": (
        GLIBC, LONG, {"allocator": "keep", "optimizer": "fused", "compile": "package"},
    ),
    "memory that can be kept, beside a GPU": (
        GLIBC_AND_GPU, {}, {"device": "cuda:0", "optimizer": "fused", "residency": "device"},
    ),
    "LBFGS": (CPU, {**LBFGS, **LONG}, {}),
    "a Mac": (MAC, LONG, {"device": "mps", "optimizer": "fused", "residency": "device"}),
}  # fmt: skip


@pytest.mark.parametrize("name", BEST)
def test_the_best_choice(name: str) -> None:
    machine, task, axes = BEST[name]
    assert rank_plans(facts(**task), machine, Plan())[0].plan == Plan(**axes)


@pytest.mark.parametrize("name", BEST)
def test_every_choice_can_be_run_and_the_last_is_the_baseline(name: str) -> None:
    machine, task, axes = BEST[name]
    choices = rank_plans(facts(**task), machine, Plan())
    assert choices[-1].plan == Plan(device=axes.get("device", "cpu"))
    assert len({choice.plan for choice in choices}) == len(choices)
    for choice in choices:
        assert violations(choice.plan, facts(**task), machine) == []
        assert (choice.plan.precision, choice.plan.graphs) == ("default", "none")


def test_each_axis_that_auto_changed_has_its_reason() -> None:
    for choice in rank_plans(facts(**LONG), GPU, Plan()):
        for axis, value in choice.plan.model_dump().items():
            if value != getattr(Plan(), axis):
                assert any(reason.startswith(f"{axis}={value}: ") for reason in choice.why)


def test_each_gives_up_no_less_than_the_one_before_and_the_compilation_first() -> None:
    choices = rank_plans(facts(**LONG), CPU, Plan())
    changed = [sum(value != getattr(Plan(), axis) for axis, value in c.plan.model_dump().items()) for c in choices]
    assert all(more >= less for more, less in pairwise(changed))
    assert choices[1].plan == choices[0].plan.with_axes(compile="none")


SET: dict[str, tuple[Hardware, dict[str, Any]]] = {
    "device": (GPU, {"device": "cpu"}),
    "compile": (CPU, {"compile": "none"}),
    "another compile": (CPU, {"compile": "forward"}),
    "optimizer": (CPU, {"optimizer": "forloop"}),
    "residency": (GPU, {"residency": "stream"}),
    "precision": (GPU, {"precision": "bf16"}),
    "accumulation": (CPU, {"accumulation": 4}),
    "the default by name": (GPU, {"device": "cpu", "optimizer": "default", "compile": "none"}),
}


@pytest.mark.parametrize("name", SET)
def test_what_the_user_set_stays(name: str) -> None:
    machine, axes = SET[name]
    for choice in rank_plans(facts(**LONG), machine, Plan(**axes)):
        assert {axis: getattr(choice.plan, axis) for axis in axes} == axes
        assert any(all(f"{axis}={value}" in reason for axis, value in axes.items()) for reason in choice.why)


def test_what_was_set_and_cannot_be_run_leaves_no_choice() -> None:
    assert rank_plans(facts(), CPU, Plan(precision="bf16")) == []


def test_what_should_pay_and_cannot_be_run_is_named_with_the_reason() -> None:
    [(wish, violation)] = skipped_hints(facts(**LONG), NO_COMPILER, Plan())
    assert (wish.axis, wish.value) == ("compile", "package")
    assert "C++ compiler" in violation.reason
    assert skipped_hints(facts(**LONG), CPU, Plan()) == []
    assert skipped_hints(facts(**LONG), NO_COMPILER, Plan(compile="none")) == []


@pytest.mark.parametrize(
    ("machine", "convolutions", "said"),
    [(GPU, True, True), (GPU, False, False), (CPU, True, False), (MAC, True, False)],
)
def test_who_convolves_on_cuda_hears_of_tf32(machine: Hardware, convolutions: bool, said: bool) -> None:
    why = rank_plans(facts(convolutions=convolutions), machine, Plan())[0].why
    assert any("convolutions in tf32 here" in reason for reason in why) is said
    why = rank_plans(facts(convolutions=convolutions), machine, Plan(precision="fp32"))[0].why
    assert not any("tf32" in reason for reason in why)
