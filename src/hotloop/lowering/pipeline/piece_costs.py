"""Shapes, draws and costs of a model's pieces, found before they are assigned to ranks."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from hotloop.core.torch_private import FakeTensorMode, TorchDispatchMode, disable_current_modes
from hotloop.distributed.wrappers.global_batch_rng import RandomOp
from hotloop.lowering.grouped_mm import traceable_groups
from hotloop.lowering.pipeline.graph_split import GraphPiece, TensorLeaves
from hotloop.lowering.steps.gradient_check import autograd_ancestors

_EVEN_RATIO = 1.05
"""Splits whose slowest stage is within 5 % of the best count as equal: measured times are no more precise."""


@dataclass(frozen=True)
class PieceCost:
    """Cost of one piece of a model for one microbatch.

    Attributes:
        seconds: time of forward and backward.
        weights: bytes of its parameters with gradients and optimizer state.
        kept: bytes that its forward pass saves for backward.
        arriving: bytes sent to a stage that begins with the piece.
    """

    seconds: float
    weights: int = 0
    kept: int = 0
    arriving: int = 0


def find_best_cuts(
    costs: Sequence[PieceCost], stages: int, room: float = math.inf, in_flight: Callable[[int], int] = lambda stage: 1
) -> tuple[int, ...] | None:
    """Returns the first pieces of the second, third... stage; None if no split fits into memory.

    The slowest stage is within 5 % of the fastest possible; among such splits the least bytes are sent. Dynamic
    programming over (stage, end) finds both exactly.

    Args:
        stages: number of stages; each gets at least one piece.
        room: bytes that a stage may take.
        in_flight: number of microbatches whose saved tensors a stage stores.
    """
    sums = _CostSums(costs)

    def fits(stage: int, first: int, last: int) -> bool:
        return sums.weights(first, last) + in_flight(stage) * sums.kept(first, last) <= room

    fastest = _least_cost(len(costs), stages, fits, sums.seconds, max)
    if fastest is None:
        return None
    limit = fastest[0] * _EVEN_RATIO

    def even(stage: int, first: int, last: int) -> bool:
        return fits(stage, first, last) and sums.seconds(first, last) <= limit

    least = _least_cost(len(costs), stages, even, lambda first, last: costs[first].arriving if first else 0, sum)
    return (least or fastest)[1]


def _least_cost(
    pieces: int,
    stages: int,
    allowed: Callable[[int, int, int], bool],
    price: Callable[[int, int], float],
    together: Callable[[tuple[float, float]], float],
) -> tuple[float, tuple[int, ...]] | None:
    """Returns the least total price, and the first pieces of the second and later stages."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(stages):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for first, (paid, cuts) in best.items():
            begun = (*cuts, first) if stage else cuts
            ends = [pieces] if stage == stages - 1 else range(first + 1, pieces)
            for last in ends:
                if last <= first or not allowed(stage, first, last):
                    continue
                candidate = together((paid, price(first, last)))
                if last not in following or candidate < following[last][0]:
                    following[last] = candidate, begun
        best = following
    return best.get(pieces)


class _CostSums:
    def __init__(self, costs: Sequence[PieceCost]) -> None:
        self._seconds, self._weights, self._kept = (
            list(itertools.accumulate((getattr(cost, name) for cost in costs), initial=0))
            for name in ("seconds", "weights", "kept")
        )

    def seconds(self, first: int, last: int) -> float:
        return self._seconds[last] - self._seconds[first]

    def weights(self, first: int, last: int) -> float:
        return self._weights[last] - self._weights[first]

    def kept(self, first: int, last: int) -> float:
        return self._kept[last] - self._kept[first]


_REPEATS = 3

_COPIES = 4
"""Tensors per trained parameter: itself, its gradient, and two of most optimizers."""

ContextFactory = Callable[[], AbstractContextManager[Any]]
"""Returns the context of a forward pass, such as autocast."""


@dataclass(frozen=True)
class PieceShape:
    """Inputs, outputs and draws of a piece, found without computing.

    Attributes:
        arriving, leaving: tensors without content; only those that lead to the loss require a gradient.
        drawings: its draws in order.
    """

    arriving: tuple[Tensor, ...]
    leaving: tuple[Tensor, ...]
    drawings: tuple[RandomOp, ...]


def infer_piece_shapes(
    pieces: Sequence[GraphPiece], leaves: TensorLeaves, device: torch.device, around: ContextFactory
) -> list[PieceShape]:
    """Runs pieces, one after the other, on fake tensors."""
    passes = []
    with FakeTensorMode(allow_non_fake_inputs=True), traceable_groups():
        batch = [torch.empty_like(leaf, device=device) for leaf in leaves]
        arrived: tuple[Tensor, ...] = ()
        for piece in pieces:
            values = {
                name: torch.empty(value.shape, dtype=value.dtype, device=device, requires_grad=value.requires_grad)
                for name, value in _tensors_of(piece)
            }

            with around(), _DrawRecorder() as recorder:
                left = functional_call(piece, values, (arrived, batch))
            passes.append((arrived, left, tuple(recorder.drawings)))
            arrived = tuple(_fresh_leaf(value) for value in left)
    shapes: list[PieceShape] = []
    leading = [True, *itertools.repeat(False, len(left) - 1)]  # the last piece returns the loss first
    for arrived, left, drawings in reversed(passes):
        reached = _reached_leaves([value for value, leads in zip(left, leading, strict=True) if leads])
        leaving = _meta_tensors(left, leading)
        leading = [id(value) in reached for value in arrived]
        shapes.insert(0, PieceShape(_meta_tensors(arrived, leading), leaving, drawings))
    return shapes


def _reached_leaves(values: Sequence[Tensor]) -> set[int]:
    found = {id(value) for value in values if value.requires_grad and value.is_leaf}
    return found | {id(node.variable) for node in autograd_ancestors(values) if hasattr(node, "variable")}


def measure_pieces(
    pieces: Sequence[GraphPiece], leaves: TensorLeaves, device: torch.device, around: ContextFactory
) -> list[PieceCost]:
    """Runs pieces forward and backward, with one piece at a time on the device."""
    costs = []
    batch = [leaf.to(device) for leaf in leaves]
    arrived: tuple[Tensor, ...] = ()
    for piece in pieces:
        values = {
            name: value.detach().to(device, copy=True).requires_grad_(value.requires_grad)
            for name, value in _tensors_of(piece)
        }
        saved = _SavedTensors()
        seconds = []
        for repeat in range(1 + _REPEATS):
            inputs = tuple(_fresh_leaf(value) for value in arrived)
            began = _synchronised_time(device)
            with around(), torch.autograd.graph.saved_tensors_hooks(saved.record, lambda value: value):
                left = functional_call(piece, values, (inputs, batch))
            outputs = [value for value in left if value.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, [torch.ones_like(value) for value in outputs])
            seconds += [_synchronised_time(device) - began] if repeat else []
        weights = {id(v): v.nbytes * (_COPIES if v.requires_grad else 1) for v in values.values()}
        own = {value.untyped_storage().data_ptr() for value in values.values()}
        saved_bytes, arriving_bytes = saved.bytes(own) // (1 + _REPEATS), sum(value.nbytes for value in arrived)
        costs.append(PieceCost(statistics.median(seconds), sum(weights.values()), saved_bytes, arriving_bytes))
        arrived = tuple(_fresh_leaf(value) for value in left)
    return costs


class _DrawRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.drawings: list[RandomOp] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawing = RandomOp.of(function, args, kwargs or {})
        if drawing is not None:
            self.drawings.append(drawing)

        return function(*args, **(kwargs or {}))


class _SavedTensors:
    """Sums the bytes that forward passes save for backward, each memory once per pass."""

    def __init__(self) -> None:
        self._storages: list[tuple[int, int]] = []

    def record(self, value: Tensor) -> Tensor:
        self._storages.append((value.untyped_storage().data_ptr(), value.untyped_storage().nbytes()))
        return value

    def bytes(self, without: set[int]) -> int:
        return sum(size for place, size in set(self._storages) if place not in without)


def _tensors_of(piece: GraphPiece) -> list[tuple[str, Tensor]]:
    return [*piece.named_parameters(), *piece.named_buffers()]


def _meta_tensors(values: Sequence[Tensor], leading: Sequence[bool]) -> tuple[Tensor, ...]:
    """Creates meta tensors outside of any mode, so that they are no fake tensors."""
    with disable_current_modes():
        return tuple(
            torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=value.requires_grad and leads)
            for value, leads in zip(values, leading, strict=True)
        )


def _fresh_leaf(value: Tensor) -> Tensor:
    return value.detach().clone(memory_format=torch.contiguous_format).requires_grad_(value.requires_grad)


def _synchronised_time(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
