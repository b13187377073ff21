"""A first convolution of few channels as one matrix product, and its weights' gradient as another.

`out = w @ u`, where `u` has a row for each weight of a filter and a column for each place that it is put at (Chellapilla,
Puri and Simard: High performance convolutional neural networks for document processing, 2006). A convolution library
lays out its operands for many channels, and for one or three spends more on that than on arithmetic.
"""

from __future__ import annotations

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

MAX_WEIGHTS = 32
"""Of one filter, so that `u` is not much larger than the image; 3 x 3 of three channels has 27."""

_MOST_PARTS, _IN_PART = 64, 1024
"""Products that the gradient of the weights is put together from, and the places in each: at 6,272 and 100,352 places on two
threads 2 and 4 times as fast as a single one, and hardly less so at twice or half as many."""

_PARAMETERS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


def convolution_as_product(graph: GraphModule) -> int:
    """Wherever a convolution is of data, whose gradient nobody wants; returns how often."""
    return sum(_rewrite(graph, node) for node in find_calls(graph, aten.convolution.default))


def _rewrite(graph: GraphModule, forward: Node) -> bool:
    gradients = find_calls(graph, aten.convolution_backward.default)
    backward = next((node for node in gradients if _is_gradient(node, forward)), None)
    if not _is_rewritable(forward) or backward is None or argument_named(backward, "output_mask")[0]:
        return False
    image, weight, bias = (operand_at(forward, place) for place in range(3))
    how = _Convolution(forward)
    columns = insert_operations(graph, forward, how.columns, image)
    given = [one for one in (columns, weight, bias) if one is not None]
    replace_node(graph, forward, insert_operations(graph, forward, how.product, *given))
    gradient = operand_at(backward)
    of_weight, of_bias = result_part(backward, 1), result_part(backward, 2)
    if of_weight is not None:
        replace_node(graph, of_weight, insert_operations(graph, backward, how.gradient, gradient, columns))
    if of_bias is not None:
        replace_node(graph, of_bias, insert_operations(graph, backward, sum_by_filter, gradient))
    drop_node(graph, backward)
    return True


def _is_gradient(node: Node, forward: Node) -> bool:
    """Of this convolution, or of one that is the same: their columns are equal, so either's are right for both."""
    same_tensors = [operand_at(node, 1), operand_at(node, 2)] == [operand_at(forward), operand_at(forward, 1)]
    return same_tensors and all(argument_named(node, name) == argument_named(forward, name) for name in _PARAMETERS)


def _is_rewritable(node: Node) -> bool:
    return is_ordinary(node) and fake_value(operand_at(node, 1))[0].numel() <= MAX_WEIGHTS


def is_ordinary(node: Node) -> bool:
    """Whether it convolves images of one plain kind, all channels with all."""
    image, weight = fake_value(operand_at(node)), fake_value(operand_at(node, 1))
    plain = argument_named(node, "groups") == 1 and not argument_named(node, "transposed")
    return plain and is_plain(image) and is_plain(fake_value(node)) and weight.dtype == image.dtype


class _Convolution:
    def __init__(self, node: Node) -> None:
        self.filters, self.channels, *self.size = fake_value(operand_at(node, 1)).shape
        self.samples, _, self.height, self.width = fake_value(node).shape
        self.stride, self.padding, self.dilation = (
            as_pair(argument_named(node, name)) for name in ("stride", "padding", "dilation")
        )

    def columns(self, image: Tensor) -> Tensor:
        """(samples, channels, height, width) -> (weights of a filter, places)."""
        padded = functional.pad(image, (self.padding[1],) * 2 + (self.padding[0],) * 2).contiguous()
        sample, channel, down, right = padded.stride()
        shape = (self.channels, *self.size, self.samples, self.height, self.width)
        steps = down * self.dilation[0], right * self.dilation[1]
        strides = (channel, *steps, sample, down * self.stride[0], right * self.stride[1])
        return padded.as_strided(shape, strides).reshape(self.channels * self.size[0] * self.size[1], -1)

    def product(self, columns: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The convolution, (samples, filters, height, width)."""
        found = weight.reshape(self.filters, -1) @ columns
        if bias is not None:
            found = found + bias[:, None]
        return found.view(self.filters, self.samples, self.height, self.width).transpose(0, 1).contiguous()

    def gradient(self, gradient: Tensor, columns: Tensor) -> Tensor:
        """That of the weights, of the result's.

        A library gives the threads parts of a product's rows and columns, of which there are few here: it gets parts of
        the places instead, as a batch of products.
        """
        parts = _split_count(columns.shape[1])
        by_filter = gradient.transpose(0, 1).reshape(self.filters, parts, -1).transpose(0, 1)
        by_part = by_filter @ columns.view(len(columns), parts, -1).permute(1, 2, 0)
        return by_part.sum(0).view(self.filters, self.channels, *self.size)


def _split_count(places: int) -> int:
    """Into how many the places are split: as many as leave each enough of them."""
    return max(
        parts for parts in range(1, _MOST_PARTS + 1) if places % parts == 0 and parts <= max(1, places // _IN_PART)
    )


def sum_by_filter(gradient: Tensor) -> Tensor:
    """(samples, filters, height, width) -> (filters,)."""
    return gradient.sum((2, 3)).sum(0)
