"""Formats of products follow from switches and dtypes; a plan of fewer bits than the baseline's is told by them alone."""

from __future__ import annotations

import pytest

from hotloop.core.number_formats import (
    IEEE,
    TORCH_DEFAULTS,
    Arithmetic,
    describe_reductions,
    operator_class,
    other_settings,
    own_settings,
    product_format,
    reduced_formats,
)

NAMES = {
    "conv": "convolution convolution_backward cudnn_convolution mkldnn_convolution _convolution conv2d conv_tbc"
    " _convolution_pointwise conv_depthwise3d slow_conv2d_forward",
    "matmul": "mm addmm bmm baddbmm mv dot linear _linear_pointwise _scaled_mm _grouped_mm _addmm_activation addmm_"
    " _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention_for_cpu_backward flex_attention",
    "rnn": "_cudnn_rnn _cudnn_rnn_backward mkldnn_rnn_layer mkldnn_rnn_layer_backward",
    None: "add mul addcmul relu upsample_linear1d upsample_bilinear2d _convert_indices_from_coo_to_csr native_layer_norm"
    " mvlgamma _foreach_add_ _thnn_fused_lstm_cell comm bucketize",
}


@pytest.mark.parametrize("operator", NAMES)
def test_operators_have_a_class_by_their_name(operator: str | None) -> None:
    assert {name: operator_class(name) for name in NAMES[operator].split()} == dict.fromkeys(
        NAMES[operator].split(), operator
    )


@pytest.mark.parametrize(
    ("operator", "dtype", "device", "format_"),
    [
        ("matmul", "float32", "cuda", "fp32"),
        ("conv", "float32", "cuda", "tf32"),
        ("rnn", "float32", "cuda", "tf32"),
        ("conv", "complex64", "cuda", "tf32"),
        ("conv", "float32", "cpu", "fp32"),
        ("conv", "float32", "mps", "fp32"),
        ("conv", "bfloat16", "cuda", "bf16"),
        ("matmul", "float16", "cuda", "fp16"),
        ("matmul", "float8_e4m3fn", "cuda", "fp8"),
        ("conv", "float64", "cuda", "fp64"),
        ("matmul", "int8", "cuda", None),
    ],
)
def test_formats_as_torch_begins(operator: str, dtype: str, device: str, format_: str | None) -> None:
    assert product_format(operator, dtype, device, TORCH_DEFAULTS) == format_


@pytest.mark.parametrize(("switch", "format_"), [("ieee", "fp32"), ("tf32", "tf32"), ("bf16", "bf16")])
def test_formats_as_a_switch_says(switch: str, format_: str) -> None:
    assert product_format("matmul", "float32", "cpu", IEEE | {"mkldnn.matmul": switch}) == format_
    assert product_format("conv", "float32", "cpu", IEEE | {"mkldnn.matmul": switch}) == "fp32"


def test_what_runs_in_fewer_bits_than_fp32() -> None:
    assert reduced_formats(TORCH_DEFAULTS, "cuda") == {"conv": "tf32", "rnn": "tf32"}
    assert reduced_formats(TORCH_DEFAULTS, "cpu") == reduced_formats(IEEE, "cuda") == {}


def step(pieces: int = 1, **counts: int) -> Arithmetic:
    """Of products by names such as `conv_tf32`."""
    return Arithmetic({tuple(name.split("_")): count for name, count in counts.items()}, pieces)  # type: ignore[misc]


BASELINE = step(conv_tf32=4, matmul_fp32=3)
"""As torch begins on CUDA."""

REDUCED = {
    "matrix products in tf32": (
        step(conv_tf32=4, matmul_tf32=3),
        "matrix products run in tf32, the baseline's in fp32",
    ),
    "one of them": (
        step(conv_tf32=4, matmul_fp32=2, matmul_tf32=1),
        "matrix products run in tf32, the baseline's in fp32",
    ),
    "a convolution in bf16": (
        step(conv_tf32=3, conv_bf16=1, matmul_fp32=3),
        "convolutions run in bf16, the baseline's in tf32",
    ),
    "a recurrent layer, of which the baseline has none": (
        step(conv_tf32=4, matmul_fp32=3, rnn_bf16=1),
        "recurrent layers run in bf16, the baseline's in tf32",
    ),
    "though others have more bits": (
        step(conv_fp64=4, matmul_fp16=3),
        "matrix products run in fp16, the baseline's in fp32",
    ),
}


@pytest.mark.parametrize("name", REDUCED)
def test_fewer_bits_anywhere_are_told(name: str) -> None:
    plan, line = REDUCED[name]
    assert describe_reductions(plan, BASELINE) == [line]


@pytest.mark.parametrize(
    "plan",
    [
        BASELINE,
        step(conv_fp32=4, matmul_fp32=3),
        step(matmul_fp32=7),
        step(matmul_tf32=4),  # convolutions as matrix products, as many bits as before
        step(pieces=4, conv_tf32=16, matmul_fp32=12),
        step(),
    ],
)
def test_as_many_bits_or_more_are_none(plan: Arithmetic) -> None:
    assert describe_reductions(plan, BASELINE if plan != step(matmul_tf32=4) else step(conv_tf32=4)) == []


MIXED = step(matmul_fp32=4, matmul_bf16=2)
"""As by an autocast of the Task's own."""


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (MIXED, False),
        (step(pieces=2, matmul_fp32=8, matmul_bf16=4), False),
        (step(matmul_fp32=1, matmul_bf16=2), False),
        (step(matmul_fp32=3, matmul_bf16=3), True),
        (step(matmul_bf16=6), True),
    ],
)
def test_of_a_step_that_mixes_dtypes_more_in_few_bits_are_told(plan: Arithmetic, told: bool) -> None:
    found = describe_reductions(plan, MIXED)
    assert bool(found) is told
    assert not told or "of a step run in bf16, 2 of the baseline's" in found[0]


def test_torch_s_own_defaults_need_no_line_and_the_user_s_do() -> None:
    assert (
        own_settings(TORCH_DEFAULTS, "cuda") == own_settings(TORCH_DEFAULTS, "cpu") == own_settings(IEEE, "cuda") == ""
    )
    line = own_settings(TORCH_DEFAULTS | {"cuda.matmul": "tf32"}, "cuda")
    assert "torch's settings allow matrix products in tf32" in line and "convolutions" not in line
    assert own_settings(TORCH_DEFAULTS | {"cuda.matmul": "tf32"}, "cpu") == ""
    both = own_settings(IEEE | {"mkldnn.matmul": "bf16", "mkldnn.conv": "bf16"}, "cpu")
    assert "matrix products in bf16 and convolutions in bf16" in both


def test_settings_that_are_others_now_are_told_where_they_matter() -> None:
    now = TORCH_DEFAULTS | {"cudnn.conv": "ieee"}
    line = other_settings(TORCH_DEFAULTS, now, "cuda")
    assert "convolutions in tf32 then, fp32 now" in line and "matrix products" not in line
    assert other_settings(TORCH_DEFAULTS, now, "cpu") == other_settings(now, now, "cuda") == ""
