"""Rewrites a first convolution of few channels as one matrix product, and its weights' gradient as another.

`out = w @ u`, where `u` has a row for each weight of a filter and a column for each position of the filter
(Chellapilla, Puri and Simard: High performance convolutional neural networks for document processing, 2006). A
convolution library lays out its operands for many channels, which for one or three channels takes longer than the
arithmetic.
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
"""Weights of one filter; limits the size of `u`. 3 x 3 of three channels has 27."""

_MOST_PARTS, _IN_PART = 64, 1024
"""Maximum number of products of the weights' gradient, and minimum number of positions in each: on two threads 2 and 4
times as fast as one product at 6,272 and 100,352 positions, and hardly less so at twice or half as many."""

_PARAMETERS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


def convolution_as_product(graph: GraphModule) -> int:
    """Rewrites convolutions of data, which need no gradient of the image; returns how often."""
    return sum(_rewrite(graph, node) for node in find_calls(graph, aten.convolution.default))


def _rewrite(graph: GraphModule, forward: Node) -> bool:
    gradients = find_calls(graph, aten.convolution_backward.default)
    backward = next((node for node in gradients if _is_gradient(node, forward)), None)
    is_rewritable = is_ordinary(forward) and fake_value(operand_at(forward, 1))[0].numel() <= MAX_WEIGHTS
    if not is_rewritable or backward is None or argument_named(backward, "output_mask")[0]:
        return False
    image, weight, bias = (operand_at(forward, place) for place in range(3))
    convolution = _Convolution(forward)
    columns = insert_operations(graph, forward, convolution.columns, image)
    operands = [operand for operand in (columns, weight, bias) if operand is not None]
    replace_node(graph, forward, insert_operations(graph, forward, convolution.product, *operands))
    gradient = operand_at(backward)
    weight_gradient, bias_gradient = result_part(backward, 1), result_part(backward, 2)
    if weight_gradient is not None:
        new = insert_operations(graph, backward, convolution.gradient, gradient, columns)
        replace_node(graph, weight_gradient, new)
    if bias_gradient is not None:
        replace_node(graph, bias_gradient, insert_operations(graph, backward, sum_by_filter, gradient))
    drop_node(graph, backward)
    return True


def _is_gradient(node: Node, forward: Node) -> bool:
    """Whether `node` is the gradient of this convolution, or of an equal one, whose columns are equal."""
    same_tensors = [operand_at(node, 1), operand_at(node, 2)] == [operand_at(forward), operand_at(forward, 1)]
    return same_tensors and all(argument_named(node, name) == argument_named(forward, name) for name in _PARAMETERS)


def is_ordinary(node: Node) -> bool:
    """Whether the node convolves plain images of one dtype, without groups."""
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
        """(samples, channels, height, width) -> (weights of a filter, positions)."""
        padded = functional.pad(image, (self.padding[1],) * 2 + (self.padding[0],) * 2).contiguous()
        sample, channel, down, right = padded.stride()
        shape = (self.channels, *self.size, self.samples, self.height, self.width)
        steps = down * self.dilation[0], right * self.dilation[1]
        strides = (channel, *steps, sample, down * self.stride[0], right * self.stride[1])
        return padded.as_strided(shape, strides).reshape(self.channels * self.size[0] * self.size[1], -1)

    def product(self, columns: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns the convolution, (samples, filters, height, width)."""
        result = weight.reshape(self.filters, -1) @ columns
        if bias is not None:
            result = result + bias[:, None]
        return result.view(self.filters, self.samples, self.height, self.width).transpose(0, 1).contiguous()

    def gradient(self, gradient: Tensor, columns: Tensor) -> Tensor:
        """Returns the weights' gradient.

        A library splits a product's rows and columns over threads, of which there are few here. A batch of products
        over parts of the positions uses all threads.
        """
        parts = _split_count(columns.shape[1])
        by_filter = gradient.transpose(0, 1).reshape(self.filters, parts, -1).transpose(0, 1)
        by_part = by_filter @ columns.view(len(columns), parts, -1).permute(1, 2, 0)
        return by_part.sum(0).view(self.filters, self.channels, *self.size)


def _split_count(places: int) -> int:
    """Returns the largest number of parts that divides the positions and leaves enough in each."""
    most = min(_MOST_PARTS, max(1, places // _IN_PART))
    return max(parts for parts in range(1, most + 1) if places % parts == 0)


def sum_by_filter(gradient: Tensor) -> Tensor:
    """(samples, filters, height, width) -> (filters,)."""
    return gradient.sum((2, 3)).sum(0)
