"""Rewrites max pooling without overlap as a maximum over shifted views, which a compiler fuses with the code around it.

torch's pooling is a kernel of its own, as is its gradient, which scatters by index. Here a window's numbers are
compared one after the other; the first of the largest gets the gradient, as in torch's kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from hotloop.lowering.rewrites.fx_nodes import (
    argument_named,
    as_pair,
    aten,
    drop_node,
    fake_value,
    find_calls,
    insert_operations,
    is_plain,
    operand_at,
    replace_node,
    result_part,
    to_layout_of,
)

MAX_WINDOW = 9
"""Numbers in a window; each is an operation to compile."""


def pooling_as_maximum(graph: GraphModule) -> int:
    """Rewrites poolings with adjacent 2d windows; returns how often."""
    return sum(_rewrite(graph, pool) for pool in find_calls(graph, aten.max_pool2d_with_indices.default))


def pool_window(pool: Node) -> tuple[int, int] | None:
    """Returns the size of windows that are adjacent and cover the whole image; None for others."""
    names = ("kernel_size", "stride", "padding", "dilation")
    return window_of_call(fake_value(operand_at(pool)), *(argument_named(pool, name) for name in names))


def window_of_call(
    image: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
) -> tuple[int, int] | None:
    """Returns the same from the arguments of `aten.max_pool2d_with_indices`."""
    size = as_pair(kernel)
    plain = as_pair(padding) == (0, 0) and as_pair(dilation) == (1, 1) and as_pair(stride or size) == size
    whole = not image.shape[-2] % size[0] and not image.shape[-1] % size[1]
    return size if plain and whole and is_plain(image) and size[0] * size[1] <= MAX_WINDOW else None


def _rewrite(graph: GraphModule, pool: Node) -> bool:
    size, pooled, places = pool_window(pool), result_part(pool, 0), result_part(pool, 1)
    if size is None or pooled is None:
        return False
    users = [] if places is None else list(places.users)
    if any(user.target is not aten.max_pool2d_with_indices_backward.default for user in users):
        return False
    largest, place = insert_operations(graph, pool, lambda x: _window_maximum(x, size), operand_at(pool))
    for user in users:
        operands = (operand_at(user), place, operand_at(pool))
        replace_node(graph, user, insert_operations(graph, user, partial(_pool_gradient, size=size), *operands))
    replace_node(graph, pooled, largest)
    drop_node(graph, pool)
    return True


def _window_maximum(x: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Returns the largest of each window, and its place as a number of the same dtype; the first of several."""
    samples, channels, height, width = x.shape
    windows = x.reshape(samples, channels, height // size[0], size[0], width // size[1], size[1])
    return elementwise_maximum([windows[:, :, :, at, :, to] for at in range(size[0]) for to in range(size[1])])


def elementwise_maximum(values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the elementwise maximum, and the number of the first tensor that has it, in the same dtype."""
    best, place = values[0], torch.zeros_like(values[0])
    for number, value in enumerate(values[1:], 1):
        place = torch.where(value > best, float(number), place)
        best = torch.maximum(best, value)  # propagates NaN
    return best, place


def _pool_gradient(gradient: Tensor, place: Tensor, image: Tensor, size: tuple[int, int]) -> Tensor:
    return _scatter_gradient(to_layout_of(gradient, image), place, size)


def _scatter_gradient(gradient: Tensor, place: Tensor, size: tuple[int, int]) -> Tensor:
    """Returns the gradient of each window at its largest number, and 0 elsewhere; the shape of the image."""
    samples, channels, rows, columns = gradient.shape
    numbers = torch.arange(size[0] * size[1], dtype=place.dtype, device=place.device).view(size[0], 1, size[1])
    is_largest = place[:, :, :, None, :, None] == numbers
    spread = torch.where(is_largest, gradient[:, :, :, None, :, None], 0.0)
    return spread.reshape(samples, channels, rows * size[0], columns * size[1])
