"""One recorded training call of a module: inputs, random state and buffers before it, and output gradients."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from hotloop.exchanges.modules.module_limits import TWICE, why_unfit_leaves
from hotloop.profiler.base.transparency import hide_from_compiler


@hide_from_compiler
class RecordedCall:
    """A call that can be repeated in a fork of the process, at the end of the script's backward.

    Args:
        module: the script's own object, not a copy.
        args, kwargs: of the call, plain tensors on the CPU and plain values; the tensors are copied.

    Attributes:
        gradients: of the result's tensors that the script's backward reached, by place among all leaves.
        unfit: why the call can't be compared; empty if it can.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module, self.gradients = module, dict[int, Tensor]()
        self.unfit = ""
        self.arguments = pytree.tree_map(_copy, (args, kwargs))
        self.buffers = {name: value.clone() for name, value in module.named_buffers()}
        self.random = torch.get_rng_state()
        self._other_random = _other_generators()
        self._versions = self._parameter_versions()
        self._is_over = False

    def watch(self, result: Any, then: Callable[[], None]) -> None:
        """Records the result's gradients in the script's backward, and calls `then` at the end of that backward."""
        self.unfit = self.unfit or why_unfit_leaves(result, "its result")
        if self._other_random != _other_generators():
            self.unfit = self.unfit or "its forward draws from Python's or NumPy's generator"
        for place, value in enumerate(pytree.tree_leaves(result)):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda gradient, place=place: self._note(place, gradient, then))

    def _note(self, place: int, gradient: Tensor, then: Callable[[], None]) -> None:
        if torch.is_grad_enabled():
            self.unfit = self.unfit or f"the script differentiates it twice, and {TWICE}"
        if not self._is_over and not self.gradients:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(then))
        if not self._is_over:
            self.gradients[place] = gradient.detach().clone()

    def _end(self, then: Callable[[], None]) -> None:
        if not self._is_over:
            self._is_over = True
            then()

    @property
    def has_its_parameters(self) -> bool:
        """Whether the module still has the parameters of the call."""
        return self._versions == self._parameter_versions()

    def _parameter_versions(self) -> list[tuple[int, int]]:
        return [(id(value), value._version) for value in self.module.parameters()]


@hide_from_compiler
def notice_gradient(result: Any, then: Callable[[], None]) -> None:
    """Calls `then` once a backward reaches one of the result's tensors."""
    handles: list[RemovableHandle] = []

    def reached(gradient: Tensor) -> None:
        if handles:
            for handle in handles:
                handle.remove()
            handles.clear()
            then()

    leaves = (leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.grad_fn is not None)
    handles.extend(leaf.register_hook(reached) for leaf in leaves)


def call_signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what a compiled module assumes of a call: kinds, shapes, strides and dtypes of tensors, and plain values."""
    if not kwargs and all(type(value) is Tensor for value in args):  # the usual call, in a third of the time
        return tuple(map(_leaf_signature, args)), torch.get_num_threads()
    leaves, tree = pytree.tree_flatten((args, kwargs))
    return (
        tree,
        tuple(map(_leaf_signature, leaves)),
        torch.get_num_threads(),
    )


def has_differentiated_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an input is a leaf whose gradient the script reads, as penalties that differentiate twice do."""
    is_plain = not kwargs and all(type(value) is Tensor for value in args)
    leaves = args if is_plain else pytree.tree_leaves((args, kwargs))
    return any(isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf for leaf in leaves)


def _leaf_signature(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        strides = leaf.stride() if leaf.layout == torch.strided else leaf.layout
        return type(leaf), leaf.shape, strides, leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), leaf if isinstance(leaf, bool | int | float | str | None) else None


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone(memory_format=torch.preserve_format).requires_grad_(leaf.requires_grad)


def _other_generators() -> Any:
    state: Any = np.random.get_state(legacy=False)
    return hash(random.getstate()), state["state"]["pos"], state["has_gauss"], hash(state["state"]["key"].tobytes())
