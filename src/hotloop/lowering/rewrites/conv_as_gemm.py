"""A first convolution of few channels as one matrix product, and its weights' gradient as another.

`out = w @ u`, where `u` has a row for each weight of a filter and a column for each place that it is put at (Chellapilla,
Puri and Simard: High performance convolutional neural networks for document processing, 2006). A convolution library
lays out its operands for many channels, and for one or three spends more on that than on arithmetic. Where the result
is pooled in windows that touch, columns are in the order of a window's places, so that each is contiguous.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional

from hotloop.lowering.rewrites.pool_as_max import SPREAD, spread_by_place
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

MOST_WEIGHTS = 32
"""Of one filter, so that `u` is not much larger than the image; 3 x 3 of three channels has 27."""

_PARAMETERS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


CACHED_BYTES = 1 << 20
"""Of `u` of several channels, which a core's own cache keeps between the products: where it doesn't, the library is faster
(0.6 to 0.9 times as fast at 2.5 to 14 MB of three channels)."""

MOST_BYTES = 64 << 20
"""Of `u` of one channel, for which libraries are slow at any size: with 10 or 32 filters steps of 128 and 512 images of 28 x 28
were 1.2 to 1.8 times as fast with this alone, and 2 to 4 times with pooling as a maximum."""


def convolution_as_product(graph: GraphModule) -> int:
    """Wherever a convolution is of data, whose gradient nobody wants; returns how often."""
    return sum(_rewritten(graph, node) for node in calls(graph, aten.convolution.default))


def convolution_where_likely(graph: GraphModule) -> int:
    """Only where that is likely to be faster."""
    nodes = calls(graph, aten.convolution.default)
    return sum(_rewritten(graph, node) for node in nodes if _is_likely(value_of(node), value_of(operand(node, 1))))


def _is_likely(made: Tensor, filters: Tensor) -> bool:
    return likely(filters, made.numel() // max(1, made.shape[1]))


def likely(filters: Tensor, places: int) -> bool:
    """Whether a product is likely to be faster; `places` are those of all images that a filter is put at."""
    columns = filters[0].numel() * places * filters.element_size()
    return columns <= (MOST_BYTES if filters.shape[1] == 1 else CACHED_BYTES)


def _rewritten(graph: GraphModule, forward: Node) -> bool:
    gradients = calls(graph, aten.convolution_backward.default)
    backward = next((node for node in gradients if _is_gradient(node, forward)), None)
    if not _is_for(forward) or backward is None or argument(backward, "output_mask")[0]:
        return False
    image, weight, bias = (operand(forward, place) for place in range(3))
    gradient = operand(backward)
    spread = gradient.meta.get(SPREAD)
    how = _Convolution(forward, (1, 1) if spread is None else spread.size)
    columns = written(graph, forward, how.columns, image)
    given = [one for one in (columns, weight, bias) if one is not None]
    replaced(graph, forward, written(graph, forward, how.product, *given))
    if spread is None:
        placed = written(graph, backward, _by_filter, gradient)
    else:
        by_place = partial(spread_by_place, size=spread.size)
        placed = written(graph, backward, by_place, spread.gradient, spread.place)
    found = written(graph, backward, how.gradients, placed, columns)
    for place, by in enumerate(found, 1):
        result = part(backward, place)
        if result is not None:
            replaced(graph, result, by)
    dropped(graph, backward)
    return True


def _is_gradient(node: Node, forward: Node) -> bool:
    """Of this convolution, or of one that is the same: their columns are equal, so either's are right for both."""
    same_tensors = [operand(node, 1), operand(node, 2)] == [operand(forward), operand(forward, 1)]
    return same_tensors and all(argument(node, name) == argument(forward, name) for name in _PARAMETERS)


def _is_for(node: Node) -> bool:
    image, weight = value_of(operand(node)), value_of(operand(node, 1))
    plain = argument(node, "groups") == 1 and not argument(node, "transposed")
    usual = is_plain(image) and is_plain(value_of(node)) and weight.dtype == image.dtype
    return plain and usual and weight[0].numel() <= MOST_WEIGHTS


class _Convolution:
    """One convolution, with its columns in the order of the windows that follow it."""

    def __init__(self, node: Node, window: tuple[int, int]) -> None:
        self.filters, self.channels, *self.size = value_of(operand(node, 1)).shape
        self.samples, _, self.height, self.width = value_of(node).shape
        self.stride, self.padding, self.dilation = (
            pair(argument(node, name)) for name in ("stride", "padding", "dilation")
        )
        self.rows, self.across = window

    def columns(self, image: Tensor) -> Tensor:
        """(samples, channels, height, width) -> (weights of a filter, places)."""
        padded = functional.pad(image, (self.padding[1],) * 2 + (self.padding[0],) * 2).contiguous()
        sample, channel, down, right = padded.stride()
        (rows, across), (step, side) = (self.rows, self.across), self.stride
        shape = (self.channels, *self.size, rows, across, self.samples, self.height // rows, self.width // across)
        strides = (
            channel,
            down * self.dilation[0],
            right * self.dilation[1],
            down * step,
            right * side,
            sample,
            down * step * rows,
            right * side * across,
        )
        return padded.as_strided(shape, strides).reshape(self.channels * self.size[0] * self.size[1], -1)

    def product(self, columns: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The convolution, (samples, filters, height, width)."""
        found = weight.reshape(self.filters, -1) @ columns
        if bias is not None:
            found = found + bias[:, None]
        shape = (
            self.filters,
            self.rows,
            self.across,
            self.samples,
            self.height // self.rows,
            self.width // self.across,
        )
        images = found.view(shape).permute(3, 0, 4, 1, 5, 2)
        return images.reshape(self.samples, self.filters, self.height, self.width).contiguous()

    def gradients(self, placed: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Those of weights and bias, of the result's gradient as (filters, places)."""
        return (placed @ columns.T).view(self.filters, self.channels, *self.size), placed.sum(1)


def _by_filter(gradient: Tensor) -> Tensor:
    return gradient.transpose(0, 1).reshape(gradient.shape[1], -1)
