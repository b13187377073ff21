"""Keeps torch's compiler from looking for hours at how the numbers of a tensor follow each other in memory.

It has sympy simplify the index of each number that a loop reads, to see whether neighbours lie side by side. For long indices,
as of relative positions and shifted windows, that takes minutes or doesn't end (pytorch/pytorch, issue 133734).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hotloop.patches import patched

_LONG = 8
"""Operations of an index from which on it is expanded, which takes milliseconds, and simplified only if that makes it short."""


@contextmanager
def quick_strides() -> Iterator[None]:
    """An index that stays long then is taken for one whose numbers lie apart: slower to read, and as right."""
    from torch._inductor import sizevars  # brings sympy along

    with patched(sizevars, "sympy", _Quick):
        yield


class _Quick:
    """sympy, but for what it simplifies."""

    def __init__(self, sympy: Any) -> None:
        self._sympy = sympy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sympy, name)

    def simplify(self, index: Any) -> Any:
        if index.count_ops() > _LONG:
            index = self._sympy.expand(index)
        return index if index.count_ops() > _LONG else self._sympy.simplify(index)
