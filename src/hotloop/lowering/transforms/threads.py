"""The threads axis: how many share one operation on the CPU, and that they come to the same bits each time."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from hotloop.lowering.context import LoweringContext


def apply_threads(parts: LoweringContext) -> LoweringContext:
    """The plan's number of threads around training steps; whoever comes after finds the number from before."""
    threads = parts.plan.threads
    if threads is None:
        return parts

    @contextmanager
    def limited() -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    return replace(parts, around=(*parts.around, limited))


def apply_determinism(parts: LoweringContext) -> LoweringContext:
    """Has several threads add up what meets in one element, such as a word's gradient, in the same order each time."""
    if any(device.type != "cpu" for device in parts.devices):
        return parts
    return replace(parts, around=(*parts.around, deterministic_order))


_NONDETERMINISM_WARNING: Any = (
    "ignore",
    re.compile(".*does not have a deterministic implementation, but you set"),
    Warning,
    None,
    0,
)
"""A filter, as Python keeps them, for what torch says of a setting that the user never set."""


@contextmanager
def deterministic_order() -> Iterator[None]:
    """torch's deterministic algorithms, in what runs and in what is compiled; a single thread needs none."""
    memory: Any = torch.utils.deterministic
    before, filled = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    if before or torch.get_num_threads() == 1:
        yield
        return
    compilers = _is_inductor_deterministic()
    try:
        # Not by `catch_warnings`, which has Python forget what it has warned of already, so that it would do so again.
        warnings.filters.insert(0, _NONDETERMINISM_WARNING)  # type: ignore[attr-defined]
        torch.set_deterministic_debug_mode("warn")
        memory.fill_uninitialized_memory = False  # which finds faults, and takes time
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        memory.fill_uninitialized_memory = filled
        with suppress(ValueError):  # somebody has put other filters there
            warnings.filters.remove(_NONDETERMINISM_WARNING)  # type: ignore[attr-defined]
        if _is_inductor_deterministic() != compilers:  # Dynamo sets it after each compilation, and leaves it so
            sys.modules[_INDUCTOR].deterministic = compilers  # type: ignore[attr-defined]


_INDUCTOR = "torch._inductor.config"


def _is_inductor_deterministic() -> bool:
    """Whether Inductor is deterministic, or will be once it is imported."""
    config: Any = sys.modules.get(_INDUCTOR)
    return os.getenv("TORCHINDUCTOR_DETERMINISTIC") == "1" if config is None else config.deterministic


@contextmanager
def parallel_embedding_gradients(device: torch.device) -> Iterator[None]:
    """Has Inductor call torch's own kernel for an embedding's gradient, whose threads add up in one order.

    What it makes of that by itself would run on one thread, where algorithms must be deterministic.
    """
    if device.type != "cpu" or not torch.are_deterministic_algorithms_enabled():
        yield
        return
    from torch._inductor.decomposition import decompositions
    from torch._inductor.lowering import lowerings, make_fallback, require_contiguous

    operation = torch.ops.aten.embedding_dense_backward.default
    decomposed = decompositions.pop(operation)
    known = operation in lowerings
    try:
        if not known:  # `warn` is an error wherever the variable CI is set
            make_fallback(operation, layout_constraint=require_contiguous, warn=False)
        yield
    finally:
        decompositions[operation] = decomposed
        if not known:
            lowerings.pop(operation, None)
