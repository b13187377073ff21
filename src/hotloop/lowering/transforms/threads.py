"""The threads axis: the number of threads of a CPU operation; and deterministic sums, whatever the number."""

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
    """Sets the plan's number of threads around training steps."""
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
    """Makes threads add up values of one element, such as a word's gradient, in the same order each time."""
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
"""A filter in Python's format that hides torch's warning about a setting that hotloop made."""


@contextmanager
def deterministic_order() -> Iterator[None]:
    """Enables torch's deterministic algorithms, for running and compiling; a single thread is deterministic anyway."""
    memory: Any = torch.utils.deterministic
    before, filled = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    if before or torch.get_num_threads() == 1:
        yield
        return
    inductor = _is_inductor_deterministic()
    try:
        # `catch_warnings` would reset Python's record of shown warnings, so that it would show them again.
        warnings.filters.insert(0, _NONDETERMINISM_WARNING)  # type: ignore[attr-defined]
        torch.set_deterministic_debug_mode("warn")
        memory.fill_uninitialized_memory = False  # a slow debugging aid
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        memory.fill_uninitialized_memory = filled
        with suppress(ValueError):  # other code may have replaced the filters
            warnings.filters.remove(_NONDETERMINISM_WARNING)  # type: ignore[attr-defined]
        if _is_inductor_deterministic() != inductor:  # each compilation changes Inductor's setting (torch 2.13)
            sys.modules[_INDUCTOR].deterministic = inductor  # type: ignore[attr-defined]


_INDUCTOR = "torch._inductor.config"


def _is_inductor_deterministic() -> bool:
    """Returns Inductor's setting, or the one that it will have after its import."""
    config: Any = sys.modules.get(_INDUCTOR)
    return os.getenv("TORCHINDUCTOR_DETERMINISTIC") == "1" if config is None else config.deterministic
