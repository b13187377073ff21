"""Cost formulas of elementwise operators, which are dominated by memory traffic.

FLOPs are those of the formula for one element; a function such as `exp` counts as one.
"""

from __future__ import annotations

from math import prod

from hotloop.profiler.costs.op_cost import Formula, OpCall, UncountableCall, broadcast

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

    def count(call: OpCall) -> tuple[float, float]:
        return flops * call.count(0), call.size(*call.tensors) + call.size(0)

    return count


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


FORMULAS: dict[str, Formula] = {
    **_formulas(),
    "copy_": lambda call: (0, call.size(0, 1)),
    "where": _where,
    "masked_fill_": lambda call: (0, call.size(1)),  # the mask alone: the number of masked elements is unknown
    "native_dropout": lambda call: (2 * call.count(0), 2 * call.size(0) + call.count(0)),  # writes the mask, too
    "native_dropout_backward": _elementwise(2),
    "glu": lambda call: (4 * call.count(0) / 2, 1.5 * call.size(0)),  # half * sigmoid of the other half
    "glu_backward": lambda call: (9 * call.count(0), call.size(0) + 2 * call.size(1)),
}
