"""Computes fp32 matrix products by oneDNN, instead of the library that torch was built with.

torch's x86 wheels have Intel's MKL, which uses its widest instructions on Intel's processors alone: on others with
AVX-512 a product can take twice as long as necessary. oneDNN, which computes torch's convolutions, uses the processor's
instructions. It reads operands in any order of memory, without a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from hotloop.core.hardware import machine
from hotloop.lowering.rewrites.fx_nodes import at_least, fake_value, matrix_products, replace_product

MIN_FLOP = 2e6
"""A smaller product gains nothing from another library."""

WIDE, MANY_TIMES = 768, 4
"""Columns of a result, and their ratio to the terms, from which copying a column-major first operand pays, as oneDNN
does: of 75 shapes, on two threads of an AMD EPYC with AVX-512, narrower results took 1.1 to 5 times MKL's time, wider
ones mostly 0.4 to 0.9. Times of single products predict little: in a compiled step MKL's took up to three times those."""


def product_by_onednn(graph: GraphModule, wanted: Callable[[Tensor, Tensor], bool] = lambda one, other: True) -> int:
    """Replaces fp32 products that aren't small; returns how often.

    Args:
        wanted: selects products by their operands.
    """
    products = matrix_products(graph, torch.float32)
    chosen = [node for node in products if _is_supported(node) and wanted(*_operands(node))]
    for node in chosen:
        replace_product(graph, node, lambda a, b, *bias: _operator()(a, b.t(), *bias))
    return len(chosen)


def product_where_mkl_is_slow(graph: GraphModule) -> int:
    """Replaces only products that are likely faster by oneDNN."""
    return product_by_onednn(graph, is_slow_by_mkl) if is_mkl_slow_here() else 0


def is_mkl_slow(processor: str | None) -> bool:
    """Whether MKL doesn't use this processor's widest instructions."""
    return "AMD" in (processor or "") and torch.backends.mkl.is_available()


@cache
def is_mkl_slow_here() -> bool:
    return is_mkl_slow(machine.read_processor().model)


def is_faster_by_onednn(one: Tensor, other: Tensor) -> bool:
    """Whether a product is likely faster by oneDNN on this machine."""
    is_fp32_matrix = one.dtype == torch.float32 and one.ndim == other.ndim == 2
    return is_fp32_matrix and is_slow_by_mkl(one, other) and is_mkl_slow_here()


def is_slow_by_mkl(one: Tensor, other: Tensor) -> bool:
    """Whether oneDNN is likely faster if MKL doesn't know the processor, by sizes and the first operand's strides."""
    terms, columns = other.shape
    if not at_least(MIN_FLOP, 2 * one.numel() * columns):
        return False
    is_column_major = one.stride(0) == 1 and one.stride(1) != 1
    return not is_column_major or _is_wide(terms, columns)


def _is_wide(terms: int, columns: int) -> bool:
    return columns >= WIDE and columns > MANY_TIMES * terms


def _operands(node: Node) -> tuple[Tensor, Tensor]:
    one, other = (fake_value(matrix) for matrix in node.args[-2:] if isinstance(matrix, Node))
    return one, other


def _is_supported(node: Node) -> bool:
    terms = _operands(node)[1].shape[0]
    return torch.backends.mkldnn.is_available() and at_least(MIN_FLOP, 2 * fake_value(node).numel() * terms)


@cache
def _operator() -> Any:
    """Returns `(input (m, k), weight (n, k), bias (n) or none) -> (m, n)`; see `register_onednn_product`."""

    @torch.library.custom_op("hotloop::product", mutates_args=())
    def product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")

    @product.register_fake
    def _(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return input.new_empty(input.shape[0], weight.shape[0])

    return torch.ops.hotloop.product.default


@cache
def register_onednn_product() -> None:
    """Registers the product with Inductor."""
    from torch._inductor.lowering import register_lowering

    register_lowering(_operator(), type_promotion_kind=None)(_lower_product)


def _lower_product(input: Any, weight: Any, bias: Any = None) -> Any:
    """Lowers to Inductor's own call of oneDNN, without its copy of column-major operands."""
    from torch._inductor.ir import FixedLayout, TensorBox
    from torch._inductor.mkldnn_ir import LinearUnary, _create_output_node

    (_, terms), (columns, _) = input.get_size(), weight.get_size()
    # A wide result's first operand becomes row-major in the kernel that computes it: oneDNN would copy it at each call.
    inputs = [_row_major(input) if _is_wide(terms, columns) else _with_frozen_layout(input)]
    inputs.append(_with_frozen_layout(weight))
    layout = FixedLayout(inputs[0].get_device(), inputs[0].get_dtype(), [matrix.get_size()[0] for matrix in inputs])
    options: list[Any] = ["none", [-1], ""]
    if bias is None:
        options.insert(0, None)
    else:
        inputs.append(_row_major(bias))
    return TensorBox.create(_create_output_node(LinearUnary(layout, inputs, options)))


def _row_major(value: Any) -> Any:
    from torch._inductor.mkldnn_ir import LinearUnary

    return LinearUnary.require_contiguous(LinearUnary.realize_input(value))


def _with_frozen_layout(value: Any) -> Any:
    """Returns a row-major or column-major matrix as it is; others as a copy."""
    from torch._inductor.ir import as_storage_and_layout
    from torch._inductor.mkldnn_ir import LinearUnary

    matrix = LinearUnary.realize_input(value)
    as_storage_and_layout(matrix, freeze=True)
    (rows, columns), (down, along) = matrix.get_size(), matrix.get_stride()
    is_dense = (along == 1 and down >= columns) or (down == 1 and along >= rows)
    return matrix if is_dense else LinearUnary.require_contiguous(matrix)
