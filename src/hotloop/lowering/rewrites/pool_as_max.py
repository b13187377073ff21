"""Max pooling as a maximum over shifted views, where windows don't overlap, so that a compiler fuses it with the rest.

torch's pooling is a kernel of its own, as is its gradient, which looks up by index where each number came from. Here a
window's numbers are compared one after the other; the first of the largest gets the gradient, as in torch's kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from hotloop.lowering.rewrites.walking import (
    argument,
    aten,
    calls,
    dropped,
    is_plain,
    operand,
    pair,
    part,
    replaced,
    value_of,
    written,
)

_MOST = 9
"""Numbers in a window; a larger one is many operations."""


def pooling_as_maximum(graph: GraphModule) -> int:
    """Wherever 2d windows touch and don't overlap; returns how often."""
    return sum(_rewritten(graph, pool) for pool in calls(graph, aten.max_pool2d_with_indices.default))


@dataclass(frozen=True)
class Spread:
    """How the gradient of a pooling came about: what is known of it before it has the shape of the image."""

    gradient: Node
    place: Node
    size: tuple[int, int]


SPREAD = "hotloop_spread"
"""Under which a node's `meta` has its Spread."""


def _window_of(pool: Node) -> tuple[int, int] | None:
    """The size of windows that touch, don't overlap, and take in the whole image; None for others."""
    size = pair(argument(pool, "kernel_size"))
    plain = pair(argument(pool, "padding")) == (0, 0) and pair(argument(pool, "dilation")) == (1, 1)
    image = value_of(operand(pool))
    touches = pair(argument(pool, "stride") or size) == size
    whole = not image.shape[-2] % size[0] and not image.shape[-1] % size[1]
    return size if plain and touches and whole and is_plain(image) and size[0] * size[1] <= _MOST else None


def _rewritten(graph: GraphModule, pool: Node) -> bool:
    size, pooled, places = _window_of(pool), part(pool, 0), part(pool, 1)
    if size is None or pooled is None:
        return False
    users = [] if places is None else list(places.users)
    if any(user.target is not aten.max_pool2d_with_indices_backward.default for user in users):
        return False
    largest, place = written(graph, pool, lambda x: _largest(x, size), operand(pool))
    for user in users:
        gradient = operand(user)
        spread = written(graph, user, lambda gradient, at: _spread(gradient, at, size), gradient, place)
        spread.meta[SPREAD] = Spread(gradient, place, size)
        replaced(graph, user, spread)
    replaced(graph, pooled, largest)
    dropped(graph, pool)
    return True


def _largest(x: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The largest of each window, and its place there as a number of the same dtype; the first of several."""
    samples, channels, height, width = x.shape
    windows = x.reshape(samples, channels, height // size[0], size[0], width // size[1], size[1])
    best = windows[:, :, :, 0, :, 0]
    place = torch.zeros_like(best)
    for number in range(1, size[0] * size[1]):
        value = windows[:, :, :, number // size[1], :, number % size[1]]
        place = torch.where(value > best, float(number), place)
        best = torch.maximum(best, value)  # NaN, if there is one
    return best, place


def _spread(gradient: Tensor, place: Tensor, size: tuple[int, int]) -> Tensor:
    """The gradient of each window at the place of its largest number, and 0 elsewhere; the shape of the image."""
    samples, channels, rows, columns = gradient.shape
    numbers = torch.arange(size[0] * size[1], dtype=place.dtype, device=place.device).view(size[0], 1, size[1])
    here = place[:, :, :, None, :, None] == numbers
    spread = torch.where(here, gradient[:, :, :, None, :, None], 0.0)
    return spread.reshape(samples, channels, rows * size[0], columns * size[1])


def spread_by_place(gradient: Tensor, place: Tensor, size: tuple[int, int]) -> Tensor:
    """The same with all first places of windows together, then all second ones: (channels, places * samples * ...)."""
    at = [torch.where(place == number, gradient, 0.0).transpose(0, 1) for number in range(size[0] * size[1])]
    return torch.stack(at, 1).view(gradient.shape[1], -1)
