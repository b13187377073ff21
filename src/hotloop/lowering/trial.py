"""Pieces of a model, tried before they are dealt to ranks: what crosses between them, what they draw, what they cost."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hotloop.lowering.grouped import traceable_groups
from hotloop.lowering.passes import nodes_below
from hotloop.lowering.pieces import Leaves, Piece
from hotloop.parallel.draws import Drawing
from hotloop.parallel.splitting import Cost

_REPEATS = 3
_COPIES = 4
"""Of a trained parameter: itself, its gradient, and the two of most optimizers."""

Around = Callable[[], AbstractContextManager[Any]]
"""The numbers that a forward pass computes in."""


@dataclass(frozen=True)
class Rehearsed:
    """What is known of a piece without computing anything.

    Attributes:
        arriving, leaving: tensors without content, like those that cross to it and from it; only what leads to the loss
            requires a gradient.
        drawings: what it draws, in order.
    """

    arriving: tuple[Tensor, ...]
    leaving: tuple[Tensor, ...]
    drawings: tuple[Drawing, ...]


def rehearse(pieces: Sequence[Piece], leaves: Leaves, device: torch.device, around: Around) -> list[Rehearsed]:
    """Runs pieces, one after the other, on tensors without content."""
    passes = []
    with FakeTensorMode(allow_non_fake_inputs=True), traceable_groups():
        batch = [torch.empty_like(leaf, device=device) for leaf in leaves]
        arrived: tuple[Tensor, ...] = ()
        for piece in pieces:
            values = {name: _like(value, device) for name, value in _tensors_of(piece)}
            with around(), _Listening() as listening:
                left = functional_call(piece, values, (arrived, batch))
            passes.append((arrived, left, tuple(listening.heard)))
            arrived = tuple(_fresh(value) for value in left)
    found: list[Rehearsed] = []
    leading = [True, *itertools.repeat(False, len(left) - 1)]  # the last piece puts the loss out first
    for arrived, left, heard in reversed(passes):
        reached = _reached([value for value, leads in zip(left, leading, strict=True) if leads])
        leaving = _metas(left, leading)
        leading = [id(value) in reached for value in arrived]
        found.insert(0, Rehearsed(_metas(arrived, leading), leaving, heard))
    return found


def _reached(values: Sequence[Tensor]) -> set[int]:
    """The leaves that get gradients of these tensors, themselves among them where they are such, by `id`."""
    found = {id(value) for value in values if value.requires_grad and value.is_leaf}
    return found | {id(node.variable) for node in nodes_below(values) if hasattr(node, "variable")}


def measure(pieces: Sequence[Piece], leaves: Leaves, device: torch.device, around: Around) -> list[Cost]:
    """Runs pieces, one after the other, forward and backward, and only one of them on the device at a time."""
    costs = []
    batch = [leaf.to(device) for leaf in leaves]
    arrived: tuple[Tensor, ...] = ()
    for piece in pieces:
        values = {
            name: value.detach().to(device, copy=True).requires_grad_(value.requires_grad)
            for name, value in _tensors_of(piece)
        }
        kept = _Kept()
        seconds = []
        for repeat in range(1 + _REPEATS):
            inputs = tuple(_fresh(value) for value in arrived)
            began = _now(device)
            with around(), torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda value: value):
                left = functional_call(piece, values, (inputs, batch))
            outputs = [value for value in left if value.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, [torch.ones_like(value) for value in outputs])
            seconds += [_now(device) - began] if repeat else []
        weights = {id(v): v.nbytes * (_COPIES if v.requires_grad else 1) for v in values.values()}
        held = {value.untyped_storage().data_ptr() for value in values.values()}
        costs.append(
            Cost(
                statistics.median(seconds),
                sum(weights.values()),
                kept.bytes(held) // (1 + _REPEATS),
                sum(value.nbytes for value in arrived),
            )
        )
        arrived = tuple(_fresh(value) for value in left)
    return costs


class _Listening(TorchDispatchMode):
    """Notes what is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Drawing] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawing = Drawing.of(function, args, kwargs or {})
        if drawing is not None:
            self.heard.append(drawing)
        return function(*args, **(kwargs or {}))


class _Kept:
    """Adds up what forward passes keep for backward, each memory once per pass."""

    def __init__(self) -> None:
        self._storages: list[tuple[int, int]] = []

    def keep(self, value: Tensor) -> Tensor:
        self._storages.append((value.untyped_storage().data_ptr(), value.untyped_storage().nbytes()))
        return value

    def bytes(self, without: set[int]) -> int:
        return sum(size for place, size in set(self._storages) if place not in without)


def _tensors_of(piece: Piece) -> list[tuple[str, Tensor]]:
    return [*piece.named_parameters(), *piece.named_buffers()]


def _like(value: Tensor, device: torch.device) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device=device).requires_grad_(value.requires_grad)


def _metas(values: Sequence[Tensor], leading: Sequence[bool]) -> tuple[Tensor, ...]:
    """Outside of any mode, so that they are torch's own kind of tensors without content."""
    with _disable_current_modes():
        return tuple(
            torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=value.requires_grad and leads)
            for value, leads in zip(values, leading, strict=True)
        )


def _fresh(value: Tensor) -> Tensor:
    """A leaf of a graph of its own."""
    return value.detach().clone(memory_format=torch.contiguous_format).requires_grad_(value.requires_grad)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
