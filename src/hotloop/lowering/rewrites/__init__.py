"""The rewrites axis: equivalent forms of parts of a captured step, of which a compiler makes faster programs."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch.fx import GraphModule

from hotloop.errors import PlanError
from hotloop.lowering.rewrites.conv_as_gemm import MAX_WEIGHTS, convolution_as_product
from hotloop.lowering.rewrites.conv_in_pool import (
    MAX_FAST_TERMS,
    MAX_TERMS,
    convolution_in_pooling,
    convolution_in_small_pooling,
)
from hotloop.lowering.rewrites.dropout_from_words import MIN_NUMBERS, draw_by_words
from hotloop.lowering.rewrites.fx_nodes import drop_identities
from hotloop.lowering.rewrites.mm_by_onednn import product_by_onednn, product_where_mkl_is_slow
from hotloop.lowering.rewrites.mm_on_gpu import MOST_OF_SUM, product_as_sum, product_in_parts
from hotloop.lowering.rewrites.pool_as_max import MAX_WINDOW as MOST_IN_WINDOW
from hotloop.lowering.rewrites.pool_as_max import pooling_as_maximum
from hotloop.lowering.rewrites.pool_first import relu_after_pooling

REWRITES: dict[str, Callable[[GraphModule], int]] = {
    "pool_first": relu_after_pooling,
    "conv_in_pool": convolution_in_pooling,
    "conv_as_gemm": convolution_as_product,
    "pool_as_max": pooling_as_maximum,
    "mm_by_onednn": product_by_onednn,
    "mm_as_sum": product_as_sum,
    "mm_in_parts": product_in_parts,
    "draw_by_words": draw_by_words,
}
"""Functions that change a graph, and return how often they applied."""

GPU_REWRITES: dict[str, Callable[[GraphModule], int]] = {
    "conv_in_pool": convolution_in_small_pooling,
    "pool_as_max": pooling_as_maximum,
    "mm_as_sum": product_as_sum,
    "mm_in_parts": product_in_parts,
}
"""Rewrites of `all` on CUDA devices."""

REWRITE_FUNCTIONS: dict[str, Callable[[GraphModule], int]] = {
    "conv_in_pool": convolution_in_small_pooling,
    "pool_as_max": pooling_as_maximum,
    "mm_by_onednn": product_where_mkl_is_slow,
    "draw_by_words": draw_by_words,
}
"""Rewrites of `all` on CPUs, in order: those that won in several networks, applied where they are likely to win.

By name they apply everywhere. Rewrites that lost more often than they won are missing: see docs/how-to/faster.md.
"""

EXPECTED_PATTERNS = {
    "pool_first": "a ReLU whose result is max pooled and nothing else",
    "conv_in_pool": "a 2d convolution of the data itself whose result is max pooled, in windows as for pool_as_max, and nothing "
    f"else, with at most {MAX_TERMS} weights of a filter times numbers of a window",
    "conv_as_gemm": f"a 2d convolution of the data itself, with at most {MAX_WEIGHTS} weights in a filter",
    "pool_as_max": f"a 2d max pooling in windows of at most {MOST_IN_WINDOW} numbers that touch, don't overlap, and take in the whole image",
    "mm_by_onednn": "a product of two matrices in fp32 that takes 2 MFLOP or more",
    "mm_as_sum": f"a product of two matrices of at most {MOST_OF_SUM:,} multiplications",
    "mm_in_parts": "a product of two matrices whose result is small, each number of it a sum of very many terms",
    "draw_by_words": f"a dropout, or another draw of zeros and ones with one chance, of {MIN_NUMBERS} numbers or more",
}
_LIKELY_PATTERNS = {
    "conv_in_pool": f", here {MAX_FAST_TERMS} (name conv_in_pool to have it of more)",
    "mm_by_onednn": ", on a processor for which MKL is slow, but for narrow results of a transposed matrix (name mm_by_onednn to have it anyway)",
}


def apply_rewrite(graph: GraphModule, which: str, but: Collection[str] = (), device: str = "cpu") -> dict[str, int]:
    """Applies one rewrite, or all, to a captured step; returns how often each applied.

    Args:
        but: rewrites that this plan excludes.
        device: the step's device type.

    Raises:
        PlanError: nothing in the step can be rewritten.
    """
    drop_identities(graph)
    is_all = which == "all"
    chosen = (REWRITE_FUNCTIONS if device == "cpu" else GPU_REWRITES) if is_all else {which: REWRITES[which]}
    counts = {name: apply(graph) for name, apply in chosen.items() if name not in but}
    if not any(counts.values()):
        patterns = [EXPECTED_PATTERNS[name] + (_LIKELY_PATTERNS.get(name, "") if is_all else "") for name in chosen]
        raise PlanError(
            f"rewrites={which} finds nothing in this step that it applies to",
            expected="; or ".join(patterns),
            fix="choose rewrites=none",
        )
    graph.recompile()
    return counts
