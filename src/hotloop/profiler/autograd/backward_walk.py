"""Finds nodes that backward passes needn't run: graphs of earlier steps, shared graphs, gradients without a reader."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.weak import WeakTensorKeyDictionary

from hotloop.profiler.base.tensor_facts import sample_numbers

_MAX_NODES = 20_000


class NeedlessWork(NamedTuple):
    what: str
    where: str
    amount: int  # backward passes, or tensors


class BackwardWalks:
    """Counts the graph nodes that backward passes run in the observed steps, without references to the nodes.

    Args:
        parameters: returns the parameters of all optimizers that have stepped.

    Attributes:
        latest_nodes: number of inner nodes of the latest backward pass.
    """

    def __init__(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._parameters = parameters
        self._leaves: MutableMapping[Tensor, tuple[int, tuple]] = WeakTensorKeyDictionary()
        self._all: Counter[int] = Counter()
        self.latest_nodes = 0
        self._older: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        self._needless: defaultdict[tuple[str, str], Counter[int]] = defaultdict(Counter)

    def record(self, nodes: Sequence[Any], where: str, step: int, older: int) -> None:
        """Counts the nodes of a backward pass; `older` of them were created in an earlier step."""
        self.latest_nodes = inner = sum(bool(node.next_functions) for node in nodes)
        self._all[step] += inner
        self._older[where].append((older, inner))

    def record_needless(self, what: str, where: str, step: int, nodes: int) -> None:
        self._needless[what, where][step] += nodes

    def find_shared_graph(self, nodes: Sequence[Any], where: str, step: int) -> Iterator[NeedlessWork]:
        """Finds nodes that run again, after another backward pass that added to the same gradients."""
        if nodes and _has_accumulated_gradients(nodes):
            self.record_needless("shared graph", where, step, len(nodes))
            yield NeedlessWork("shared graph", where, 1)

    def find_unused_gradients(
        self, nodes: Sequence[Any], forward: Callable[[Any], str], where: str, step: int
    ) -> Iterator[NeedlessWork]:
        """Finds gradients of a backward pass that nobody uses.

        Nothing is found if no tensor belongs to an optimizer: parameters may stand for others, as those of ranks do.

        Args:
            forward: returns the line of the forward pass that ended at a node; empty if none did.
        """
        updated = {id(value) for value in self._parameters()}
        leaves = [(node, node.variable) for node in nodes if not node.next_functions and hasattr(node, "variable")]
        if not any(id(leaf) in updated for _, leaf in leaves):
            return
        unused = {
            node: leaf for node, leaf in leaves if id(leaf) not in updated and self._is_gradient_unused(leaf, step)
        }
        if not unused:
            return
        needed = nodes_leading_to(nodes, lambda node: not node.next_functions and node not in unused)
        needless = [node for node in nodes if node.next_functions and node not in needed]
        where = next(filter(None, map(forward, [*needless, *nodes])), where)
        parameters = [node for node, leaf in unused.items() if isinstance(leaf, nn.Parameter)]
        if parameters:
            self.record_needless("unused gradients", where, step, len(needless))
            yield NeedlessWork("unused gradients", where, len(parameters))
        elif not any(after in unused for node in nodes if is_custom(node) for after, _ in node.next_functions):
            yield NeedlessWork("input gradients", where, len(unused))

    def _is_gradient_unused(self, leaf: Tensor, step: int) -> bool:
        """Returns whether a tensor has no hooks and, if it is a parameter, is unchanged since an earlier step."""
        if leaf._backward_hooks or getattr(leaf, "_post_accumulate_grad_hooks", None):
            return False
        if (now := change_key(leaf)) is None:
            return False
        first, before = self._leaves.setdefault(leaf, (step, now))
        return (first < step or not isinstance(leaf, nn.Parameter)) and before == now

    def needless_share(self, what: str, where: str) -> float:
        """Returns the needless share of the nodes, over the steps that have some; 0 if unknown."""
        if what == "kept graph":
            return _earlier_steps_share(self._older[where])
        needless = self._needless.get((what, where), Counter())
        walked = sum(self._all[step] for step, many in needless.items() if many)
        return sum(needless.values()) / walked if walked else 0.0


def change_key(leaf: Tensor) -> tuple | None:
    """Returns a key that changes with a tensor; None if unknown. Fused optimizers don't increment the version."""
    if type(leaf).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return None
    try:
        with torch._C._DisableTorchDispatch():
            return leaf._version, *sample_numbers(leaf)
    except RuntimeError:  # the tensor has no data
        return None


def walk(roots: list[Any]) -> Iterator[Any]:
    """Yields the nodes of a graph breadth-first, from its outputs on, up to a maximum."""
    seen, pending = set(roots), deque(roots)
    while pending and len(seen) < _MAX_NODES:
        node = pending.popleft()
        yield node
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                pending.append(after)


def nodes_leading_to(nodes: Sequence[Any], is_end: Callable[[Any], bool]) -> set[Any]:
    """Returns the nodes from which an end can be reached. Custom functions and nodes outside may lead anywhere."""
    walked, parents = set(nodes), defaultdict[Any, list[Any]](list)
    ends: list[Any] = []
    for node in nodes:
        if is_end(node) or is_custom(node):
            ends.append(node)
        for after, _ in node.next_functions:
            (parents[after] if after in walked else ends if after is not None else []).append(node)
    leading, pending = set(ends), ends
    while pending:
        fresh = [node for node in parents[pending.pop()] if node not in leading]
        leading.update(fresh)
        pending += fresh
    return leading


def is_custom(node: Any) -> bool:
    """Returns whether a node is a custom autograd function, or a record of one."""
    return isinstance(node, BackwardCFunction) or getattr(node, "is_custom", False)


def _has_accumulated_gradients(nodes: Sequence[Any]) -> bool:
    """Returns whether all gradients below have values: a script that clears some wants the new ones alone."""
    ends = (after for node in nodes for after, _ in node.next_functions if after is not None)
    gradients = [end.variable.grad for end in ends if not end.next_functions and hasattr(end, "variable")]
    return bool(gradients) and all(gradient is not None and bool(gradient.any()) for gradient in gradients)


def _earlier_steps_share(walks: Sequence[tuple[int, int]]) -> float:
    """Returns the share of nodes that earlier steps created, if their number grows; else 0."""
    earlier, walked = (sum(numbers) for numbers in zip(*walks, strict=True))
    return earlier / walked if walks[-1][0] > walks[0][0] else 0.0
