"""The cost of an operator, FLOPs and bytes by its name and the shapes of its inputs, and the least time for that cost.

Elementwise operators, reductions and normalization are dominated by memory traffic: FLOPs are those of the formula for
one element, and a function such as `exp` counts as one. Views, copies and gathers do no arithmetic. Products,
convolutions, attention and recurrent layers have the FLOPs of `torch.utils.flop_counter`: the bias isn't counted, and
causal attention counts as the full product.

The least time is the roofline at the measured limits of a device. Williams, Waterman and Patterson, "Roofline: an
insightful visual performance model for multicore architectures", Communications of the ACM 52(4), 2009: arithmetic and
memory traffic overlap, so the slower of them sets the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, Self

from hotloop.core.number_formats import operator_class
from hotloop.core.records.hardware import Device
from hotloop.core.records.profile import HardwareLimits, ModuleTime, OperatorTime, Profile

# Bytes per element, by dtype name: torch's names and the C++ names in the profiler's records.
_ITEM_BYTES = {
    1: "bool uint8 int8 unsigned_char signed_char c10::Float8_e4m3fn c10::Float8_e5m2 float8_e4m3fn float8_e5m2",
    2: "float16 bfloat16 half int16 uint16 short c10::Half c10::BFloat16",
    4: "float32 float int32 uint32 int",
    8: "float64 double int64 uint64 long long_int long_long complex64 c10::complex<float>",
    16: "complex128 c10::complex<double>",
}
_BYTES_OF = {name.replace("_", " "): size for size, names in _ITEM_BYTES.items() for name in names.split()}
_BYTES_OF |= {name: size for size, names in _ITEM_BYTES.items() for name in names.split()}
INDEX_BYTES = 8  # torch's index tensors are int64
TENSOR_LIST = "TensorList"
NO_TENSOR = ("", "Scalar", "ScalarList", "None")


class UncountableCall(Exception):
    """The cost of a call is unknown: a shape, a dtype or an argument that the formula needs is missing."""


@dataclass(frozen=True)
class OpCost:
    """The least work of an operator.

    Attributes:
        flops: arithmetic operations. A multiplication with an addition counts as two, as in `Hardware`; a function of
            one element, such as `exp`, counts as one.
        bytes: memory traffic if each tensor is read once and written once; None if a dtype is unknown.
    """

    flops: float
    bytes: float | None

    def __add__(self, other: Self) -> OpCost:
        bytes_ = None if self.bytes is None or other.bytes is None else self.bytes + other.bytes
        return OpCost(self.flops + other.flops, bytes_)


@dataclass(frozen=True)
class OpCall:
    """The arguments of a call, by position in the operator's schema.

    Attributes:
        shapes: shapes of tensors; a list of shapes for a list of tensors; empty for other arguments.
        dtypes: dtypes of tensors, such as `float32` or the C++ name; `Scalar` and similar names for other arguments.
        arguments: values of the arguments that aren't tensors; None for tensors.
    """

    shapes: Sequence[Any]
    dtypes: Sequence[str]
    arguments: Sequence[Any]

    def shape(self, position: int) -> list[int]:
        if position >= len(self.shapes) or any(not isinstance(size, int) for size in self.shapes[position]):
            raise UncountableCall
        return list(self.shapes[position])

    def shapes_of(self, position: int) -> list[list[int]]:
        if position >= len(self.shapes) or not all(isinstance(shape, list | tuple) for shape in self.shapes[position]):
            raise UncountableCall
        return [list(shape) for shape in self.shapes[position]]

    def is_list(self, position: int) -> bool:
        return any(isinstance(shape, list | tuple) for shape in self.shapes[position])

    def count(self, position: int) -> int:
        """Returns the number of elements of a tensor; 1 for a tensor without dimensions."""
        return prod(self.shape(position))

    def given(self, position: int) -> bool:
        """Returns whether the argument is a tensor. If no dtype is recorded, only tensors have a shape."""
        if position < len(self.dtypes) and self.dtypes[position] not in NO_TENSOR:
            return True
        return position >= len(self.dtypes) and position < len(self.shapes) and bool(self.shapes[position])

    def item(self, position: int) -> float:
        """Returns the bytes per element of a tensor; NaN if its dtype is unknown."""
        name = self.dtypes[position] if position < len(self.dtypes) else ""
        return _BYTES_OF.get(name.removeprefix("torch."), math.nan)

    def is_floating(self, position: int) -> bool:
        return any(
            word in "".join(self.dtypes[position : position + 1]).lower()
            for word in ("float", "double", "half", "complex")
        )

    def size(self, *positions: int) -> float:
        """Returns the bytes of several tensors together; arguments that aren't tensors count as 0."""
        return sum(self.count(position) * self.item(position) for position in positions if self.given(position))

    def argument(self, position: int) -> Any:
        """Returns the value of an argument that isn't a tensor.

        Raises:
            UncountableCall: the value isn't recorded.
        """
        if position >= len(self.arguments) or self.arguments[position] is None:
            raise UncountableCall
        return self.arguments[position]

    def mask(self, position: int) -> list[bool]:
        """Returns which gradients the call computes, from its output mask."""
        return [bool(is_computed) for is_computed in self.argument(position)]

    @property
    def tensors(self) -> list[int]:
        """Positions of the tensors, without lists of tensors."""
        positions = range(max(len(self.shapes), len(self.dtypes)))
        return [
            position
            for position in positions
            if self.given(position) and self.dtypes[position : position + 1] != [TENSOR_LIST]
        ]


Formula = Callable[[OpCall], tuple[float, float]]
"""Maps a call to (FLOPs, bytes); bytes are NaN if a dtype is unknown. Raises `UncountableCall`."""


def broadcast(*shapes: Sequence[int]) -> list[int]:
    """Returns the shape that shapes broadcast to; the shapes must be compatible."""
    length = max(map(len, shapes), default=0)
    padded = [[1] * (length - len(shape)) + list(shape) for shape in shapes]
    return [next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True)]


# FLOPs per element of the result.
_ARITHMETIC = {
    1: "add sub rsub mul div neg abs reciprocal square sqrt rsqrt exp expm1 log log1p log2 log10 sin cos tan tanh erf"
    " erfinv pow relu relu6 maximum minimum fmax fmin clamp clamp_min clamp_max floor ceil round sign floor_divide"
    " remainder fmod bitwise_and bitwise_or bitwise_not bitwise_xor atan atan2 asin acos sinh cosh threshold",
    2: "leaky_relu hardtanh celu elu selu softplus threshold_backward _prelu_kernel hardsigmoid hypot",
    3: "addcmul addcdiv lerp sigmoid logit tanh_backward sigmoid_backward leaky_relu_backward hardtanh_backward"
    " hardswish elu_backward softplus_backward hardsigmoid_backward",
    4: "silu gelu hardswish_backward",
    6: "mish silu_backward gelu_backward mish_backward",
}
_COMPARISON_OPS = (
    "eq ne lt le gt ge logical_and logical_or logical_not logical_xor isnan isinf isfinite isneginf isposinf"
)
# Random generators use integer arithmetic, which isn't counted.
_FILL_OPS = "zero_ fill_ normal_ uniform_ random_ bernoulli_ exponential_"


def _elementwise(flops: int) -> Formula:
    """Counts an operator that reads all tensors and writes their broadcast shape."""

    def count(call: OpCall) -> tuple[float, float]:
        out, dtype = _result(call)
        return flops * out, call.size(*call.tensors) + out * call.item(dtype)

    return count


def _result(call: OpCall) -> tuple[int, int]:
    """Returns the number of elements of the result and the position of a tensor of its dtype (torch's promotion)."""
    positions = call.tensors
    if not positions:
        raise UncountableCall
    ranked = [position for position in positions if call.shape(position)] or positions
    leading = [position for position in ranked if call.is_floating(position)] or ranked
    return prod(broadcast(*(call.shape(position) for position in positions))), max(leading, key=call.item)


def _in_place(flops: int) -> Formula:
    """Counts an operator that reads all tensors and writes the first one."""
    return lambda call: (flops * call.count(0), call.size(*call.tensors) + call.size(0))


def _foreach(flops: int) -> Formula:
    """Counts `_foreach_...`: an operation on each tensor of a list; all lists have the same sizes."""

    def count(call: OpCall) -> tuple[float, float]:
        lists = [position for position in range(len(call.shapes)) if call.shapes[position] and call.is_list(position)]
        if not lists:
            raise UncountableCall
        elements = [sum(map(prod, call.shapes_of(position))) for position in lists]
        return flops * elements[0], (sum(elements) + elements[0]) * call.item(lists[0])

    return count


def _comparison(call: OpCall) -> tuple[float, float]:
    """Counts a comparison, whose result takes one byte per element."""
    out, _ = _result(call)
    return out, call.size(*call.tensors) + out


def _where(call: OpCall) -> tuple[float, float]:
    """Counts `where(condition, value, value)`; the values may be scalars."""
    values = [position for position in call.tensors if position in (1, 2)]
    if not values:
        raise UncountableCall
    out = prod(broadcast(*(call.shape(position) for position in call.tensors)))
    return 0, call.size(*call.tensors) + out * max(call.item(position) for position in values)


def _formulas() -> dict[str, Formula]:
    formulas: dict[str, Formula] = {}
    for flops, names in _ARITHMETIC.items():
        for name in names.split():
            formulas |= {name: _elementwise(flops), f"{name}_": _in_place(flops)}
            formulas |= dict.fromkeys([f"_foreach_{name}", f"_foreach_{name}_"], _foreach(flops))
    for name in _COMPARISON_OPS.split():
        formulas |= {name: _comparison, f"{name}_": _in_place(1)}
    return formulas | dict.fromkeys(_FILL_OPS.split(), lambda call: (0, call.size(0)))


ELEMENTWISE_FORMULAS: dict[str, Formula] = {
    **_formulas(),
    "copy_": lambda call: (0, call.size(0, 1)),
    "where": _where,
    "masked_fill_": lambda call: (0, call.size(1)),  # the mask alone: the number of masked elements is unknown
    "native_dropout": lambda call: (2 * call.count(0), 2 * call.size(0) + call.count(0)),  # writes the mask, too
    "native_dropout_backward": _elementwise(2),
    "glu": lambda call: (4 * call.count(0) / 2, 1.5 * call.size(0)),  # half * sigmoid of the other half
    "glu_backward": lambda call: (9 * call.count(0), call.size(0) + 2 * call.size(1)),
}


# Views, and allocations without a write.
_FREE_OPS = (
    "view _unsafe_view _reshape_alias reshape_as view_as t transpose numpy_T permute movedim as_strided as_strided_ expand"
    " expand_as unsqueeze unsqueeze_ squeeze squeeze_ select slice narrow split split_with_sizes chunk unbind unflatten"
    " detach detach_ alias diagonal unfold lift_fresh resolve_conj resolve_neg empty empty_like empty_strided new_empty"
    " new_empty_strided resize_ set_ requires_grad_ is_nonzero view_as_real view_as_complex is_pinned record_stream"
    " swapaxes swapdims moveaxis mT mH T H real item _local_scalar_dense"
)


def _embedding(call: OpCall) -> tuple[float, float]:
    """Counts `embedding(weight, indices)`: one row of the weight per index."""
    row = call.shape(0)[-1] * call.item(0)
    return 0, call.size(1) + 2 * call.count(1) * row


def _embedding_backward(call: OpCall) -> tuple[float, float]:
    """Counts `embedding_dense_backward(grad, indices, rows)`: zeros for all rows, then an addition per row of grad."""
    written = call.argument(2) * call.shape(0)[-1] * call.item(0)
    return call.count(0), call.size(0, 1) + written


def _index_select(call: OpCall) -> tuple[float, float]:
    """Counts `index_select(self, dim, index)`."""
    shape = call.shape(0)
    if not shape:
        raise UncountableCall
    rest = prod(size for position, size in enumerate(shape) if position != call.argument(1) % len(shape))
    return 0, call.size(2) + 2 * call.count(2) * rest * call.item(0)


def _select_backward(call: OpCall) -> tuple[float, float]:
    """Counts `select_backward(grad, sizes, ...)` and `slice_backward`: zeros of the sizes, then a copy of grad."""
    return 0, prod(call.argument(1)) * call.item(0) + 2 * call.size(0)


def _scatter(flops: int) -> Formula:
    """Counts `scatter_(self, dim, index, src)`, `scatter_add_`: src is read, and written or added."""

    def count(call: OpCall) -> tuple[float, float]:
        moved = call.size(3) if call.given(3) else call.count(2) * call.item(0)
        return flops * call.count(2), call.size(2) + (2 + flops) * moved

    return count


def _pad(call: OpCall) -> tuple[float, float]:
    """Counts `constant_pad_nd(self, pad)`; `pad` has the sizes before and after, the last dimension first."""
    shape, pad = call.shape(0), list(call.argument(1))
    for position in range(len(pad) // 2):
        shape[-1 - position] += pad[2 * position] + pad[2 * position + 1]
    return 0, call.size(0) + prod(shape) * call.item(0)


def _fused_update(flops: int, *read_and_written: int) -> Formula:
    """Counts a fused update of lists of tensors; the gradients, at position 1, are only read."""

    def count(call: OpCall) -> tuple[float, float]:
        elements = sum(map(prod, call.shapes_of(0)))
        updated = sum(
            sum(map(prod, call.shapes_of(position))) for position in read_and_written if position < len(call.shapes)
        )
        return flops * elements, (2 * updated + elements) * call.item(0)

    return count


_MOVEMENT_FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(_FREE_OPS.split(), lambda call: (0, 0)),
    "cat": lambda call: (0, 2 * sum(map(prod, call.shapes_of(0))) * call.item(0)),
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "index_select": _index_select,
    "gather": lambda call: (0, call.size(2) + 2 * call.count(2) * call.item(0)),
    "select_backward": _select_backward,
    "slice_backward": _select_backward,
    "scatter_": _scatter(0),
    "scatter_add_": _scatter(1),
    "constant_pad_nd": _pad,
    "_fused_adam_": _fused_update(12, 0, 2, 3, 4),
    "_fused_adamw_": _fused_update(12, 0, 2, 3, 4),
    "_fused_sgd_": _fused_update(4, 0, 2),
}


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
    return lambda call: (flops * call.count(read[0]), call.size(*read) + call.size(read[0]))


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
    return lambda call: (_NORM_FLOPS * call.count(0), 2 * call.size(0) + call.size(weight, bias))


def _layer_norm_backward(*read: int) -> Formula:
    """Counts the gradients of input, weight and bias. Arguments: grad, input, statistics, weight (last)."""
    return lambda call: (
        _NORM_BACKWARD_FLOPS * call.count(1),
        call.size(*read) + call.size(1) + 2 * call.size(read[-1]),
    )


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
    return lambda call: (flops * call.count(1), call.size(*read) + call.size(1))


_REDUCTION_FORMULAS: dict[str, Formula] = {
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


PRODUCT_FORMULAS: dict[str, Formula] = {
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


FORMULAS = MappingProxyType({**ELEMENTWISE_FORMULAS, **_MOVEMENT_FORMULAS, **_REDUCTION_FORMULAS, **PRODUCT_FORMULAS})


def count_operator(
    name: str, shapes: Sequence[Any], dtypes: Sequence[str] = (), arguments: Sequence[Any] = ()
) -> OpCost | None:
    """Returns the FLOPs and bytes of one call of an operator, forward or backward; None if they are unknown.

    Operators call other operators: `aten::conv2d` only calls `aten::convolution`, which has a formula. Of nested calls,
    count the outermost known call and none inside it.

    Args:
        name: torch's name, such as `aten::addmm`.
        shapes: shapes of the inputs by position, as `torch.profiler` records them with `record_shapes`: `[]` if the
            input isn't a tensor, a list of shapes for a list of tensors.
        dtypes: dtypes of the same inputs, such as `float32`, `torch.float32` or the profiler's C++ names. The profiler
            records `TensorList` for a list of tensors, and the bytes are then unknown; the tensors' dtype may replace
            it.
        arguments: values of the inputs that aren't tensors, None elsewhere (the profiler's `concrete_inputs`).
    """
    formula = FORMULAS.get(name.removeprefix("aten::"))
    if formula is None:
        return None
    try:
        flops, bytes_ = formula(OpCall(shapes, dtypes, arguments))
    except (UncountableCall, ValueError, IndexError, TypeError):
        return None  # the shapes don't match the formula, as with symbolic sizes of torch's compiler
    return OpCost(float(flops), None if math.isnan(bytes_) else float(bytes_))


_PRECISIONS = {
    "float32": "fp32",
    "float": "fp32",
    "float64": "fp64",
    "double": "fp64",
    "float16": "fp16",
    "c10::Half": "fp16",
    "bfloat16": "bf16",
    "c10::BFloat16": "bf16",
}


def device_limits(device: Device) -> HardwareLimits:
    """Returns the measured limits of a device; None for what wasn't measured."""
    speed = device.speed
    return HardwareLimits(
        flop_per_s={precision: figure.value for precision, figure in speed.flop_per_s.items()},
        bytes_per_s=speed.memory_bandwidth.value if speed.memory_bandwidth else None,
        launch_us=speed.launch_overhead.value if speed.launch_overhead else None,
        copy_bytes_per_s=speed.host_to_device.value if speed.host_to_device else None,
    )


def precision_of(dtype: str, *, tf32: bool = False) -> str:
    """Returns the key of `HardwareLimits.flop_per_s` for a dtype; empty if there is none.

    Args:
        tf32: whether float32 products may run in TF32.
    """
    precision = _PRECISIONS.get(dtype.removeprefix("torch."), "")
    return "tf32" if tf32 and precision == "fp32" else precision


def precision_in(operator: OperatorTime, reduced: Mapping[str, str]) -> str:
    """Returns the key of `HardwareLimits.flop_per_s` in which an operator computes; empty if there is none.

    Args:
        reduced: `Profile.reduced`: the precision of float32 products, by class of operator.
    """
    precision, kind = precision_of(operator.dtype), operator_class(operator.name.rpartition("::")[2])
    return reduced.get(kind or "", precision) if precision == "fp32" else precision


def least_ms(counts: OpCost, limits: HardwareLimits, precision: str) -> float | None:
    """Returns the least milliseconds of some work on a device; None if neither limit is known.

    The byte limit is that of main memory. Data in a cache can be read faster.
    """
    rate = limits.flop_per_s.get(precision)
    times = []
    if rate:
        times.append(counts.flops / rate)
    if limits.bytes_per_s and counts.bytes is not None:
        times.append(counts.bytes / limits.bytes_per_s)
    return 1000.0 * max(times) if times else None


def with_limit_shares(profile: Profile) -> Profile:
    """Returns the profile with `limit_share` for each module whose FLOPs or bytes are known.

    Operators run one after the other, so a module's least time is the sum over its operators.
    """
    least = [
        (one.module, _operator_least_ms(one, profile))
        for one in profile.operators
        if one.phase in ("forward", "backward")
    ]
    known = [(module, ms) for module, ms in least if ms is not None]
    shared = [one.model_copy(update={"limit_share": _module_share(one, known)}) for one in profile.modules]
    return profile.model_copy(update={"modules": shared})


def _operator_least_ms(operator: OperatorTime, profile: Profile) -> float | None:
    if operator.flops is None or profile.limits.busy:
        return None
    return least_ms(OpCost(operator.flops, operator.bytes), profile.limits, precision_in(operator, profile.reduced))


def _module_share(module: ModuleTime, known: list[tuple[str, float]]) -> float | None:
    """Returns None if the module's own count is unknown or none of its operators was traced."""
    measured_ms = (module.forward_ms or 0.0) + (module.backward_ms or 0.0)
    inside = f"{module.name}." if module.name else ""
    parts = [ms for name, ms in known if name == module.name or name.startswith(inside)]
    if module.flops is None or not parts or not measured_ms:
        return None
    share = sum(parts) / measured_ms
    return share if share <= 1 else None  # above 1: the data was in a cache, or the limit is too low
