"""A first convolution with the max pooling behind it as sums of shifted views, which a compiler makes a single loop of.

A convolution library writes all that it computes, of which pooling keeps a quarter, and lays out its operands for more
channels than an image has. Here each number of a window is a sum over the weights of a filter, and only the largest is
written. The gradient of a weight is a sum over windows, too: of their gradient times what the weight saw at the largest.
"""

from __future__ import annotations

from functools import reduce
from itertools import product
from operator import add

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional

from hotloop.lowering.rewrites.conv_as_gemm import is_ordinary, sum_by_filter
from hotloop.lowering.rewrites.fx_nodes import (
    argument_named,
    as_pair,
    aten,
    drop_node,
    fake_value,
    find_calls,
    insert_operations,
    operand_at,
    replace_node,
    result_part,
)
from hotloop.lowering.rewrites.pool_as_max import elementwise_maximum, pool_window
from hotloop.lowering.rewrites.pool_first import gradient_gate, is_gradient, swap_relu_and_pool

MAX_TERMS = 128
"""Numbers of a window times weights of a filter, each of which is an operation to compile: 108 of them, of 3 x 3 weights and 3
channels, took 15 s, and 300 took 55 s."""


MAX_FAST_TERMS = 80
"""Up to which it is likely to be faster: of 36 and 72 terms, 3 x 3 weights of one channel, steps took 0.3 to 0.5 of the time that
they take with the library, of 100 as long as with `pool_as_max` or 1.1 times as long, and of 108, of three channels, 1.35 times."""


def convolution_in_pooling(graph: GraphModule, most_terms: int = MAX_TERMS) -> int:
    """Wherever data are convolved, whose gradient nobody wants, and pooled, with or without a ReLU between; returns how often."""
    return sum(_rewrite(graph, pool, most_terms) for pool in find_calls(graph, aten.max_pool2d_with_indices.default))


def convolution_in_small_pooling(graph: GraphModule) -> int:
    """Only where that is likely to be faster."""
    return convolution_in_pooling(graph, MAX_FAST_TERMS)


def _rewrite(graph: GraphModule, pool: Node, most_terms: int) -> bool:
    given, window = operand_at(pool), pool_window(pool)
    forward = operand_at(given) if given.target is aten.relu.default else given
    if window is None or not _is_rewritable(forward, window, most_terms):
        return False
    spread = next((user for user in given.users if is_gradient(user, pool)), None)
    gated = spread if given is forward else gradient_gate(given)
    backward = None if gated is None else next(iter(gated.users), None)
    if spread is None or backward is None or not _are_only_users(pool, forward, spread, backward):
        return False
    if given is not forward and not swap_relu_and_pool(graph, pool):
        return False
    image, *trained = [one for one in (operand_at(forward, place) for place in range(3)) if one is not None]
    how = _Convolution(forward, window)
    views = insert_operations(graph, forward, how.views, image)
    largest, place = insert_operations(graph, pool, how.largest, views, *trained)
    gradient, of_weight, of_bias = operand_at(spread), result_part(backward, 1), result_part(backward, 2)
    if of_weight is not None:
        replace_node(graph, of_weight, insert_operations(graph, backward, how.gradient, gradient, place, views))
    if of_bias is not None:
        replace_node(graph, of_bias, insert_operations(graph, backward, sum_by_filter, gradient))
    pooled = result_part(pool, 0)
    if pooled is not None:
        replace_node(graph, pooled, largest)
    for node in (backward, spread, pool, forward):
        drop_node(graph, node)
    return True


def _is_rewritable(node: Node, window: tuple[int, int], most_terms: int) -> bool:
    """Whether it is a convolution with few enough terms."""
    if node.target is not aten.convolution.default or not is_ordinary(node):
        return False
    return fake_value(operand_at(node, 1))[0].numel() * window[0] * window[1] <= most_terms


def _are_only_users(pool: Node, forward: Node, spread: Node, backward: Node) -> bool:
    """Whether the gradients of a pooling and of the convolution before it are all that looks at what it makes, and nobody
    wants the image's.
    """
    given, places, gated = operand_at(pool), result_part(pool, 1), operand_at(backward)
    return (
        set(forward.users) == ({pool, spread} if given is forward else {given})
        and places is not None
        and set(places.users) == {spread}
        and set(gated.users) == {backward}
        and backward.target is aten.convolution_backward.default
        and [operand_at(backward, place) for place in (1, 2)] == [operand_at(forward, place) for place in (0, 1)]
        and not argument_named(backward, "output_mask")[0]
    )


def _sum_by_image(gradient: Tensor) -> bool:
    """How sums are formed: a CPU's loops over one image stay in its caches, and a GPU has cores for all images at once."""
    return gradient.device.type == "cpu"


class _Convolution:
    """One convolution whose result is pooled in windows that touch."""

    def __init__(self, node: Node, window: tuple[int, int]) -> None:
        self.filters, self.channels, *self.size = fake_value(operand_at(node, 1)).shape
        _, _, height, width = fake_value(node).shape
        self.stride, self.padding, self.dilation = (
            as_pair(argument_named(node, name)) for name in ("stride", "padding", "dilation")
        )
        self.window, self.height, self.width = window, height // window[0], width // window[1]
        self.places = list(product(range(window[0]), range(window[1])))
        self.weights = list(product(range(self.channels), range(self.size[0]), range(self.size[1])))
        self.down, self.across = window[0] * self.stride[0], window[1] * self.stride[1]

    def views(self, image: Tensor) -> Tensor:
        """(samples, channels, height, width) -> (down, across, samples, channels, ...), where from one window to the next it
        goes so many rows down and columns across: numbers that windows see at the same place lie side by side.
        """
        samples, channels, height, width = image.shape
        (above, left), (down, across) = self.padding, (self.down, self.across)
        below, right = above + -(height + 2 * above) % down, left + -(width + 2 * left) % across
        padded = functional.pad(image, (left, right, above, below))
        rows, columns = padded.shape[2] // down, padded.shape[3] // across
        views = padded.view(samples, channels, rows, down, columns, across).permute(3, 5, 0, 1, 2, 4).contiguous()
        # Inductor writes it to memory for this; else it computes the padding again wherever a number is looked at.
        return views.as_strided(views.shape, views.stride())

    def largest(self, views: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The pooled convolution, (samples, filters, rows, columns), and the places of the largest."""
        values = []
        for place in self.places:
            seen = (
                (self._windows(views, place, at), weight[:, at[0], at[1], at[2], None, None]) for at in self.weights
            )
            value = reduce(add, (number * by for number, by in seen))
            values.append(value if bias is None else value + bias[:, None, None])
        return elementwise_maximum(values)

    def gradient(self, gradient: Tensor, place: Tensor, views: Tensor) -> Tensor:
        """That of the weights, of the pooled result's gradient."""
        image_by_image, by_weight = _sum_by_image(gradient), []
        for at in self.weights:
            seen = [self._windows(views, place, at) for place in self.places]
            chosen = seen[-1]
            for number in reversed(range(len(seen) - 1)):
                chosen = torch.where(place == number, seen[number], chosen)
            by_weight.append((gradient * chosen).sum((2, 3) if image_by_image else (0, 2, 3)))
        found = torch.stack(by_weight)
        return (found.sum(1) if image_by_image else found).T.contiguous().view(self.filters, self.channels, *self.size)

    def _windows(self, views: Tensor, place: tuple[int, int], weight: tuple[int, int, int]) -> Tensor:
        """What a weight of a filter sees at a place of each window: (samples, 1, rows, columns)."""
        channel, down, across = weight
        row = place[0] * self.stride[0] + down * self.dilation[0]
        column = place[1] * self.stride[1] + across * self.dilation[1]
        view = views[row % self.down, column % self.across, :, channel : channel + 1]
        row, column = row // self.down, column // self.across
        return view[:, :, row : row + self.height, column : column + self.width]
