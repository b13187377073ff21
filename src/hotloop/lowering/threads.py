"""The threads axis: how many share one operation on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from hotloop.lowering.ingredients import Ingredients


def with_threads(parts: Ingredients) -> Ingredients:
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
