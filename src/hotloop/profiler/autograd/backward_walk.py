"""What backwards go through that they needn't: graphs of earlier steps, graphs of an earlier backward, gradients nobody uses."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.weak import WeakTensorKeyDictionary

from hotloop.profiler.base.tensor_facts import sample_numbers

_MOST_NODES = 20_000


class NeedlessWork(NamedTuple):
    """What one backward needn't have gone through.

    Attributes:
        what: it is called as a habit.
        many: backwards, or tensors.
    """

    what: str
    where: str
    amount: int


class BackwardWalks:
    """Counts the nodes of graphs that backwards go through in the steps that are looked at; nothing of them is kept.

    Args:
        parameters: gives those of all optimizers that have stepped.

    Attributes:
        latest: nodes of the backward that was seen last.
    """

    def __init__(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._parameters = parameters
        self._leaves: MutableMapping[Tensor, tuple[int, tuple]] = WeakTensorKeyDictionary()
        self._all: Counter[int] = Counter()
        self.latest_nodes = 0
        self._older: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        self._needless: defaultdict[tuple[str, str], Counter[int]] = defaultdict(Counter)

    def record(self, nodes: Sequence[Any], where: str, step: int, older: int) -> None:
        """A backward goes through these, so many of which an earlier step made."""
        self.latest_nodes = inner = sum(bool(node.next_functions) for node in nodes)
        self._all[step] += inner
        self._older[where].append((older, inner))

    def record_needless(self, what: str, where: str, step: int, nodes: int) -> None:
        """A backward went through so many that it needn't."""
        self._needless[what, where][step] += nodes

    def find_shared_graph(self, nodes: Sequence[Any], where: str, step: int) -> Iterator[NeedlessWork]:
        """A backward goes through these once more, after another one that added to the same gradients."""
        if nodes and _has_accumulated_gradients(nodes):
            self.record_needless("shared graph", where, step, len(nodes))
            yield NeedlessWork("shared graph", where, 1)

    def find_unused_gradients(
        self, nodes: Sequence[Any], forward: Callable[[Any], str], where: str, step: int
    ) -> Iterator[NeedlessWork]:
        """A backward goes through these and adds to gradients; of which of them nobody makes any use?

        Nothing is said where none belongs to an optimizer: parameters may stand for others, as those of ranks do.

        Args:
            forward: gives the line of the forward that a node ended; empty if it ended none.
        """
        updated = {id(value) for value in self._parameters()}
        leaves = [(node, node.variable) for node in nodes if not node.next_functions and hasattr(node, "variable")]
        if not any(id(leaf) in updated for _, leaf in leaves):
            return
        idle = {node: leaf for node, leaf in leaves if id(leaf) not in updated and self._is_gradient_unused(leaf, step)}
        if not idle:
            return
        needed = nodes_leading_to(nodes, lambda node: not node.next_functions and node not in idle)
        vain = [node for node in nodes if node.next_functions and node not in needed]
        where = next(filter(None, map(forward, [*vain, *nodes])), where)
        own = [node for node, leaf in idle.items() if isinstance(leaf, nn.Parameter)]
        if own:
            self.record_needless("unused gradients", where, step, len(vain))
            yield NeedlessWork("unused gradients", where, len(own))
        elif not any(after in idle for node in nodes if is_custom(node) for after, _ in node.next_functions):
            yield NeedlessWork("input gradients", where, len(idle))

    def _is_gradient_unused(self, leaf: Tensor, step: int) -> bool:
        """Whether nobody is seen to use a tensor's gradient: it stays as it was since a step before, and has no hooks.

        Tensors that aren't parameters may be others in each step.
        """
        if leaf._backward_hooks or getattr(leaf, "_post_accumulate_grad_hooks", None):
            return False
        if (now := change_key(leaf)) is None:
            return False
        first, before = self._leaves.setdefault(leaf, (step, now))
        return (first < step or not isinstance(leaf, nn.Parameter)) and before == now

    def needless_share(self, what: str, where: str) -> float:
        """Of what backwards go through in the steps that have it, that which they needn't; 0 where that isn't known."""
        if what == "kept graph":
            return _earlier_steps_share(self._older[where])
        needless = self._needless.get((what, where), Counter())
        walked = sum(self._all[step] for step, many in needless.items() if many)
        return sum(needless.values()) / walked if walked else 0.0


def change_key(leaf: Tensor) -> tuple | None:
    """What shows that a tensor has changed: its version alone isn't, which fused optimizers leave. None if it can't be told."""
    if type(leaf).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return None
    try:
        with torch._C._DisableTorchDispatch():
            return leaf._version, *sample_numbers(leaf)
    except RuntimeError:  # there are no numbers to look at
        return None


def walk(roots: list[Any]) -> Iterator[Any]:
    """The nodes of a graph, from its outputs on."""
    seen, ahead = set(roots), deque(roots)
    while ahead and len(seen) < _MOST_NODES:
        node = ahead.popleft()
        yield node
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                ahead.append(after)


def nodes_leading_to(nodes: Sequence[Any], is_end: Callable[[Any], bool]) -> set[Any]:
    """The nodes from which some end can be reached; functions of the user's own, and what wasn't walked to, may be any."""
    known, above = set(nodes), defaultdict[Any, list[Any]](list)
    ends: list[Any] = []
    for node in nodes:
        if is_end(node) or is_custom(node):
            ends.append(node)
        for after, _ in node.next_functions:
            (above[after] if after in known else ends if after is not None else []).append(node)
    found, ahead = set(ends), ends
    while ahead:
        fresh = [node for node in above[ahead.pop()] if node not in found]
        found.update(fresh)
        ahead += fresh
    return found


def is_custom(node: Any) -> bool:
    """Whether it is a function of the user's own, or stands for one."""
    return isinstance(node, BackwardCFunction) or getattr(node, "is_custom", False)


def _has_accumulated_gradients(nodes: Sequence[Any]) -> bool:
    """Whether all gradients below these nodes still hold what was added to them before: who clears some wants these alone."""
    ends = (after for node in nodes for after, _ in node.next_functions if after is not None)
    gradients = [end.variable.grad for end in ends if not end.next_functions and hasattr(end, "variable")]
    return bool(gradients) and all(gradient is not None and bool(gradient.any()) for gradient in gradients)


def _earlier_steps_share(walks: Sequence[tuple[int, int]]) -> float:
    """The part of backwards' nodes that earlier steps made, given both numbers, if these become more; else 0."""
    earlier, walked = (sum(numbers) for numbers in zip(*walks, strict=True))
    return earlier / walked if walks[-1][0] > walks[0][0] else 0.0
