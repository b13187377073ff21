"""Gradients that are cleared before an optimizer uses them, as a generator's are that the discriminator's loss goes through."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hotloop.profiling.walks import Found, Walks, leading_to, seen_as

WHAT = "cleared gradients"


@dataclass(frozen=True)
class _Backward:
    """One of a step's, whose gradients somebody may yet use.

    Attributes:
        nodes: that it goes through.
        leaves: nodes that add to a gradient, with what their tensor was then, as far as that can be told.
        where: the line of the backward.
    """

    nodes: Sequence[Any]
    leaves: dict[Any, tuple | None]
    where: str


class Thrown:
    """Follows the gradients of each backward until the next one begins that finds them cleared, or their tensors updated.

    Only what one backward adds to some tensors that are updated, and to others that aren't, is told: all of a backward's
    gradients may be cleared since they were put aside, as where those of several losses are made to agree.
    """

    def __init__(self, walks: Walks) -> None:
        self._walks = walks
        self._waiting: list[_Backward] = []

    def saw(self, nodes: Sequence[Any], where: str, step: int, forward: Callable[[Any], str]) -> Iterator[Found]:
        """A backward begins. What did those before it in vain? See `Walks.in_vain`."""
        left = []
        for one in self._waiting:
            stayed = {node for node, before in one.leaves.items() if before and seen_as(node.variable) == before}
            cleared = {node for node in stayed if _is_cleared(node.variable)}
            updated = len(stayed) < len(one.leaves)
            if not cleared:
                left.append(one)
            elif updated and (vain := _in_vain(one, cleared, forward)):
                self._walks.needless(WHAT, one.where, step, len(vain))
                yield Found(WHAT, one.where, 1)
        leaves = {node: seen_as(node.variable) for node in nodes if _is_leaf(node)}
        self._waiting = [*left, _Backward(nodes, leaves, where)]

    def step_done(self) -> None:
        """What is cleared later may be a part of the method, as a discriminator's gradients of the generator's loss are."""
        self._waiting = []


def _in_vain(one: _Backward, cleared: set[Any], forward: Callable[[Any], str]) -> list[Any]:
    """Nodes that lead to cleared gradients alone, if a whole network is among them: else it's a part of what others need."""
    needed = leading_to(one.nodes, lambda node: not node.next_functions and node not in cleared)
    vain = [node for node in one.nodes if node.next_functions and node not in needed]
    return vain if any(map(forward, vain)) else []


def _is_leaf(node: Any) -> bool:
    return not node.next_functions and hasattr(node, "variable")


def _is_cleared(leaf: Tensor) -> bool:
    return leaf.grad is None or not bool(leaf.grad.any())
