"""What a backward pass goes through, as autograd has written it down in a forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def nodes_below(values: Iterable[Tensor]) -> set[Any]:
    """The nodes of the graph from some tensors to the leaves that they depend on; none of tensors that need no gradient."""
    found: set[Any] = set()
    ahead: list[Any] = [value.grad_fn for value in values]
    while ahead:
        if (node := ahead.pop()) is not None and node not in found:
            found.add(node)
            ahead += [following for following, _ in node.next_functions]
    return found
