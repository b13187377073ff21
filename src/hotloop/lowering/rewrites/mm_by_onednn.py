"""Matrix products in fp32 by oneDNN, in place of the library that torch was built with.

torch's wheels for x86 come with Intel's MKL, which takes its widest instructions on Intel's own processors alone: on others
with AVX-512 a product can take twice as long as it has to. oneDNN, which computes torch's convolutions, goes by what a
processor has. It takes operands as they lie in memory, so that nothing is copied for it.
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
"""A smaller product is over before another library could win anything."""

WIDE, MANY_TIMES = 768, 4
"""Columns of a result, and how many times as many as there are terms, from which on laying out a first operand by columns anew
pays, as oneDNN does: of 75 shapes, on two threads of an AMD EPYC with AVX-512, narrower results took 1.1 to 5 times as long as
MKL's, wider ones mostly 0.4 to 0.9. How long a product takes by itself says little else: within a compiled step MKL's took up to
three times that."""


def product_by_onednn(graph: GraphModule, wanted: Callable[[Tensor, Tensor], bool] = lambda one, other: True) -> int:
    """Wherever two matrices in fp32 are multiplied that aren't small; returns how often.

    Args:
        wanted: which of them, by their operands.
    """
    found = [node for node in matrix_products(graph, torch.float32) if _is_supported(node) and wanted(*_operands(node))]
    if not found:
        return 0
    product = _operator()
    for node in found:
        replace_product(graph, node, lambda a, b, *bias: product(a, b.t(), *bias))
    return len(found)


def product_where_mkl_is_slow(graph: GraphModule) -> int:
    """Only where that is likely to be faster."""
    return product_by_onednn(graph, is_slow_by_mkl) if is_mkl_slow_here() else 0


def is_mkl_slow(processor: str | None) -> bool:
    """Whether MKL leaves the widest instructions of this processor aside."""
    return "AMD" in (processor or "") and torch.backends.mkl.is_available()


@cache
def is_mkl_slow_here() -> bool:
    return is_mkl_slow(machine.read_processor().model)


def is_faster_by_onednn(one: Tensor, other: Tensor) -> bool:
    """Whether a product is likely to be faster here by oneDNN."""
    return (
        one.dtype == torch.float32 and one.ndim == other.ndim == 2 and is_slow_by_mkl(one, other) and is_mkl_slow_here()
    )


def is_slow_by_mkl(one: Tensor, other: Tensor) -> bool:
    """Whether oneDNN is likely to be faster where MKL doesn't know the processor: by sizes, and by how the first operand lies."""
    terms, columns = other.shape
    if not at_least(MIN_FLOP, 2 * one.numel() * columns):
        return False
    return not _is_by_columns(one) or _is_wide(terms, columns)


def _is_wide(terms: int, columns: int) -> bool:
    """Whether a result of so many columns is, beside the terms of each of its numbers."""
    return columns >= WIDE and columns > MANY_TIMES * terms


def _is_by_columns(matrix: Tensor) -> bool:
    return matrix.stride(0) == 1 and matrix.stride(1) != 1


def _operands(node: Node) -> tuple[Tensor, Tensor]:
    one, other = (fake_value(matrix) for matrix in node.args[-2:] if isinstance(matrix, Node))
    return one, other


def _is_supported(node: Node) -> bool:
    terms = _operands(node)[1].shape[0]
    return torch.backends.mkldnn.is_available() and at_least(MIN_FLOP, 2 * fake_value(node).numel() * terms)


@cache
def _operator() -> Any:
    """`(input (m, k), weight (n, k), bias (n) or none) -> (m, n)`; see `register_onednn_product`."""

    @torch.library.custom_op("hotloop::product", mutates_args=())
    def product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")

    @product.register_fake
    def _(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return input.new_empty(input.shape[0], weight.shape[0])

    return torch.ops.hotloop.product.default


@cache
def register_onednn_product() -> None:
    """Has Inductor know the product, before it compiles a graph that may have some."""
    from torch._inductor.lowering import register_lowering

    register_lowering(_operator(), type_promotion_kind=None)(_lower_product)


def _lower_product(input: Any, weight: Any, bias: Any = None) -> Any:
    """Inductor's own call of oneDNN, which would copy what doesn't lie row by row."""
    from torch._inductor.ir import FixedLayout, TensorBox
    from torch._inductor.mkldnn_ir import LinearUnary, _create_output_node

    (_, terms), (columns, _) = input.get_size(), weight.get_size()
    inputs = [_laid_by_rows(input) if _is_wide(terms, columns) else _as_laid(input), _as_laid(weight)]
    layout = FixedLayout(inputs[0].get_device(), inputs[0].get_dtype(), [one.get_size()[0] for one in inputs])
    how: list[Any] = ["none", [-1], ""]
    if bias is None:
        how.insert(0, None)
    else:
        inputs.append(LinearUnary.require_contiguous(LinearUnary.realize_input(bias)))
    return TensorBox.create(_create_output_node(LinearUnary(layout, inputs, how)))


def _laid_by_rows(given: Any) -> Any:
    """A matrix laid by rows beforehand, in the kernel that makes it: oneDNN would do it at each call, by itself."""
    from torch._inductor.mkldnn_ir import LinearUnary

    return LinearUnary.require_contiguous(LinearUnary.realize_input(given))


def _as_laid(given: Any) -> Any:
    """A matrix as it lies there, by rows or by columns; any other as a copy."""
    from torch._inductor.ir import as_storage_and_layout
    from torch._inductor.mkldnn_ir import LinearUnary

    matrix = LinearUnary.realize_input(given)
    as_storage_and_layout(matrix, freeze=True)
    (rows, columns), (down, along) = matrix.get_size(), matrix.get_stride()
    lies = (along == 1 and down >= columns) or (down == 1 and along >= rows)
    return matrix if lies else LinearUnary.require_contiguous(matrix)
