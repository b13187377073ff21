"""Rewrites small matrix products on a GPU as sums that a compiler fuses, or as parts along their terms (split-K).

A library gives each core a tile of the result. If a result has few tiles and many terms, most cores are idle: a batch
of products over parts of the terms, whose results are summed, uses them. A very small product ends before a kernel of
its own has started: as a plain sum it is fused with the code around it.
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
"""Maximum multiplications of a product that becomes a sum."""

_TILE = 64
"""Rows and columns of a result that one core computes, roughly."""

_CORES, _LEAST_TERMS, _LEAST_PARTS = 128, 128, 4
"""Maximum number of tiles, minimum terms of a part, and minimum number of parts: in two parts, products of 128 rows,
784 or 2,048 terms and 2,048 columns took a sixth longer to twice as long on an H200."""

_FEW_TERMS = 16

_ALIGNED = 4
"""Numbers that a library reads at once if a part begins at a multiple."""


def product_as_sum(graph: GraphModule) -> int:
    """Rewrites very small products; returns how often."""
    small = [node for node in _candidate_products(graph) if _multiplications(node) <= MOST_OF_SUM]
    return sum(_rewrite(graph, node, _sum_products) for node in small)


def product_in_parts(graph: GraphModule) -> int:
    """Rewrites products with few tiles and many terms; returns how often."""
    counts = [(node, split_count(*_sizes(node))) for node in _candidate_products(graph)]
    return sum(_rewrite(graph, node, partial(_product_in_parts, parts=parts)) for node, parts in counts if parts > 1)


def split_count(rows: int, terms: int, columns: int) -> int:
    """Returns the number of parts of the terms; 1 for an unsplit product."""
    most = min(_CORES // (-(-rows // _TILE) * -(-columns // _TILE)), terms // _LEAST_TERMS)
    fitting = (parts for parts in range(most, _LEAST_PARTS - 1, -1) if terms % (parts * _ALIGNED) == 0)
    return next(fitting, 1)


def _candidate_products(graph: GraphModule) -> list[Node]:
    """Returns products of fp32, and of float64 (in a proof), that have terms."""
    return [node for node in matrix_products(graph, torch.float32, torch.float64) if _multiplications(node)]


def _sizes(node: Node) -> tuple[int, int, int]:
    """Returns rows, terms and columns."""
    (rows, terms), columns = fake_value(operand_at(node, -2)).shape, fake_value(node).shape[1]
    return rows, terms, columns


def _multiplications(node: Node) -> int:
    rows, terms, columns = _sizes(node)
    return rows * terms * columns


def _rewrite(graph: GraphModule, node: Node, multiply: Callable[[Tensor, Tensor], Tensor]) -> bool:
    replace_product(graph, node, lambda a, b, *bias: sum(bias, multiply(a, b)))
    return True


def _sum_products(a: Tensor, b: Tensor) -> Tensor:
    """Sums few terms one by one, which needs no reduction across threads."""
    if a.shape[1] <= _FEW_TERMS:
        return reduce(add, (a[:, at, None] * b[at] for at in range(a.shape[1])))
    return (a.unsqueeze(2) * b.unsqueeze(0)).sum(1)


def _product_in_parts(a: Tensor, b: Tensor, parts: int) -> Tensor:
    return (a.unflatten(1, (parts, -1)).transpose(0, 1) @ b.unflatten(0, (parts, -1))).sum(0)
