"""Cost formulas of matrix products, convolutions, attention and recurrent layers: operators dominated by arithmetic.

The FLOPs are those of the products, as in `torch.utils.flop_counter`: the bias isn't counted, and causal attention
counts as the full product.
"""

from __future__ import annotations

from math import prod

from hotloop.profiler.costs.op_cost import Formula, OpCall, UncountableCall


def _matrices(left: int, right: int, *also_read: int) -> Formula:
    """Counts (m, k) @ (k, n), or a batch of such products; `also_read` are positions of further inputs."""

    def count(call: OpCall) -> tuple[float, float]:
        *batch, m, k = call.shape(left)
        *_, n = call.shape(right)
        out = prod(batch) * m * n
        return 2 * out * k, call.size(left, right, *also_read) + out * call.item(left)

    return count


def _grouped_mm(call: OpCall) -> tuple[float, float]:
    """Counts a grouped product.

    With one 3-d matrix, the groups are rows (m, k) or columns (k, n). With two 2-d matrices, the groups are terms along
    k. The ends of the groups are at position 2. Two 3-d matrices are a batch.
    """
    left, right = call.shape(0), call.shape(1)
    *_, m, k = left
    n = right[-1]
    stacked = len(left) == len(right)
    groups = (call.shape(2) if len(left) == 2 else left)[0] if stacked else 1
    products = groups if len(left) == 3 and stacked else 1
    return 2 * products * m * k * n, call.size(0, 1, 2) + groups * m * n * call.item(0)


def _vector(matrix: int, vector: int, *also_read: int) -> Formula:
    def count(call: OpCall) -> tuple[float, float]:
        m, k = call.shape(matrix)
        return 2 * m * k, call.size(matrix, vector, *also_read) + m * call.item(matrix)

    return count


def _dot(call: OpCall) -> tuple[float, float]:
    return 2 * call.count(0), call.size(0, 1) + call.item(0)


def _spatial(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _per_dimension(values: list[int], dims: int) -> list[int]:
    return list(values) * dims if len(values) == 1 else list(values)


def _convolution(call: OpCall) -> tuple[float, float]:
    """Counts a convolution. Weights: (O, C / groups, ...), transposed (C, O / groups, ...)."""
    image, weight = call.shape(0), call.shape(1)
    transposed, groups = call.argument(6), call.argument(8)
    stride, padding, dilation = (_per_dimension(call.argument(position), len(image) - 2) for position in (3, 4, 5))
    if transposed:
        extra = _per_dimension(call.argument(7), len(image) - 2)
        out = [
            (size - 1) * s - 2 * p + d * (kernel - 1) + e + 1
            for size, kernel, s, p, d, e in zip(image[2:], weight[2:], stride, padding, dilation, extra, strict=True)
        ]
        channels, swept = weight[1] * groups, image[2:]
    else:
        out = [_spatial(*sizes) for sizes in zip(image[2:], weight[2:], stride, padding, dilation, strict=True)]
        channels, swept = weight[0], out
    written = image[0] * channels * prod(out)
    return 2 * image[0] * prod(swept) * prod(weight), call.size(0, 1, 2) + written * call.item(0)


def _convolution_backward(call: OpCall) -> tuple[float, float]:
    """Counts the gradients of a convolution; each product is as large as that of the forward pass.

    Arguments: grad, input, weight, bias sizes, ..., transposed at 7, output mask at 10.
    """
    grad, image, weight = (call.shape(position) for position in range(3))
    swept = image[2:] if call.argument(7) else grad[2:]
    product = 2 * image[0] * prod(swept) * prod(weight)
    for_input, for_weight, for_bias = call.mask(10)

    read = call.size(0) + for_weight * call.size(1) + for_input * call.size(2)
    written = for_input * call.size(1) + for_weight * call.size(2) + for_bias * grad[1] * call.item(0)
    return product * (for_input + for_weight) + for_bias * prod(grad), read + written


def _attention_sizes(call: OpCall, first: int) -> tuple[int, int, int, int, int]:
    """Returns (batch * heads, queries, keys, key width, value width); query, key and value start at `first`."""
    *lead, queries, width = call.shape(first)
    keys, value = call.shape(first + 1)[-2], call.shape(first + 2)[-1]
    if len(lead) != 2:
        raise UncountableCall
    return prod(lead), queries, keys, width, value


def _attention(call: OpCall) -> tuple[float, float]:
    """Counts softmax(Q K^T) V, whose scores aren't written to memory."""
    heads, queries, keys, width, value = _attention_sizes(call, 0)
    out = heads * queries * value
    return 2 * heads * queries * keys * (width + value), call.size(0, 1, 2) + out * call.item(0)


def _attention_backward(call: OpCall) -> tuple[float, float]:
    """Counts the recomputed scores, then dP, dV, dQ and dK. Arguments: grad, query, key, value, ..."""
    heads, queries, keys, width, value = _attention_sizes(call, 1)
    out = heads * queries * value * call.item(0) if call.given(0) else 0
    flops = 2 * heads * queries * keys * (3 * width + 2 * value)
    return flops, call.size(0) + 2 * call.size(1, 2, 3) + out


def _recurrent_flops(sequence: int, weights: list[list[int]]) -> float:
    """Returns the FLOPs of products with the weight matrices; `sequence` is time steps times batch."""
    return 2.0 * sequence * sum(prod(weight) for weight in weights if len(weight) == 2)


def _rows(call: OpCall) -> int:
    """Returns time steps times batch of the input."""
    return prod(call.shape(0)[:-1])


def _recurrent_layer(call: OpCall) -> tuple[float, float]:
    """Counts `mkldnn_rnn_layer`, one direction of one layer: input, two matrices, two biases, states."""
    hidden = call.shape(2)[-1]
    out = _rows(call) * hidden
    flops = _recurrent_flops(_rows(call), [call.shape(1), call.shape(2)])
    return flops, call.size(*range(7)) + (out + 2 * call.count(5)) * call.item(0)


def _recurrent_layer_backward(call: OpCall) -> tuple[float, float]:
    flops = 2 * _recurrent_flops(_rows(call), [call.shape(1), call.shape(2)])
    return flops, call.size(*range(11)) + call.size(*range(7))


def _fused_recurrent(factor: int, *read: int) -> Formula:
    """Counts `_cudnn_rnn` or its backward: input, list of weights of the input's dtype, ..."""

    def count(call: OpCall) -> tuple[float, float]:
        weights = call.shapes_of(1)
        touched = call.size(0, *read) + sum(map(prod, weights)) * call.item(0)
        written = _rows(call) * _width(call) * call.item(0)
        return factor * _recurrent_flops(_rows(call), weights), factor * touched + written

    return count


def _width(call: OpCall) -> int:
    """Returns the output width of `_cudnn_rnn`: hidden or projected size, times the number of directions."""
    backward = len(call.shapes) > 16
    start = 11 if backward else 7
    hidden, projected = call.argument(start), call.argument(start + 1)
    return (projected or hidden) * (2 if call.argument(start + 6) else 1)


FORMULAS: dict[str, Formula] = {
    "mm": _matrices(0, 1),
    "bmm": _matrices(0, 1),
    "addmm": _matrices(1, 2, 0),
    "_addmm_activation": _matrices(1, 2, 0),
    "baddbmm": _matrices(1, 2, 0),
    "_grouped_mm": _grouped_mm,
    "mv": _vector(0, 1),
    "addmv": _vector(1, 2, 0),
    "dot": _dot,
    "vdot": _dot,
    "convolution": _convolution,
    "_convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_efficient_attention_backward": _attention_backward,
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward,
    "mkldnn_rnn_layer": _recurrent_layer,
    "mkldnn_rnn_layer_backward": _recurrent_layer_backward,
    "_cudnn_rnn": _fused_recurrent(1, 4, 5),
    "_cudnn_rnn_backward": _fused_recurrent(2, 4, 5),
}
