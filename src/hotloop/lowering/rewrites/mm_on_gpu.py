"""Small matrix products on a GPU: as sums that a compiler fuses with the rest, or cut along their terms.

A library gives each of a GPU's cores a tile of the result. Where a result has few tiles and each number of it many terms, most
cores have nothing to do: cut along the terms, the product is a batch of products, whose results are added up (split-K). A very
small one is over before a kernel of its own has begun: as a plain sum it becomes part of what is computed before and after.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from operator import add

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from hotloop.lowering.rewrites.fx_nodes import fake_value, matrix_products, operand_at, replace_product

MOST_OF_SUM = 1 << 21
"""Multiplications of a product that is written as a sum."""

_TILE = 64
"""Rows and columns of a result that one core computes, roughly."""

_CORES, _LEAST_TERMS, _LEAST_PARTS = 128, 128, 4
"""Into how many tiles a product is cut at the most, how many terms a part has at the least, and how many parts there are: in two,
products of 128 rows, 784 or 2,048 terms and 2,048 columns took a sixth longer to twice as long on an H200."""

_FEW_TERMS = 16

_ALIGNED = 4
"""Numbers that a library reads at once, where a part begins at a multiple of them."""


def product_as_sum(graph: GraphModule) -> int:
    """Wherever two matrices are multiplied that are very small; returns how often."""
    return sum(
        _rewrite(graph, node, _sum_products)
        for node in _candidate_products(graph)
        if _multiplications(node) <= MOST_OF_SUM
    )


def product_in_parts(graph: GraphModule) -> int:
    """Wherever a product has few tiles and many terms; returns how often."""
    found = [(node, split_count(*_sizes(node))) for node in _candidate_products(graph)]
    return sum(_rewrite(graph, node, partial(_product_in_parts, parts=parts)) for node, parts in found if parts > 1)


def split_count(rows: int, terms: int, columns: int) -> int:
    """Into how many parts the terms of a product are cut; 1 where it stays whole."""
    most = min(_CORES // (-(-rows // _TILE) * -(-columns // _TILE)), terms // _LEAST_TERMS)
    fitting = (parts for parts in range(most, _LEAST_PARTS - 1, -1) if terms % (parts * _ALIGNED) == 0)
    return next(fitting, 1)


def _candidate_products(graph: GraphModule) -> list[Node]:
    """Those of fp32 numbers, and of float64 in a proof, that have something to add up."""
    return [node for node in matrix_products(graph, torch.float32, torch.float64) if _multiplications(node)]


def _sizes(node: Node) -> tuple[int, int, int]:
    """Rows, terms and columns."""
    (rows, terms), columns = fake_value(operand_at(node, -2)).shape, fake_value(node).shape[1]
    return rows, terms, columns


def _multiplications(node: Node) -> int:
    rows, terms, columns = _sizes(node)
    return rows * terms * columns


def _rewrite(graph: GraphModule, node: Node, multiplied: Callable[[Tensor, Tensor], Tensor]) -> bool:
    replace_product(graph, node, lambda a, b, *bias: sum(bias, multiplied(a, b)))
    return True


def _sum_products(a: Tensor, b: Tensor) -> Tensor:
    """Of few terms one by one, which needs no threads to add up together."""
    if a.shape[1] <= _FEW_TERMS:
        return reduce(add, (a[:, at, None] * b[at] for at in range(a.shape[1])))
    return (a.unsqueeze(2) * b.unsqueeze(0)).sum(1)


def _product_in_parts(a: Tensor, b: Tensor, parts: int) -> Tensor:
    return (a.unflatten(1, (parts, -1)).transpose(0, 1) @ b.unflatten(0, (parts, -1))).sum(0)
