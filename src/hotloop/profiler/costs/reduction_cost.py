"""Cost formulas of reductions, normalization, softmax, pooling and losses: few operations per element that is read."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hotloop.profiler.costs.op_cost import INDEX_BYTES, Formula, OpCall, UncountableCall

# FLOPs per element of the input. Statistics: a sum, then subtract, square and sum; then x̂ = (x - mean) * rstd and
# x̂ * weight + bias. Backward: x̂ again, the sums of dY and dY * x̂, then (dY - mean - x̂ * mean) * weight * rstd.
_NORM_FLOPS, _KNOWN_STATISTICS_FLOPS, _NORM_BACKWARD_FLOPS = 8, 4, 10
# Forward: maximum, subtract, exp, sum, divide; backward: multiply, sum, subtract, multiply.
_SOFTMAX_FLOPS, _SOFTMAX_BACKWARD_FLOPS = 5, 4


def _reduction(flops: int, result_bytes: int | None = None) -> Formula:
    """Counts `sum(self, dims, keepdim)` and the like; results have the input's dtype unless `result_bytes` is given."""

    def count(call: OpCall) -> tuple[float, float]:
        out = prod(_remaining_dims(call.shape(0), call.arguments[1] if len(call.arguments) > 1 else None))
        return flops * call.count(0), call.size(0) + out * (result_bytes or call.item(0))

    return count


def _remaining_dims(shape: Sequence[int], dims: object) -> list[int]:
    """Returns the sizes that aren't reduced. A bool in place of dims is an overload that reduces all dimensions."""
    if dims is None or isinstance(dims, bool) or dims == []:
        return []
    dim_list = [dims] if isinstance(dims, int) else dims
    if not isinstance(dim_list, list | tuple) or not all(isinstance(dim, int) for dim in dim_list):
        raise UncountableCall
    reduced = {dim % len(shape) for dim in dim_list} if shape else set()
    return [size for index, size in enumerate(shape) if index not in reduced]


def _norm(call: OpCall) -> tuple[float, float]:
    """Counts `linalg_vector_norm(self, ord, dim)`."""
    out = prod(_remaining_dims(call.shape(0), call.arguments[2] if len(call.arguments) > 2 else None))
    return 2 * call.count(0), call.size(0) + out * call.item(0)


def _same_shape(flops: int, *read: int) -> Formula:
    """Counts an operator that reads the tensors at `read` and writes the shape of the first of them."""

    def count(call: OpCall) -> tuple[float, float]:
        return flops * call.count(read[0]), call.size(*read) + call.size(read[0])

    return count


def _batch_norm(call: OpCall) -> tuple[float, float]:
    """Counts batch normalization: input, weight, bias, running mean, running variance, training.

    In training, the running statistics and the saved statistics of the batch are written as well.
    """
    training = bool(call.argument(5))
    flops = (_NORM_FLOPS if training else _KNOWN_STATISTICS_FLOPS) * call.count(0)
    channels = call.shape(0)[1] * call.item(0)
    return flops, 2 * call.size(0) + call.size(1, 2, 3, 4) + training * (2 * channels + call.size(3, 4))


def _batch_norm_backward(grad: int, image: int, weight: int) -> Formula:
    """Counts the gradients of input, weight and bias."""

    def count(call: OpCall) -> tuple[float, float]:
        channels = call.shape(image)[1] * call.item(image)
        return _NORM_BACKWARD_FLOPS * call.count(image), call.size(grad, image) + call.size(image) + 5 * channels

    return count


def _layer_norm(weight: int, bias: int) -> Formula:
    def count(call: OpCall) -> tuple[float, float]:
        return _NORM_FLOPS * call.count(0), 2 * call.size(0) + call.size(weight, bias)

    return count


def _layer_norm_backward(*read: int) -> Formula:
    """Counts the gradients of input, weight and bias. Arguments: grad, input, statistics, weight (last)."""

    def count(call: OpCall) -> tuple[float, float]:
        return _NORM_BACKWARD_FLOPS * call.count(1), call.size(*read) + call.size(1) + 2 * call.size(read[-1])

    return count


def _kernel_sizes(call: OpCall) -> list[int]:
    """Returns the kernel sizes of a 2-d pooling."""
    kernel = list(call.argument(1))
    return kernel * 2 if len(kernel) == 1 else kernel


def _pooled_elements(call: OpCall, dilation: int | None, ceil_mode: int) -> int:
    """Returns the number of outputs of a 2-d pooling; kernel at 1, stride at 2, padding at 3."""
    kernel = _kernel_sizes(call)
    stride = list(call.arguments[2] or kernel)
    padding, dilations = list(call.argument(3)), list(call.argument(dilation)) if dilation else [1]
    round_up = bool(call.argument(ceil_mode))
    image = call.shape(0)
    sides = []
    for axis in range(2):
        step, pad, gap = (values[axis % len(values)] for values in (stride, padding, dilations))
        free = image[axis - 2] + 2 * pad - gap * (kernel[axis] - 1) - 1
        side = (free + step - 1 if round_up else free) // step + 1
        sides.append(side - (round_up and (side - 1) * step >= image[axis - 2] + pad))
    return prod(image[:-2]) * prod(sides)


def _max_pool(call: OpCall) -> tuple[float, float]:
    out = _pooled_elements(call, 4, 5)
    return out * prod(_kernel_sizes(call)), call.size(0) + out * (call.item(0) + INDEX_BYTES)


def _average_pool(call: OpCall) -> tuple[float, float]:
    out = _pooled_elements(call, None, 4)
    return out * prod(_kernel_sizes(call)), call.size(0) + out * call.item(0)


def _average_pool_backward(call: OpCall) -> tuple[float, float]:
    kernel = list(call.argument(2))
    return call.count(0) * prod(kernel * 2 if len(kernel) == 1 else kernel), call.size(0, 1)


def _adaptive_pool(call: OpCall) -> tuple[float, float]:
    sides = list(call.argument(1))
    out = prod(call.shape(0)[:-2]) * prod(sides)
    return call.count(0), call.size(0) + out * call.item(0)


def _nll_loss(call: OpCall) -> tuple[float, float]:
    """Counts `nll_loss_forward(log probabilities, target, weight, reduction)`: one element per target."""
    targets = call.count(1)
    return targets, targets * call.item(0) + call.size(1) + (targets if call.argument(3) == 0 else 1) * call.item(0)


def _loss(flops: int, reduction: int) -> Formula:
    """Counts a loss of the tensors at 0 and 1, and of the weight at 2 if the reduction follows it."""

    def count(call: OpCall) -> tuple[float, float]:
        reduced = call.argument(reduction) != 0
        out = 1 if reduced else call.count(0)
        return (flops + reduced) * call.count(0), call.size(*range(reduction)) + out * call.item(0)

    return count


def _loss_backward(flops: int, *read: int) -> Formula:
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
    "_fused_rms_norm": lambda call: (4 * call.count(0), 2 * call.size(0) + call.size(2)),
    "_fused_rms_norm_backward": lambda call: (8 * call.count(1), call.size(0, 1, 3, 4) + call.size(1) + call.size(4)),
    "max_pool2d_with_indices": _max_pool,
    "max_pool2d_with_indices_backward": lambda call: (call.count(0), call.size(0, 7) + call.size(1)),
    "avg_pool2d": _average_pool,
    "avg_pool2d_backward": _average_pool_backward,
    "_adaptive_avg_pool2d": _adaptive_pool,
    "_adaptive_avg_pool2d_backward": lambda call: (call.count(1), call.size(0, 1)),
    "nll_loss_forward": _nll_loss,
    "nll_loss2d_forward": _nll_loss,
    **dict.fromkeys(
        ["nll_loss_backward", "nll_loss2d_backward"], lambda call: (call.count(2), call.size(0, 2) + call.size(1))
    ),
    "mse_loss": _loss(2, 2),
    "binary_cross_entropy": _loss(6, 3),
    "smooth_l1_loss": _loss(4, 2),
    "huber_loss": _loss(4, 2),
    "mse_loss_backward": _loss_backward(3, 0, 1, 2),
    "binary_cross_entropy_backward": _loss_backward(5, 0, 1, 2, 3),
    "smooth_l1_loss_backward": _loss_backward(4, 0, 1, 2),
    "huber_loss_backward": _loss_backward(4, 0, 1, 2),
}
