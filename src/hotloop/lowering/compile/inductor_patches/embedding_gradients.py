"""Makes Inductor call torch's kernel for an embedding's gradient, whose threads add up in a fixed order.

In deterministic mode Inductor's own code for the gradient runs on a single thread (torch 2.13; no upstream issue known).
Test without the patch: `test_torch_adds_up_an_embedding_s_gradient_on_one_thread`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def parallel_embedding_gradients(device: torch.device) -> Iterator[None]:
    """Applies the patch on CPUs in deterministic mode."""
    if device.type != "cpu" or not torch.are_deterministic_algorithms_enabled():
        yield
        return
    from torch._inductor.decomposition import decompositions
    from torch._inductor.lowering import lowerings, make_fallback, require_contiguous

    operation = torch.ops.aten.embedding_dense_backward.default
    decomposition = decompositions.pop(operation)
    has_lowering = operation in lowerings
    try:
        if not has_lowering:  # warn=True raises if the environment variable CI is set
            make_fallback(operation, layout_constraint=require_contiguous, warn=False)
        yield
    finally:
        decompositions[operation] = decomposition
        if not has_lowering:
            lowerings.pop(operation, None)
