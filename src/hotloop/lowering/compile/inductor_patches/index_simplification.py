"""Limits the time that Inductor spends on sympy's simplification of index expressions (torch 2.13).

A long index takes sympy minutes. Unsimplified, it counts as not contiguous: slower to read, and as correct.
Upstream: pytorch/pytorch#133734, for another caller. Test without the patch: `test_torch_simplifies_long_indices`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hotloop.core.patches import patch_attribute

_MAX_TERMS = 8
"""Operations of an index. A longer one is expanded, which takes milliseconds, and simplified only if it gets short."""


@contextmanager
def patch_stride_simplify() -> Iterator[None]:
    from torch._inductor import sizevars  # imports sympy

    with patch_attribute(sizevars, "sympy", _FastSympy):
        yield


class _FastSympy:
    """sympy with a limited `simplify`."""

    def __init__(self, sympy: Any) -> None:
        self._sympy = sympy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sympy, name)

    def simplify(self, index: Any) -> Any:
        if index.count_ops() > _MAX_TERMS:
            index = self._sympy.expand(index)
        return index if index.count_ops() > _MAX_TERMS else self._sympy.simplify(index)
