"""FLOPs and bytes from names and shapes alone, against formulas worked out by hand; what isn't known stays unknown."""

from __future__ import annotations

import pytest

from hotloop.core.records.hardware import Device, Figure, Speed
from hotloop.core.records.profile import HardwareLimits, ModuleTime, OperatorTime, Profile
from hotloop.profiler.operator_cost import (
    OpCost,
    count_operator,
    device_limits,
    least_ms,
    precision_of,
    with_limit_shares,
)

F = "float32"


def test_a_product_is_a_multiplication_and_an_addition_for_each_pair() -> None:
    assert count_operator("aten::mm", [[3, 4], [4, 5]], [F, F]) == OpCost(2 * 3 * 4 * 5, 4 * (3 * 4 + 4 * 5 + 3 * 5))
    assert count_operator("mm", [[3, 4], [4, 5]], ["c10::Half"] * 2) == OpCost(120, 2 * (12 + 20 + 15))


def test_the_words_for_a_dtype_mean_the_same() -> None:
    sizes = {"float": 4, "torch.float64": 8, "double": 8, "c10::BFloat16": 2, "long int": 8, "bool": 1, "int": 4}
    for name, size in sizes.items():
        counts = count_operator("aten::neg", [[10]], [name])
        assert counts is not None and counts.bytes == 2 * 10 * size


def test_a_convolution_is_the_product_of_its_windows() -> None:
    arguments = [None, None, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1]
    counts = count_operator("aten::convolution", [[2, 3, 8, 8], [4, 3, 3, 3], [4]] + [[]] * 6, [F] * 3, arguments)
    windows = 2 * 8 * 8
    assert counts == OpCost(2 * windows * 27 * 4, 4 * (2 * 3 * 64 + 4 * 27 + 4 + 2 * 4 * 64))


@pytest.mark.parametrize(
    ("mask", "products"), [([True, True, False], 2), ([False, True, False], 1), ([True, False, False], 1)]
)
def test_convolution_backward_counts_the_gradients_that_are_asked_for(mask: list[bool], products: int) -> None:
    shapes = [[2, 4, 6, 6], [2, 3, 8, 8], [4, 3, 3, 3]] + [[]] * 8
    arguments = [None, None, None, [4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, mask]
    counts = count_operator("aten::convolution_backward", shapes, [F] * 3, arguments)
    assert counts is not None and counts.flops == products * 2 * 2 * 36 * 4 * 27


def test_elementwise_operators_write_what_their_inputs_come_to_together() -> None:
    counts = count_operator("aten::add", [[3, 1, 5], [4, 1], []], [F, F, "Scalar"], [None, None, 1])
    assert counts == OpCost(60, 4 * (15 + 4 + 60))


def test_a_list_of_tensors_has_bytes_where_their_dtype_is_said() -> None:
    assert count_operator("aten::cat", [[[3, 4], [2, 4]], []], ["TensorList", "Scalar"]) == OpCost(0, None)
    assert count_operator("aten::cat", [[[3, 4], [2, 4]], []], [F, "Scalar"]) == OpCost(0, 4 * 2 * 20)


def test_lists_of_tensors_cost_what_their_tensors_cost() -> None:
    two = [[3, 4], [2, 4]]
    assert count_operator("aten::_foreach_addcmul_", [two, two, two], [F, F, F]) == OpCost(3 * 20, 4 * (3 * 20 + 20))
    assert count_operator("aten::_foreach_mul_", [two, []], ["TensorList", "Scalar"]) == OpCost(20, None)
    assert count_operator("aten::_fused_adam_", [two] * 4 + [[]] * 9, [F] * 4) == OpCost(12 * 20, 4 * (2 * 3 * 20 + 20))


def test_the_gradient_of_a_part_is_zeros_around_it() -> None:
    counts = count_operator("aten::select_backward", [[5, 4], [], [], []], [F], [None, [3, 5, 4], 0, 2])
    assert counts == OpCost(0, 4 * (60 + 2 * 20))


def test_views_are_free() -> None:
    for name in ("aten::view", "aten::t", "aten::expand", "aten::detach"):
        assert count_operator(name, [[3, 4]], [F]) == OpCost(0, 0)


@pytest.mark.parametrize(
    ("name", "shapes", "dtypes", "arguments"),
    [
        ("aten::my_own_operator", [[3, 4]], [F], []),
        ("aten::linear", [[3, 4], [5, 4]], [F, F], []),  # calls others that are known
        ("aten::convolution", [[2, 3, 8, 8], [4, 3, 3, 3]], [F, F], []),  # without stride and padding
        ("aten::mm", [], [], []),
        ("aten::add", [[], []], ["Scalar", "Scalar"], [1, 2]),
        ("ProfilerStep#3", [], [], []),
    ],
)
def test_what_cannot_be_known_is_not_guessed(name: str, shapes: list, dtypes: list[str], arguments: list) -> None:
    assert count_operator(name, shapes, dtypes, arguments) is None


def test_without_dtypes_flops_are_known_and_bytes_are_not() -> None:
    assert count_operator("aten::mm", [[3, 4], [4, 5]]) == OpCost(120, None)
    assert count_operator("aten::mm", [[3, 4], [4, 5]], ["quantised", "quantised"]) == OpCost(120, None)
    assert OpCost(1, 2) + OpCost(3, None) == OpCost(4, None)


def measured(value: float, unit: str) -> Figure:
    return Figure(value, unit, "measured")  # type: ignore[arg-type]


SPEED = Speed({"fp32": measured(1e12, "flop_per_s")}, measured(1e11, "bytes_per_s"), measured(5, "us"))


def test_limits_are_what_was_measured_and_nothing_else() -> None:
    limits = device_limits(Device("cpu", "cpu", speed=SPEED))
    assert limits == HardwareLimits(flop_per_s={"fp32": 1e12}, bytes_per_s=1e11, launch_us=5)
    assert device_limits(Device("cpu", "cpu")) == HardwareLimits()


def test_the_roofline_is_the_slower_of_arithmetic_and_memory() -> None:
    limits = device_limits(Device("cpu", "cpu", speed=SPEED))
    assert least_ms(OpCost(2e9, 1e6), limits, "fp32") == pytest.approx(2.0)
    assert least_ms(OpCost(2e9, 1e9), limits, "fp32") == pytest.approx(10.0)
    assert least_ms(OpCost(2e9, None), limits, "fp32") == pytest.approx(2.0)
    assert least_ms(OpCost(2e9, 1e9), limits, "bf16") == pytest.approx(10.0)  # its products weren't measured
    assert least_ms(OpCost(2e9, 1e9), HardwareLimits(), "fp32") is None


def test_precisions_by_dtype() -> None:
    assert [precision_of(name) for name in ("float", "torch.float64", "c10::BFloat16", "int64")] == [
        "fp32",
        "fp64",
        "bf16",
        "",
    ]
    assert precision_of("float32", tf32=True) == "tf32"


def test_a_module_reaches_the_share_that_its_operators_could_have_taken() -> None:
    def module(name: str, ms: float, flops: float | None) -> ModuleTime:
        return ModuleTime(name=name, kind="Linear", calls=1, forward_ms=ms, backward_ms=ms, share=0.1, flops=flops)

    def operator(name: str, phase: str, flops: float | None) -> OperatorTime:
        return OperatorTime(name="aten::mm", phase=phase, module=name, calls=1, ms=1, dtype=F, flops=flops, bytes=0.0)  # type: ignore[arg-type]

    profile = Profile(
        source="x",
        steps=1,
        step_ms=100,
        limits=HardwareLimits(flop_per_s={"fp32": 1e12}),
        modules=[module("", 20, 9e9), module("a", 10, 3e9), module("ab", 10, 6e9), module("b", 5, None)],
        operators=[
            operator("a", "forward", 1e9),
            operator("a", "backward", 2e9),
            operator("ab", "forward", 6e9),
            operator("a", "update", 9e9),
            operator("b", "forward", None),
        ],
    )
    shares = {one.name: one.limit_share for one in with_limit_shares(profile).modules}
    assert shares == {"": pytest.approx(9 / 40), "a": pytest.approx(3 / 20), "ab": pytest.approx(6 / 20), "b": None}
