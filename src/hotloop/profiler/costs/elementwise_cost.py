"""Operators that do the same to each number: they move memory in the main.

FLOPs are those of the formula for one number, a function such as `exp` being one.
"""

from __future__ import annotations

from math import prod

from hotloop.profiler.costs.op_cost import Formula, OpCall, UncountableCall, broadcast

# FLOPs for each number of the result.
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
# Numbers are drawn with integer arithmetic, which isn't counted.
_FILL_OPS = "zero_ fill_ normal_ uniform_ random_ bernoulli_ exponential_"


def _elementwise(flops: int) -> Formula:
    """All tensors are read, and a tensor of their common shape and of the first one's dtype is written."""

    def count(call: OpCall) -> tuple[float, float]:
        out, dtype = _result(call)
        return flops * out, call.size(*call.tensors) + out * call.item(dtype)

    return count


def _result(call: OpCall) -> tuple[int, int]:
    """How many numbers the result has, and the place of a tensor of its dtype (torch's rules of promotion)."""
    places = call.tensors
    if not places:
        raise UncountableCall
    ranked = [place for place in places if call.shape(place)] or places
    leading = [place for place in ranked if call.is_floating(place)] or ranked
    return prod(broadcast(*(call.shape(place) for place in places))), max(leading, key=call.item)


def _in_place(flops: int) -> Formula:
    """As above; written is the first tensor."""

    def count(call: OpCall) -> tuple[float, float]:
        return flops * call.count(0), call.size(*call.tensors) + call.size(0)

    return count


def _foreach(flops: int) -> Formula:
    """`_foreach_...`: the same for each tensor of a list; further lists are as long, and the result is as the first."""

    def count(call: OpCall) -> tuple[float, float]:
        lists = [place for place in range(len(call.shapes)) if call.shapes[place] and call.is_list(place)]
        if not lists:
            raise UncountableCall
        numbers = [sum(map(prod, call.shapes_of(place))) for place in lists]
        return flops * numbers[0], (sum(numbers) + numbers[0]) * call.item(lists[0])

    return count


def _comparison(call: OpCall) -> tuple[float, float]:
    """The result has a byte for each number."""
    out, _ = _result(call)
    return out, call.size(*call.tensors) + out


def _fill(call: OpCall) -> tuple[float, float]:
    return 0, call.size(0)


def _copy(call: OpCall) -> tuple[float, float]:
    """`copy_(to, from)`."""
    return 0, call.size(0, 1)


def _where(call: OpCall) -> tuple[float, float]:
    """condition, then two values, which may be numbers."""
    values = [place for place in call.tensors if place in (1, 2)]
    if not values:
        raise UncountableCall
    out = prod(broadcast(*(call.shape(place) for place in call.tensors)))
    return 0, call.size(*call.tensors) + out * max(call.item(place) for place in values)


def _masked_fill(call: OpCall) -> tuple[float, float]:
    """`masked_fill_(self, mask, value)`: only what is masked must be written, which isn't known, so the mask alone."""
    return 0, call.size(1)


def _dropout(call: OpCall) -> tuple[float, float]:
    """The result and the mask are written."""
    return 2 * call.count(0), 2 * call.size(0) + call.count(0)


def _glu(call: OpCall) -> tuple[float, float]:
    """`glu`: half of the input times the sigmoid of the other half."""
    return 4 * call.count(0) / 2, 1.5 * call.size(0)


def _glu_backward(call: OpCall) -> tuple[float, float]:
    """grad and input -> a gradient of the input's shape."""
    return 9 * call.count(0), call.size(0) + 2 * call.size(1)


def _formulas() -> dict[str, Formula]:
    found: dict[str, Formula] = {}
    for flops, names in _ARITHMETIC.items():
        for name in names.split():
            found |= {name: _elementwise(flops), f"{name}_": _in_place(flops)}
            found |= dict.fromkeys([f"_foreach_{name}", f"_foreach_{name}_"], _foreach(flops))
    for name in _COMPARISON_OPS.split():
        found |= {name: _comparison, f"{name}_": _in_place(1)}
    return found | dict.fromkeys(_FILL_OPS.split(), _fill)


FORMULAS: dict[str, Formula] = {
    **_formulas(),
    "copy_": _copy,
    "where": _where,
    "masked_fill_": _masked_fill,
    "native_dropout": _dropout,
    "native_dropout_backward": _elementwise(2),
    "glu": _glu,
    "glu_backward": _glu_backward,
}
