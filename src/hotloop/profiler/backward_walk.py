"""Finds nodes that backward passes needn't run: graphs of earlier steps, shared graphs, gradients without a reader."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.weak import WeakTensorKeyDictionary

from hotloop.core.torch_private import DisableTorchDispatch
from hotloop.profiler.base.call_sites import CallSites
from hotloop.profiler.base.tensor_facts import sample_numbers, tensors_in
from hotloop.profiler.hooks.torch_hooks import stop_on_error

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
        with DisableTorchDispatch():
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


_LIST_METHODS = {"append": -1, "extend": -1, "appendleft": 0, "extendleft": 0}
"""Methods of lists and deques that add items, with the index of the last added item afterwards."""

_MAX_TENSORS = 1000


class RetainedGraphs:
    """Finds the lines at which a script appends tensors with a graph to a list or deque.

    The class observes all calls with `sys.setprofile`, which slows Python down: only for steps whose times aren't used.

    Args:
        fail: called with an internal error, instead of raising it in the script.
    """

    def __init__(self, sites: CallSites, fail: Callable[[Exception], Any]) -> None:
        self.fail, self._sites = fail, sites
        self._process = os.getpid()
        self._tensors: list[tuple[int, str, weakref.ref[Tensor]]] = []
        self._step, self._profile_function = 0, self._on_call

    def listen(self, step: int) -> None:
        """Starts to observe a step; a profiler of the script, of which there can be only one, has priority."""
        if sys.getprofile() is None:
            self._step = step
            sys.setprofile(self._profile_function)

    def stop(self) -> None:
        if sys.getprofile() is self._profile_function:
            sys.setprofile(None)

    def live_lines(self, step: int) -> set[str]:
        """Returns lines of a step that appended tensors which are still alive; drops earlier records."""
        live = {where for at, where, tensor in self._tensors if at == step and tensor() is not None}
        self._tensors = [entry for entry in self._tensors if entry[0] > step]
        return live

    @stop_on_error
    def _on_call(self, frame: FrameType, event: str, called: Any) -> None:
        if os.getpid() != self._process:  # a forked child, which inherits the profile function
            self.stop()
            return
        if event != "c_return" or (name := getattr(called, "__name__", "")) not in _LIST_METHODS:
            return
        container = getattr(called, "__self__", None)
        if not isinstance(container, list | deque) or not container or len(self._tensors) >= _MAX_TENSORS:
            return
        for tensor in tensors_in(container[_LIST_METHODS[name]], depth=1):
            if tensor.grad_fn is not None:
                self._tensors.append((self._step, self._sites.line_above(frame), weakref.ref(tensor)))


def match_lines(backwards: Sequence[str], lines: Counter[str]) -> dict[str, str]:
    """Returns the line that retains the graph of each backward pass; passes without a certain match are left out.

    Args:
        backwards: lines of the backward passes whose graphs are retained.
        lines: lines that append a tensor with a graph to a list, with their counts.
    """
    if len(lines) == 1 or len(backwards) == 1:
        return dict.fromkeys(backwards, lines.most_common(1)[0][0]) if lines else {}
    if len(lines) != len(backwards):
        return {}
    return dict(zip(sorted(backwards, key=_place_key), sorted(lines, key=_place_key), strict=True))


def _place_key(where: str) -> tuple[str, int]:
    file, _, line = where.rpartition(":")
    return file, int(line or 0)


CLEARED, UNREAD = "cleared gradients", "unread gradients"
"""Patterns: a backward pass runs a whole network needlessly, or a network of which only input gradients are read."""

_PRODUCT_NODES = ("mm", "Convolution", "Linear", "Mkldnn", "Lstm", "Gru", "Rnn")
"""In names of nodes that compute one product per gradient. Bias gradients are sums, which take little time."""

_CHEAP_NODES = ("BatchNorm",)
"""In names of nodes that compute the weights' gradients on the way to the inputs' gradients."""


@dataclass
class _Leaf:
    """A tensor to which a backward pass adds a gradient."""

    tensor: weakref.ref[Tensor]
    before: tuple | None
    is_matrix: bool
    is_read: bool = False


@dataclass
class _Node:
    """A record of a graph node, without a reference to the graph."""

    name: str
    is_custom: bool
    ends_forward: bool
    leaf: _Leaf | None
    next_functions: list[tuple[_Node | None, int]] = field(default_factory=list)
    seconds: float = 0.0  # CPU time of the thread, without that of other programs
    began: float = 0.0

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def start(self, gradients: Any) -> None:
        self.began = time.thread_time()

    def stop(self, inputs: Any, outputs: Any) -> None:
        self.seconds += time.thread_time() - self.began


@dataclass
class _Backward:
    """A backward pass whose gradients an optimizer may still read."""

    nodes: list[_Node]
    where: str
    step: int

    @property
    def leaves(self) -> list[_Leaf]:
        return [node.leaf for node in self.nodes if node.leaf is not None]


class ClearedGradients:
    """Tracks the gradients of each backward pass until a later pass finds them cleared or their tensors updated.

    A backward pass is only reported if some of its gradients are read and others aren't: a script may save all
    gradients of a pass and then clear them, as methods that reconcile the gradients of several losses do.

    Args:
        parameters: returns the parameters of all optimizers that have stepped.
    """

    def __init__(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._parameters = parameters
        self._waiting: list[_Backward] = []
        self._timed: list[Any] = []
        self._needless_s: defaultdict[tuple[str, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._nodes: list[_Node] = []
        self._walked_s = dict[int, float]()
        self._asked_since: float | None = None
        self._asked_s = 0.0

    def record(
        self, nodes: Sequence[Any], where: str, step: int, forward: Callable[[Any], str]
    ) -> Iterator[NeedlessWork]:
        """Times a backward pass until `ended`, and yields the needless work of the passes before it."""
        yield from self._check_earlier(step)
        recorded = _record_nodes(nodes, forward)
        for node, record in recorded.items():
            self._timed += [node.register_prehook(record.start), node.register_hook(record.stop)]
        self._waiting.append(_Backward(list(recorded.values()), where, step))
        self._nodes += recorded.values()

    def asked(self) -> None:
        """Times a backward pass that returns gradients instead of adding to them, as a whole."""
        self._asked_since = time.thread_time()

    def ended(self) -> None:
        if self._asked_since is not None:
            self._asked_s += time.thread_time() - self._asked_since
            self._asked_since = None
        for handle in self._timed:
            handle.remove()
        self._timed = []

    def optimizer_stepped(self, parameters: Iterable[Tensor]) -> None:
        """Marks the gradients of these parameters as read."""
        ids = {id(value) for value in parameters}
        for leaf in (leaf for backward in self._waiting for leaf in backward.leaves):
            leaf.is_read = leaf.is_read or id(leaf.tensor()) in ids

    def step_done(self, step: int) -> None:
        """Drops the gradients of the step before; the next step may still clear those of this step."""
        self._waiting = [backward for backward in self._waiting if backward.step == step]
        self._walked_s[step] = self._asked_s + sum(node.seconds for node in self._nodes)
        self._asked_s, self._nodes = 0.0, []

    def dropped_share(self, what: str, where: str) -> float:
        """Returns the share of backward time spent on unused gradients, over the steps that have some; 0 if unknown."""
        needless = self._needless_s.get((what, where), {})
        walked_s = sum(self._walked_s[step] for step in needless)
        return sum(needless.values()) / walked_s if walked_s else 0.0

    def _check_earlier(self, step: int) -> Iterator[NeedlessWork]:
        waiting, updated = [], {id(value) for value in self._parameters()}
        for backward in self._waiting:
            unread = [leaf for leaf in backward.leaves if not leaf.is_read and _is_unchanged(leaf)]
            cleared = {id(leaf) for leaf in unread if _is_cleared(leaf)}
            if not cleared:
                waiting.append(backward)
            elif len(unread) < len(backward.leaves):
                yield from self._without_benefit(backward, cleared, updated, step)
        self._waiting = waiting

    def _without_benefit(
        self, backward: _Backward, cleared: set[int], updated: set[int], step: int
    ) -> Iterator[NeedlessWork]:
        """Yields a pass in which nodes of a whole network, or of weights, lead only to cleared gradients."""
        needed = nodes_leading_to(backward.nodes, lambda node: node.leaf is not None and id(node.leaf) not in cleared)
        useless = [node for node in backward.nodes if node not in needed]
        if any(node.ends_forward for node in useless):
            what, spent_s = CLEARED, sum(node.seconds for node in useless)
        elif all(id(leaf.tensor()) in updated for leaf in backward.leaves if id(leaf) in cleared):
            what = UNREAD
            spent_s = sum(
                node.seconds if node not in needed else _weight_gradient_s(node, needed) for node in backward.nodes
            )
        else:
            return
        self._needless_s[what, backward.where][backward.step] += spent_s
        yield NeedlessWork(what, backward.where, 1)


def _record_nodes(nodes: Sequence[Any], forward: Callable[[Any], str]) -> dict[Any, _Node]:
    records = {node: _Node(node.name(), is_custom(node), bool(forward(node)), _make_leaf(node)) for node in nodes}
    for node, record in records.items():
        record.next_functions = [
            (records.get(after) or _Node("", True, False, None), at) for after, at in node.next_functions if after
        ]
    return records


def _make_leaf(node: Any) -> _Leaf | None:
    if node.next_functions or not hasattr(node, "variable"):
        return None
    tensor = node.variable
    read = tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)
    return _Leaf(weakref.ref(tensor), change_key(tensor), tensor.ndim > 1, bool(read))


def _is_unchanged(leaf: _Leaf) -> bool:
    tensor = leaf.tensor()
    return tensor is not None and leaf.before is not None and change_key(tensor) == leaf.before


def _is_cleared(leaf: _Leaf) -> bool:
    tensor = leaf.tensor()
    return tensor is not None and (tensor.grad is None or not bool(tensor.grad.any()))


def _weight_gradient_s(node: _Node, needed: set[_Node]) -> float:
    """Returns the seconds of a node spent on unused gradients; its products are taken as equally long."""
    if any(kind in node.name for kind in _CHEAP_NODES):
        return 0.0
    products = any(kind in node.name for kind in _PRODUCT_NODES)
    next_nodes = [next_node for next_node, _ in node.next_functions if next_node is not None]
    counted = [
        next_node for next_node in next_nodes if next_node.leaf is None or next_node.leaf.is_matrix or not products
    ]
    return node.seconds * sum(next_node not in needed for next_node in counted) / len(counted) if counted else 0.0
