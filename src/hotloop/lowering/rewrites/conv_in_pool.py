"""Rewrites a first convolution and its max pooling as sums of shifted views, which a compiler fuses into one loop.

A convolution library writes all results, of which pooling keeps a quarter, and lays out its operands for more channels
than an image has. Here each number of a window is a sum over the weights of a filter, and only the largest is written.
A weight's gradient is a sum over windows of their gradient times the weight's input at the largest number.
"""

from __future__ import annotations

from functools import reduce
from itertools import product
from operator import add

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional

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
)
from hotloop.lowering.rewrites.pool_as_max import elementwise_maximum, pool_window

MAX_TERMS = 128
"""Numbers of a window times weights of a filter; each product is an operation to compile.
108 (3 x 3 weights, 3 channels) took 15 s, and 300 took 55 s.
"""


MAX_FAST_TERMS = 80
"""Terms up to which the rewrite is likely faster. Steps of 36 and 72 terms (3 x 3 weights, one channel) took 0.3 to
0.5 of the library's time; of 100 terms 1 to 1.1 times that of `pool_as_max`; of 108 (three channels) 1.35 times.
"""


def convolution_in_pooling(graph: GraphModule, most_terms: int = MAX_TERMS) -> int:
    """Rewrites pooled convolutions of data, with or without a ReLU between; returns how often."""
    return sum(_rewrite(graph, pool, most_terms) for pool in find_calls(graph, aten.max_pool2d_with_indices.default))


def convolution_in_small_pooling(graph: GraphModule) -> int:
    """Rewrites only where that is likely faster."""
    return convolution_in_pooling(graph, MAX_FAST_TERMS)


def _rewrite(graph: GraphModule, pool: Node, most_terms: int) -> bool:
    pool_input, window = operand_at(pool), pool_window(pool)
    forward = operand_at(pool_input) if pool_input.target is aten.relu.default else pool_input
    if window is None or not _is_rewritable(forward, window, most_terms):
        return False
    spread = next((user for user in pool_input.users if _is_gradient(user, pool)), None)
    gated = spread if pool_input is forward else _gradient_gate(pool_input)
    backward = None if gated is None else next(iter(gated.users), None)
    if spread is None or backward is None or not _are_only_users(pool, forward, spread, backward):
        return False
    if pool_input is not forward and not _swap_relu_and_pool(graph, pool):
        return False
    operands = [operand_at(forward, place) for place in range(3)]
    image, *trained = [operand for operand in operands if operand is not None]
    convolution = _Convolution(forward, window)
    views = insert_operations(graph, forward, convolution.views, image)
    largest, place = insert_operations(graph, pool, convolution.largest, views, *trained)
    gradient, weight_gradient, bias_gradient = operand_at(spread), result_part(backward, 1), result_part(backward, 2)
    if weight_gradient is not None:
        new = insert_operations(graph, backward, convolution.gradient, gradient, place, views)
        replace_node(graph, weight_gradient, new)
    if bias_gradient is not None:
        replace_node(graph, bias_gradient, insert_operations(graph, backward, _sum_by_filter, gradient))
    if (pooled := result_part(pool, 0)) is not None:
        replace_node(graph, pooled, largest)
    for node in (backward, spread, pool, forward):
        drop_node(graph, node)
    return True


def _is_rewritable(node: Node, window: tuple[int, int], most_terms: int) -> bool:
    """Whether the node is a convolution with few enough terms."""
    if node.target is not aten.convolution.default or not _is_plain_convolution(node):
        return False
    return fake_value(operand_at(node, 1))[0].numel() * window[0] * window[1] <= most_terms


def _is_plain_convolution(node: Node) -> bool:
    """Whether the node convolves plain images of one dtype, without groups."""
    image, weight = fake_value(operand_at(node)), fake_value(operand_at(node, 1))
    plain = argument_named(node, "groups") == 1 and not argument_named(node, "transposed")
    return plain and is_plain(image) and is_plain(fake_value(node)) and weight.dtype == image.dtype


def _swap_relu_and_pool(graph: GraphModule, pool: Node) -> bool:
    """Moves the ReLU before a pooling behind it; returns whether that was possible.

    Both are monotone, so `max(relu(x)) = relu(max(x))`, bit by bit. The gradients are equal, too: a positive largest
    number is the first of the largest in either order, and otherwise the ReLU's gradient is zero.
    """
    relu, pooled = operand_at(pool), result_part(pool, 0)
    gated = _gradient_gate(relu)
    if relu.target is not aten.relu.default or gated is None or pooled is None:
        return False
    spread = operand_at(gated)
    if not _is_gradient(spread, pool) or set(relu.users) != {pool, spread, gated} or set(spread.users) != {gated}:
        return False
    for user in (pool, spread):
        user.replace_input_with(relu, operand_at(relu))
    with graph.graph.inserting_after(pooled):
        after = graph.graph.call_function(aten.relu.default, (pooled,))
    after.meta["val"] = pooled.meta["val"]
    pooled.replace_all_uses_with(after, delete_user_cb=lambda user: user is not after)
    gradient = operand_at(spread)
    spread.replace_input_with(gradient, insert_operations(graph, spread, _gate_gradient, gradient, after))
    replace_node(graph, gated, spread)
    graph.graph.erase_node(relu)
    return True


def _gradient_gate(relu: Node) -> Node | None:
    """Returns the node of the ReLU's gradient; None if there is none."""
    gates = (user for user in relu.users if user.target is aten.threshold_backward.default and operand_at(user, 2) == 0)
    return next(gates, None)


def _is_gradient(node: Node, pool: Node) -> bool:
    """Whether `node` is the gradient of the pooling."""
    backward = node.target is aten.max_pool2d_with_indices_backward.default
    return backward and operand_at(node, 1) is operand_at(pool) and operand_at(node, -1) is result_part(pool, 1)


def _gate_gradient(gradient: Tensor, output: Tensor) -> Tensor:
    return aten.threshold_backward.default(gradient, output, 0)


def _sum_by_filter(gradient: Tensor) -> Tensor:
    """(samples, filters, height, width) -> (filters,)."""
    return gradient.sum((2, 3)).sum(0)


def _are_only_users(pool: Node, forward: Node, spread: Node, backward: Node) -> bool:
    """Whether only the gradients use the results of convolution and pooling, and the image needs no gradient."""
    pool_input, places, gated = operand_at(pool), result_part(pool, 1), operand_at(backward)
    return (
        set(forward.users) == ({pool, spread} if pool_input is forward else {pool_input})
        and places is not None
        and set(places.users) == {spread}
        and set(gated.users) == {backward}
        and backward.target is aten.convolution_backward.default
        and [operand_at(backward, place) for place in (1, 2)] == [operand_at(forward, place) for place in (0, 1)]
        and not argument_named(backward, "output_mask")[0]
    )


def _sum_by_image(gradient: Tensor) -> bool:
    """Whether to sum image by image: on a CPU that uses its caches; a GPU has enough cores for all images at once."""
    return gradient.device.type == "cpu"


class _Convolution:
    """One convolution whose result is pooled in adjacent windows."""

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
        """(samples, channels, height, width) -> (down, across, samples, channels, ...), with windows `down` rows and
        `across` columns apart: numbers at the same place of different windows are adjacent in memory.
        """
        samples, channels, height, width = image.shape
        (above, left), (down, across) = self.padding, (self.down, self.across)
        below, right = above + -(height + 2 * above) % down, left + -(width + 2 * left) % across
        padded = functional.pad(image, (left, right, above, below))
        rows, columns = padded.shape[2] // down, padded.shape[3] // across
        views = padded.view(samples, channels, rows, down, columns, across).permute(3, 5, 0, 1, 2, 4).contiguous()
        # as_strided makes Inductor write the padded image to memory; it would recompute the padding at each use.
        return views.as_strided(views.shape, views.stride())

    def largest(self, views: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the pooled convolution, (samples, filters, rows, columns), and the places of the largest numbers."""
        values = []
        for place in self.places:
            terms = (
                self._windows(views, place, at) * weight[:, at[0], at[1], at[2], None, None] for at in self.weights
            )
            value = reduce(add, terms)
            values.append(value if bias is None else value + bias[:, None, None])
        return elementwise_maximum(values)

    def gradient(self, gradient: Tensor, place: Tensor, views: Tensor) -> Tensor:
        """Returns the weights' gradient from the pooled result's gradient."""
        image_by_image, by_weight = _sum_by_image(gradient), []
        for at in self.weights:
            inputs = [self._windows(views, place, at) for place in self.places]
            chosen = inputs[-1]
            for number in reversed(range(len(inputs) - 1)):
                chosen = torch.where(place == number, inputs[number], chosen)
            by_weight.append((gradient * chosen).sum((2, 3) if image_by_image else (0, 2, 3)))
        total = torch.stack(by_weight)
        return (total.sum(1) if image_by_image else total).T.contiguous().view(self.filters, self.channels, *self.size)

    def _windows(self, views: Tensor, place: tuple[int, int], weight: tuple[int, int, int]) -> Tensor:
        """Returns a weight's inputs at a place of each window: (samples, 1, rows, columns)."""
        channel, down, across = weight
        row = place[0] * self.stride[0] + down * self.dilation[0]
        column = place[1] * self.stride[1] + across * self.dilation[1]
        view = views[row % self.down, column % self.across, :, channel : channel + 1]
        row, column = row // self.down, column // self.across
        return view[:, :, row : row + self.height, column : column + self.width]
