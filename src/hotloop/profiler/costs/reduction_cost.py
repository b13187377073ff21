"""Sums, normalisation, softmax, pooling and losses: each number is read, and takes part in few operations."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hotloop.profiler.costs.op_cost import INDEX_BYTES, Formula, OpCall, UncountableCall

# FLOPs for each number of the input. Statistics: a sum, then subtract, square and sum; then x̂ = (x - mean) * rstd, and
# x̂ * weight + bias. Backward: x̂ once more, the sums of dY and dY * x̂, then (dY - mean - x̂ * mean) * weight * rstd.
_NORM_FLOPS, _KNOWN_STATISTICS_FLOPS, _NORM_BACKWARD_FLOPS = 8, 4, 10
# Largest, subtract, exp, sum, divide; backward: multiply, sum, subtract, multiply.
_SOFTMAX_FLOPS, _SOFTMAX_BACKWARD_FLOPS = 5, 4


def _reduction(flops: int, result_bytes: int | None = None) -> Formula:
    """`sum(self, dims, keepdim)` and the like: a number for each row, of the input's dtype unless its bytes are said."""

    def count(call: OpCall) -> tuple[float, float]:
        out = prod(_remaining_dims(call.shape(0), call.arguments[1] if len(call.arguments) > 1 else None))
        return flops * call.count(0), call.size(0) + out * (result_bytes or call.item(0))

    return count


def _remaining_dims(shape: Sequence[int], dims: object) -> list[int]:
    """The dimensions that stay when `dims` are summed; a bool there belongs to another overload, which sums all."""
    if dims is None or isinstance(dims, bool) or dims == []:
        return []
    wanted = [dims] if isinstance(dims, int) else dims
    if not isinstance(wanted, list | tuple) or not all(isinstance(dim, int) for dim in wanted):
        raise UncountableCall
    summed = {dim % len(shape) for dim in wanted} if shape else set()
    return [size for place, size in enumerate(shape) if place not in summed]


def _norm(call: OpCall) -> tuple[float, float]:
    """`linalg_vector_norm(self, ord, dim)`."""
    out = prod(_remaining_dims(call.shape(0), call.arguments[2] if len(call.arguments) > 2 else None))
    return 2 * call.count(0), call.size(0) + out * call.item(0)


def _same_shape(flops: int, *read: int) -> Formula:
    """Of tensors at these places, one of the first one's shape is made."""

    def count(call: OpCall) -> tuple[float, float]:
        return flops * call.count(read[0]), call.size(*read) + call.size(read[0])

    return count


def _batch_norm(call: OpCall) -> tuple[float, float]:
    """input, weight, bias, running mean and variance, training; written are these two and two of their size for backward."""
    training = bool(call.argument(5))
    flops = (_NORM_FLOPS if training else _KNOWN_STATISTICS_FLOPS) * call.count(0)
    channels = call.shape(0)[1] * call.item(0)
    return flops, 2 * call.size(0) + call.size(1, 2, 3, 4) + training * (2 * channels + call.size(3, 4))


def _batch_norm_backward(grad: int, image: int, weight: int) -> Formula:
    """Gradients of the input, of weight and of bias."""

    def count(call: OpCall) -> tuple[float, float]:
        channels = call.shape(image)[1] * call.item(image)
        return _NORM_BACKWARD_FLOPS * call.count(image), call.size(grad, image) + call.size(image) + 5 * channels

    return count


def _layer_norm(weight: int, bias: int) -> Formula:
    def count(call: OpCall) -> tuple[float, float]:
        return _NORM_FLOPS * call.count(0), 2 * call.size(0) + call.size(weight, bias)

    return count


def _layer_norm_backward(*read: int) -> Formula:
    """grad, input, statistics, weight (last): gradients of the input, of weight and of bias."""

    def count(call: OpCall) -> tuple[float, float]:
        return _NORM_BACKWARD_FLOPS * call.count(1), call.size(*read) + call.size(1) + 2 * call.size(read[-1])

    return count


def _rms_norm(call: OpCall) -> tuple[float, float]:
    """x / sqrt(mean(x^2) + eps) * weight."""
    return 4 * call.count(0), 2 * call.size(0) + call.size(2)


def _rms_norm_backward(call: OpCall) -> tuple[float, float]:
    return 8 * call.count(1), call.size(0, 1, 3, 4) + call.size(1) + call.size(4)


def _windows(call: OpCall) -> list[int]:
    """The kernel of a pooling over two dimensions."""
    kernel = list(call.argument(1))
    return kernel * 2 if len(kernel) == 1 else kernel


def _pooled_numbers(call: OpCall, dilation: int | None, ceil_mode: int) -> int:
    """Numbers that come out of pooling two dimensions; kernel at 1, stride at 2 and padding at 3."""
    kernel = _windows(call)
    stride = list(call.arguments[2] or kernel)
    padding, spread = list(call.argument(3)), list(call.argument(dilation)) if dilation else [1]
    round_up = bool(call.argument(ceil_mode))
    image = call.shape(0)
    sides = []
    for place in range(2):
        step, pad, gap = (values[place % len(values)] for values in (stride, padding, spread))
        free = image[place - 2] + 2 * pad - gap * (kernel[place] - 1) - 1
        side = (free + step - 1 if round_up else free) // step + 1
        sides.append(side - (round_up and (side - 1) * step >= image[place - 2] + pad))
    return prod(image[:-2]) * prod(sides)


def _max_pool(call: OpCall) -> tuple[float, float]:
    out = _pooled_numbers(call, 4, 5)
    return out * prod(_windows(call)), call.size(0) + out * (call.item(0) + INDEX_BYTES)


def _max_pool_backward(call: OpCall) -> tuple[float, float]:
    """grad and indices are read; the gradient of the input at 1 is filled with zeros, then added to."""
    return call.count(0), call.size(0, 7) + call.size(1)


def _average_pool(call: OpCall) -> tuple[float, float]:
    out = _pooled_numbers(call, None, 4)
    return out * prod(_windows(call)), call.size(0) + out * call.item(0)


def _average_pool_backward(call: OpCall) -> tuple[float, float]:
    kernel = list(call.argument(2))
    return call.count(0) * prod(kernel * 2 if len(kernel) == 1 else kernel), call.size(0, 1)


def _adaptive_pool(call: OpCall) -> tuple[float, float]:
    sides = list(call.argument(1))
    out = prod(call.shape(0)[:-2]) * prod(sides)
    return call.count(0), call.size(0) + out * call.item(0)


def _adaptive_pool_backward(call: OpCall) -> tuple[float, float]:
    return call.count(1), call.size(0, 1)


def _nll_loss(call: OpCall) -> tuple[float, float]:
    """`nll_loss_forward(log probabilities, target, weight, reduction)`: one number for each target."""
    targets = call.count(1)
    return targets, targets * call.item(0) + call.size(1) + (targets if call.argument(3) == 0 else 1) * call.item(0)


def _nll_loss_backward(call: OpCall) -> tuple[float, float]:
    """A gradient of the log probabilities' shape, at 1, of zeros but for the targets."""
    return call.count(2), call.size(0, 2) + call.size(1)


def _loss(flops: int, reduction: int) -> Formula:
    """Of the tensors at 0 and 1, and a weight at 2 where the reduction stands behind one."""

    def count(call: OpCall) -> tuple[float, float]:
        reduced = call.argument(reduction) != 0
        out = 1 if reduced else call.count(0)
        return (flops + reduced) * call.count(0), call.size(*range(reduction)) + out * call.item(0)

    return count


def _loss_backward(flops: int, *read: int) -> Formula:
    """A gradient of the shape of the tensor at 1."""

    def count(call: OpCall) -> tuple[float, float]:
        return flops * call.count(1), call.size(*read) + call.size(1)

    return count


FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(["sum", "mean", "prod", "nansum", "amax", "amin"], _reduction(1)),
    **dict.fromkeys(["all", "any"], _reduction(1, 1)),
    **dict.fromkeys(["var", "std"], _reduction(4)),
    **dict.fromkeys(["argmax", "argmin"], _reduction(1, INDEX_BYTES)),
    "logsumexp": _reduction(4),
    "linalg_vector_norm": _norm,
    "cumsum": _same_shape(1, 0),
    "_softmax": _same_shape(_SOFTMAX_FLOPS, 0),
    "_log_softmax": _same_shape(_SOFTMAX_FLOPS, 0),
    "_softmax_backward_data": _same_shape(_SOFTMAX_BACKWARD_FLOPS, 0, 1),
    "_log_softmax_backward_data": _same_shape(_SOFTMAX_BACKWARD_FLOPS, 0, 1),
    "native_batch_norm": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "cudnn_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward(0, 1, 2),
    "cudnn_batch_norm_backward": _batch_norm_backward(1, 0, 2),
    "native_layer_norm": _layer_norm(2, 3),
    "native_layer_norm_backward": _layer_norm_backward(0, 1, 3, 4, 5),
    "native_group_norm": _layer_norm(1, 2),
    "native_group_norm_backward": _layer_norm_backward(0, 1, 2, 3, 4),
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "max_pool2d_with_indices": _max_pool,
    "max_pool2d_with_indices_backward": _max_pool_backward,
    "avg_pool2d": _average_pool,
    "avg_pool2d_backward": _average_pool_backward,
    "_adaptive_avg_pool2d": _adaptive_pool,
    "_adaptive_avg_pool2d_backward": _adaptive_pool_backward,
    "nll_loss_forward": _nll_loss,
    "nll_loss2d_forward": _nll_loss,
    "nll_loss_backward": _nll_loss_backward,
    "nll_loss2d_backward": _nll_loss_backward,
    "mse_loss": _loss(2, 2),
    "binary_cross_entropy": _loss(6, 3),
    "smooth_l1_loss": _loss(4, 2),
    "huber_loss": _loss(4, 2),
    "mse_loss_backward": _loss_backward(3, 0, 1, 2),
    "binary_cross_entropy_backward": _loss_backward(5, 0, 1, 2, 3),
    "smooth_l1_loss_backward": _loss_backward(4, 0, 1, 2),
    "huber_loss_backward": _loss_backward(4, 0, 1, 2),
}
