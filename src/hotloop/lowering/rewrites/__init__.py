"""The rewrites axis: equivalent forms of parts of a captured step, of which a compiler makes faster programs."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch.fx import GraphModule

from hotloop.errors import PlanError
from hotloop.lowering.rewrites.conv_in_pool import (
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

REWRITES: dict[str, Callable[[GraphModule], int]] = {
    "conv_in_pool": convolution_in_pooling,
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

By name they apply everywhere.
"""

EXPECTED_PATTERNS = {
    "conv_in_pool": "a 2d convolution of the input data whose only use is a max pooling as for pool_as_max, with at most "
    f"{MAX_TERMS} weights of a filter times window elements",
    "pool_as_max": f"a 2d max pooling whose windows have at most {MOST_IN_WINDOW} elements and cover the image without overlap",
    "mm_by_onednn": "a product of two fp32 matrices of at least 2 MFLOP",
    "mm_as_sum": f"a product of two matrices of at most {MOST_OF_SUM:,} multiplications",
    "mm_in_parts": "a product of two matrices with a small result and very long sums",
    "draw_by_words": f"a dropout, or another draw of zeros and ones with one probability, of at least {MIN_NUMBERS} elements",
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
        expected = f"an operation that {', '.join(chosen)} replace where the rewrite is likely to be faster"
        raise PlanError(
            f"rewrites={which} changes nothing in this step",
            expected=expected if is_all else EXPECTED_PATTERNS[which],
            fix=f"choose rewrites=none{', or name a rewrite, which then applies wherever it can' if is_all else ''}",
        )
    graph.recompile()
    return counts
