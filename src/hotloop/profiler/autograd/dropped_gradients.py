"""At which line what has a graph is put into a list, told by Python's calls of the list's methods."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import Tensor

from hotloop.profiler.autograd.backward_walk import NeedlessWork, change_key, is_custom, nodes_leading_to
from hotloop.profiler.base.call_sites import CallSites
from hotloop.profiler.base.tensor_facts import tensors_in
from hotloop.profiler.hooks.torch_hooks import stop_on_error

_LIST_METHODS = {"append": -1, "extend": -1, "appendleft": 0, "extendleft": 0}
"""Methods of lists and deques, and where what was put last stands then."""

_MAX_TENSORS = 1000


class RetainedGraphs:
    """Hears all calls while it listens, which slows Python down: for steps whose times are worth nothing.

    Args:
        fail: is told of an error of its own in the midst of the script.
    """

    def __init__(self, sites: CallSites, fail: Callable[[Exception], Any]) -> None:
        self.fail, self._sites = fail, sites
        self._process = os.getpid()
        self._tensors: list[tuple[int, str, weakref.ref[Tensor]]] = []
        self._step, self._profile_function = 0, self._on_call

    def listen(self, step: int) -> None:
        """A profiler of the script's own, of which there can be but one, comes first."""
        if sys.getprofile() is None:
            self._step = step
            sys.setprofile(self._profile_function)

    def stop(self) -> None:
        if sys.getprofile() is self._profile_function:
            sys.setprofile(None)

    def live_lines(self, step: int) -> set[str]:
        """Lines at which something was put into a list in a step that is alive; forgets that step and those before."""
        found = {where for at, where, tensor in self._tensors if at == step and tensor() is not None}
        self._tensors = [one for one in self._tensors if one[0] > step]
        return found

    @stop_on_error
    def _on_call(self, frame: FrameType, event: str, called: Any) -> None:
        if os.getpid() != self._process:  # a fork, of whose threads this one is alive
            self.stop()
            return
        if event != "c_return" or (name := getattr(called, "__name__", "")) not in _LIST_METHODS:
            return
        holder = getattr(called, "__self__", None)
        if not isinstance(holder, list | deque) or not holder or len(self._tensors) >= _MAX_TENSORS:
            return
        for tensor in tensors_in(holder[_LIST_METHODS[name]], depth=1):
            if tensor.grad_fn is not None:
                self._tensors.append((self._step, self._sites.line_above(frame), weakref.ref(tensor)))


def match_lines(backwards: Sequence[str], lines: Counter[str]) -> dict[str, str]:
    """Which line keeps the graph that each backward went through; one that nobody knows of is left out.

    Args:
        backwards: where those are whose graphs are kept.
        lines: where something is put into a list, with how often.
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
"""What is found: a backward goes through a whole network without need, or through one whose inputs alone need gradients."""

_PRODUCT_NODES = ("mm", "Convolution", "Linear", "Mkldnn", "Lstm", "Gru", "Rnn")
"""In the names of nodes that compute a product for each gradient; those of biases are sums, which take little."""

_CHEAP_NODES = ("BatchNorm",)
"""In the names of nodes that get the gradients of their weights on the way to those of their inputs."""


@dataclass
class _Leaf:
    """A tensor that a backward gives a gradient."""

    tensor: weakref.ref[Tensor]
    before: tuple | None
    is_matrix: bool
    is_read: bool = False


@dataclass
class _Node:
    """What is recorded of a graph's node, so that the graph itself is free."""

    name: str
    is_custom: bool
    ends_forward: bool
    leaf: _Leaf | None
    next_functions: list[tuple[_Node | None, int]] = field(default_factory=list)
    seconds: float = 0.0  # of the processor, since another program may have the core meanwhile
    began: float = 0.0

    __hash__ = object.__hash__
    __eq__ = object.__eq__


@dataclass
class _Backward:
    """One whose gradients an optimizer may yet read."""

    nodes: list[_Node]
    where: str
    step: int

    @property
    def leaves(self) -> list[_Leaf]:
        return [node.leaf for node in self.nodes if node.leaf is not None]


class ClearedGradients:
    """Follows the gradients of each backward until a later one begins that finds them cleared, or their tensors updated.

    Only what one backward adds to some tensors that are updated, and to others that aren't, is reported: all of a backward's
    gradients may be cleared since they were put aside, as where those of several losses are made to agree.

    Args:
        parameters: gives those of all optimizers that have stepped.
    """

    def __init__(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._parameters = parameters
        self._waiting: list[_Backward] = []
        self._timed: list[Any] = []
        self._needless_s: defaultdict[tuple[str, str], defaultdict[int, float]] = defaultdict(
            lambda: defaultdict(float)
        )
        self._nodes: list[_Node] = []
        self._walked_s = dict[int, float]()
        self._asked_since: float | None = None
        self._asked_s = 0.0

    def record(
        self, nodes: Sequence[Any], where: str, step: int, forward: Callable[[Any], str]
    ) -> Iterator[NeedlessWork]:
        """A backward begins, which is timed until `ended`. Which work of those before it was without benefit?"""
        yield from self._check_earlier(step)
        recorded = _record_nodes(nodes, forward)
        for node, one in recorded.items():
            self._timed += [node.register_prehook(_start_hook(one)), node.register_hook(_stop_hook(one))]
        self._waiting.append(_Backward(list(recorded.values()), where, step))
        self._nodes += recorded.values()

    def asked(self) -> None:
        """A backward begins that gives gradients in place of adding to them; it is timed as a whole."""
        self._asked_since = time.thread_time()

    def ended(self) -> None:
        """The backward is over."""
        if self._asked_since is not None:
            self._asked_s += time.thread_time() - self._asked_since
            self._asked_since = None
        for handle in self._timed:
            handle.remove()
        self._timed = []

    def optimizer_stepped(self, parameters: Iterable[Tensor]) -> None:
        """An optimizer has read the gradients of these."""
        ids = {id(value) for value in parameters}
        for leaf in (leaf for one in self._waiting for leaf in one.leaves):
            leaf.is_read = leaf.is_read or id(leaf.tensor()) in ids

    def step_done(self, step: int) -> None:
        """Drops the gradients of the step before; those of this step may still be cleared in the next step."""
        self._waiting = [one for one in self._waiting if one.step == step]
        self._walked_s[step] = self._asked_s + sum(node.seconds for node in self._nodes)
        self._asked_s, self._nodes = 0.0, []

    def dropped_share(self, what: str, where: str) -> float:
        """Share of the backward time that computes unused gradients, in the steps that compute some; 0 if unknown."""
        needless = self._needless_s[what, where] if (what, where) in self._needless_s else dict[int, float]()
        walked_s = sum(self._walked_s[step] for step in needless)
        return sum(needless.values()) / walked_s if walked_s else 0.0

    def _check_earlier(self, step: int) -> Iterator[NeedlessWork]:
        left, owned = [], {id(value) for value in self._parameters()}
        for one in self._waiting:
            stayed = [leaf for leaf in one.leaves if not leaf.is_read and _is_kept(leaf)]
            cleared = {id(leaf) for leaf in stayed if _is_cleared(leaf)}
            if not cleared:
                left.append(one)
            elif len(stayed) < len(one.leaves):
                yield from self._without_benefit(one, cleared, owned, step)
        self._waiting = left

    def _without_benefit(self, one: _Backward, cleared: set[int], owned: set[int], step: int) -> Iterator[NeedlessWork]:
        """Nodes that lead to cleared gradients alone; where no whole network is among them, they are those of weights."""
        needed = nodes_leading_to(one.nodes, lambda node: node.leaf is not None and id(node.leaf) not in cleared)
        useless = [node for node in one.nodes if node not in needed]
        if any(node.ends_forward for node in useless):
            what, spent_s = CLEARED, sum(node.seconds for node in useless)
        elif all(id(leaf.tensor()) in owned for leaf in one.leaves if id(leaf) in cleared):
            what = UNREAD
            spent_s = sum(
                node.seconds if node not in needed else _weight_gradient_s(node, needed) for node in one.nodes
            )
        else:
            return
        self._needless_s[what, one.where][one.step] += spent_s
        yield NeedlessWork(what, one.where, 1)


def _record_nodes(nodes: Sequence[Any], forward: Callable[[Any], str]) -> dict[Any, _Node]:
    found = {node: _Node(node.name(), is_custom(node), bool(forward(node)), _make_leaf(node)) for node in nodes}
    for node, one in found.items():
        one.next_functions = [
            (found.get(after) or _Node("", True, False, None), at) for after, at in node.next_functions if after
        ]
    return found


def _make_leaf(node: Any) -> _Leaf | None:
    if node.next_functions or not hasattr(node, "variable"):
        return None
    tensor = node.variable
    read = tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)
    return _Leaf(weakref.ref(tensor), change_key(tensor), tensor.ndim > 1, bool(read))


def _is_kept(leaf: _Leaf) -> bool:
    tensor = leaf.tensor()
    return tensor is not None and leaf.before is not None and change_key(tensor) == leaf.before


def _is_cleared(leaf: _Leaf) -> bool:
    tensor = leaf.tensor()
    return tensor is not None and (tensor.grad is None or not bool(tensor.grad.any()))


def _weight_gradient_s(node: _Node, needed: set[_Node]) -> float:
    """Seconds of a node that go into gradients which nobody needs: each product takes as long as the others."""
    if any(kind in node.name for kind in _CHEAP_NODES):
        return 0.0
    products = any(kind in node.name for kind in _PRODUCT_NODES)
    after = [one for one, _ in node.next_functions if one is not None]
    counted = [one for one in after if one.leaf is None or one.leaf.is_matrix or not products]
    return node.seconds * sum(one not in needed for one in counted) / len(counted) if counted else 0.0


def _start_hook(node: _Node) -> Callable[[Any], None]:
    def start(gradients: Any) -> None:
        node.began = time.thread_time()

    return start


def _stop_hook(node: _Node) -> Callable[[Any, Any], None]:
    def stop(inputs: Any, outputs: Any) -> None:
        node.seconds += time.thread_time() - node.began

    return stop
