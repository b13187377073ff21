"""Chains of operations that each go through memory. Records are made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hotloop.core.records.profile import CompiledNetwork, ModuleTime, OperatorTime, Remedy
from tests.support.profiler.handmade_steps import operator, remedies, seen

NAMES = ("exp", "sum", "div", "log")


def passes(*names: str, ms: float = 0.5, **fields: Any) -> list[OperatorTime]:
    given = dict(where="net.py:9", function="softmax", module="net", shapes=["256x2000"], bytes=4e6, flops=5e5) | fields
    return [operator(name, ms, **given) for name in names]


def said(ones: list[OperatorTime], **fields: Any) -> list[Remedy]:
    found = remedies(seen({"forward": 5.0, "backward": 5.0}, operators=ones, **fields))
    return [one for one in found if "follow one another" in one.cause]


def test_what_is_written_out_is_named_and_the_longest_pass_stays() -> None:
    backward = passes("mul", "div", "exp", "neg", ms=0.4, phase="backward")
    (found,) = said([*passes("exp", "sum", "div"), *passes("log", ms=0.8, where="net.py:10"), *backward])
    assert found.where == "net.py:9" and "4 operations" in found.cause and "256x2000" in found.cause
    assert found.gain == pytest.approx((3 * 0.5 + 0.8 + 4 * 0.4 - 0.8 - 0.4) / 10, rel=1e-3)


def test_of_each_module_one_pass_stays() -> None:
    layers = [one for layer in ("0", "1") for one in passes(*NAMES, module=layer)]
    (found,) = said(layers)
    assert found.gain == pytest.approx(2 * 3 * 0.5 / 10, rel=1e-3)


OTHERS = {
    "what a layer of torch's own needs": passes("div_", "mul"),
    "layers with some each": [one for layer in "abcd" for one in passes("mul", "add", module=layer)],
    "small ones": passes(*NAMES, ms=1e-3),
    "an update": passes(*NAMES, phase="update"),
    "what libraries calculate": passes("_softmax", "max_pool2d_with_indices", "relu", "native_layer_norm"),
    "backward alone": passes(*NAMES, phase="backward"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_others_are_none(case: str) -> None:
    assert said(OTHERS[case]) == []


@pytest.mark.parametrize(("others", "much"), [(0.7, 2.0), (0.1, 4.0), (0.7, 4.0)])
def test_an_operator_is_named_once_unless_it_takes_most(others: float, much: float) -> None:
    ones = [*passes("exp", "sum", "div", ms=others), *passes("log", ms=much)]
    causes = [one.cause for one in remedies(seen({"forward": 7.0}, operators=ones))]
    assert any("aten::log takes" in cause for cause in causes) is (much > 3 * others)
    assert bool(said(ones)) is (others > 0.5)


@pytest.mark.parametrize(("kind", "told"), [("MultiheadAttention", False), ("Attention", True)])
def test_torchs_own_attention_is_left_alone(kind: str, told: bool) -> None:
    module = ModuleTime(name="net", kind=kind, calls=1, forward_ms=3.0, backward_ms=None, share=0.3)
    assert bool(said(passes(*NAMES), modules=[module])) is told


def test_what_else_runs_at_its_lines_is_named() -> None:
    found = remedies(seen({"forward": 7.0}, operators=[*passes(*NAMES, ms=0.7), *passes("sort", ms=3.0)]))
    assert {"follow one another", "aten::sort takes"} == {
        part for part in ("follow one another", "aten::sort takes") for one in found if part in one.cause
    }


SPLINE = ("mul", "add", "floor", "clamp", "sub", "where", "mul", "add")
"""What no one operation of torch does."""

RACE = dict(network="Net", pairs=12, compile_s=4.0)


def test_a_chain_that_torch_has_one_operation_for_is_told_which() -> None:
    (found,) = said(passes(*NAMES))
    assert "F.softmax" in found.remedy and "torch.compile" not in found.remedy
    (found,) = said(passes("tanh", "mul", "add", "mul"))
    assert "F.gelu" in found.remedy


def test_any_other_chain_is_for_the_compiler_with_a_predicted_gain() -> None:
    (found,) = said(passes(*SPLINE))
    assert "torch.compile of softmax" in found.remedy and "one operation for the whole" not in found.remedy
    assert "predicted" in found.evidence and found.gain > 0.1
    (found,) = said(passes(*NAMES * 7))  # too long for any single one
    assert "torch.compile" in found.remedy


def test_a_measured_gain_of_the_compiler_is_named_and_without_one_nothing_is() -> None:
    (found,) = said(passes(*SPLINE), compiled=CompiledNetwork(ratio=1.8, low=1.7, high=1.9, **RACE))
    assert "1.80 times as fast" in found.evidence
    assert said(passes(*SPLINE), compiled=CompiledNetwork(ratio=0.9, low=0.8, high=1.0, **RACE)) == []
    assert said(passes(*NAMES), compiled=CompiledNetwork(ratio=0.9, low=0.8, high=1.0, **RACE)) != []
