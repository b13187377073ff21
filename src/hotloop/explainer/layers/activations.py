"""Elementwise functions and their derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hotloop import arrays
from hotloop.arrays.activations import Activation, sigmoid
from hotloop.explainer.layers.equation import (
    EquationTerm,
    Formula,
    FunctionCall,
    LayerEquations,
    NotCovered,
    one_operand,
    ones_like,
    sum_to_shape,
)

_SELU, _SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
"""Klambauer et al., "Self-normalizing neural networks", 2017, section 2."""


@dataclass(frozen=True)
class ActivationCurve:
    """An elementwise function and its derivative, with the FLOPs per element of each."""

    text: str
    slope_text: str
    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    flops: tuple[int, int] = (1, 2)


def _of(layer: Activation, text: str, slope_text: str, flops: tuple[int, int] = (1, 2)) -> ActivationCurve:
    """Returns the curve of a layer of `hotloop.arrays`."""
    return ActivationCurve(text, slope_text, layer.value, lambda x: layer.slope(x, layer.value(x)), flops)


CURVES: dict[str, ActivationCurve] = {
    "relu": _of(arrays.ReLU(), "max(X, 0)", "[X > 0]"),
    "relu6": ActivationCurve(
        "min(max(X, 0), 6)", "[0 < X < 6]", lambda x: x.clamp(0, 6), lambda x: 1.0 * ((x > 0) & (x < 6))
    ),
    "sigmoid": _of(arrays.Sigmoid(), "s = 1 / (1 + exp(-X))", "s (1 - s)", (3, 4)),
    "tanh": _of(arrays.Tanh(), "tanh X", "(1 - tanh^2 X)", (1, 3)),
    "silu": _of(arrays.SiLU(), "X s(X), s the sigmoid", "s(X) (1 + X (1 - s(X)))", (4, 7)),
    "log_sigmoid": ActivationCurve(
        "-log(1 + exp(-X))",
        "1 / (1 + exp(X))",
        lambda x: -torch.logaddexp(-x, torch.zeros_like(x)),
        lambda x: sigmoid(-x),
        (4, 4),
    ),
    "mish": ActivationCurve(
        "X t, t = tanh(log(1 + exp X))",
        "t + X (1 - t^2) s(X), s the sigmoid",
        lambda x: x * torch.tanh(torch.log1p(torch.exp(x))),
        lambda x: (t := torch.tanh(torch.log1p(torch.exp(x)))) + x * (1 - t * t) * sigmoid(x),
        (5, 9),
    ),
    "hardswish": ActivationCurve(
        "X min(max(X + 3, 0), 6) / 6",
        "(2 X + 3) / 6 between -3 and 3, else 0 below and 1 above",
        lambda x: x * (x + 3).clamp(0, 6) / 6,
        lambda x: torch.where(x.abs() < 3, (2 * x + 3) / 6, (x > 0).to(x.dtype)),
        (4, 4),
    ),
    "selu": ActivationCurve(
        "1.051 X where X > 0, else 1.758 (exp X - 1)",
        "1.051 where X > 0, else 1.758 exp X",
        lambda x: _SELU * torch.where(x > 0, x, _SELU_ALPHA * torch.expm1(x.clamp(max=0))),
        lambda x: _SELU * torch.where(x > 0, torch.ones_like(x), _SELU_ALPHA * torch.exp(x.clamp(max=0))),
        (2, 3),
    ),
    "exp": ActivationCurve("exp X", "exp X", torch.exp, torch.exp),
    "log": ActivationCurve("log X", "1 / X", torch.log, lambda x: 1 / x),
    "log1p": ActivationCurve("log(1 + X)", "1 / (1 + X)", torch.log1p, lambda x: 1 / (1 + x), (2, 3)),
    "sqrt": ActivationCurve("sqrt X", "1 / (2 sqrt X)", torch.sqrt, lambda x: 0.5 / torch.sqrt(x), (1, 3)),
    "rsqrt": ActivationCurve("1 / sqrt X", "-X^(-3/2) / 2", lambda x: x**-0.5, lambda x: -0.5 * x**-1.5, (2, 3)),
    "square": ActivationCurve("X^2", "2 X", lambda x: x * x, lambda x: 2 * x),
    "abs": ActivationCurve("|X|", "sign X", torch.abs, torch.sign),
    "neg": ActivationCurve("-X", "-1", lambda x: -x, lambda x: -ones_like(x), (1, 1)),
    "reciprocal": ActivationCurve("1 / X", "-1 / X^2", lambda x: 1 / x, lambda x: -1 / (x * x), (1, 3)),
    "sin": ActivationCurve("sin X", "cos X", torch.sin, torch.cos),
    "cos": ActivationCurve("cos X", "-sin X", torch.cos, lambda x: -torch.sin(x), (1, 3)),
}


def curve_with_settings(call: FunctionCall) -> ActivationCurve:
    """Returns the curve of a function with parameters."""
    name = call.name
    if name in CURVES:
        return CURVES[name]
    if name == "leaky_relu":
        slope = call.get(1, "negative_slope", 0.01)
        text, slope_text = f"X where X > 0, else {slope:g} X", f"1 where X > 0, else {slope:g}"
        return _of(arrays.LeakyReLU(slope), text, slope_text)
    if name == "elu":
        alpha = call.get(1, "alpha", 1.0)
        text, slope_text = f"X where X > 0, else {alpha:g} (exp X - 1)", f"1 where X > 0, else {alpha:g} exp X"
        return _of(arrays.ELU(alpha), text, slope_text, (2, 3))
    if name == "softplus":
        beta, threshold = call.get(1, "beta", 1), call.get(2, "threshold", 20)
        return ActivationCurve(
            f"log(1 + exp({beta:g} X)) / {beta:g}",
            f"1 / (1 + exp(-{beta:g} X))",
            lambda x: torch.where(
                x * beta > threshold, x, torch.log1p(torch.exp((x * beta).clamp(max=threshold))) / beta
            ),
            lambda x: torch.where(x * beta > threshold, 1.0, sigmoid(x * beta)),
            (5, 5),
        )
    if name == "gelu":
        return _gelu(call.get(1, "approximate", "none"))
    if name in ("clamp", "clip", "hardtanh", "clamp_min", "clamp_max"):
        return _clamp(call)
    exponent = call.get(1, "exponent")
    if name != "pow" or not isinstance(exponent, int | float):
        raise NotCovered("its exponent is no number")
    return ActivationCurve(
        f"X^{exponent:g}",
        f"{exponent:g} X^{exponent - 1:g}",
        lambda x: x**exponent,
        lambda x: exponent * x ** (exponent - 1),
        (1, 3),
    )


def _gelu(approximate: str) -> ActivationCurve:
    if approximate == "none":
        return _of(arrays.GELU(), "X Phi(X), Phi the normal distribution's", "Phi(X) + X phi(X)", (4, 8))
    c, k = math.sqrt(2 / math.pi), 0.044715

    def slope(x: Tensor) -> Tensor:
        t = torch.tanh(c * (x + k * x**3))
        return (1 + t) / 2 + x / 2 * (1 - t * t) * c * (1 + 3 * k * x * x)

    return ActivationCurve(
        "X (1 + t) / 2, t = tanh(0.798 (X + 0.0447 X^3))",
        "(1 + t) / 2 + X (1 - t^2) (0.399 + 0.0535 X^2)",
        lambda x: x * (1 + torch.tanh(c * (x + k * x**3))) / 2,
        slope,
        (8, 14),
    )


def _clamp(call: FunctionCall) -> ActivationCurve:
    low, high = call.get(1, "min", call.options.get("min_val")), call.get(2, "max", call.options.get("max_val"))
    if call.name == "clamp_max":
        low, high = None, call.get(1, "max")
    if call.name == "hardtanh":
        low, high = (-1.0 if low is None else low), (1.0 if high is None else high)
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        raise NotCovered("its bounds are tensors")
    least, most = (-math.inf if low is None else low), (math.inf if high is None else high)
    strict = call.name == "hardtanh"
    return ActivationCurve(
        f"X between {least:g} and {most:g}",
        f"[{least:g} <= X <= {most:g}]",
        lambda x: x.clamp(least, most),
        lambda x: 1.0 * ((x > least) & (x < most) if strict else (x >= least) & (x <= most)),
    )


WITH_SETTINGS = ("leaky_relu", "elu", "softplus", "gelu", "clamp", "clip", "hardtanh", "clamp_min", "clamp_max", "pow")


def activation(call: FunctionCall) -> LayerEquations:
    """Z = f(X), dX = dZ f'(X)."""
    x, dz, curve = call.tensor(0, "input"), call.dz, curve_with_settings(call)
    size = x.numel()
    slope = curve.slope_text if " " not in curve.slope_text or curve.slope_text[0] in "([" else f"({curve.slope_text})"
    z = (curve.text, lambda: curve.value(x), curve.flops[0] * size)
    return one_operand(x, z, (f"dZ * {slope}", lambda: dz * curve.slope(x), curve.flops[1] * size), [dz, x])


def _operands(call: FunctionCall, *, reverse: bool = False) -> tuple[Any, Any]:
    a, b = call.get(0, "input"), call.get(1, "other")
    return (b, a) if reverse else (a, b)


def _binary(
    call: FunctionCall, a: Any, b: Any, z: tuple[str, Callable[[], Tensor], int], slopes: tuple
) -> LayerEquations:
    """Z = f(A, B) where either may be a number; `slopes` are (text, dZ's factor as a function, FLOPs) of A and B."""
    dz = call.dz
    named = {name: value for name, value in (("A", a), ("B", b)) if isinstance(value, Tensor)}
    tensors = list(named.values())
    backward = []
    for name, (text, factor, flops) in zip("AB", slopes, strict=True):
        value = named.get(name)
        if value is None:
            continue
        stretched = value.shape != dz.shape
        backward.append(
            EquationTerm(
                f"d{name}",
                text + (f", summed to the shape of {name}" if stretched else ""),
                partial(_broadcast, factor, dz, value.shape),
                (flops + stretched) * dz.numel(),
                [dz, *(tensors if flops else [])] if flops or stretched else [],  # else dZ is passed on
            )
        )
    notes = [f"{name} is {value:g}" for name, value in (("A", a), ("B", b)) if isinstance(value, int | float)]
    return LayerEquations(named, [EquationTerm("Z", z[0], z[1], z[2] * dz.numel(), tensors)], backward, notes)


def _broadcast(factor: Callable[[Tensor], Tensor], dz: Tensor, shape: torch.Size) -> Tensor:
    return sum_to_shape(factor(dz), shape)


def addition(call: FunctionCall) -> LayerEquations:
    """A residual sum, among others: the gradient goes on to both unchanged."""
    a, b = _operands(call)
    alpha = call.options.get("alpha", 1)
    sign = call.name
    if sign == "rsub":
        a, b = b, a
    factor = -alpha if sign in ("sub", "rsub") else alpha
    text = "A + B" if factor == 1 else "A - B" if factor == -1 else f"A + {factor:g} B"
    back = "dZ" if factor == 1 else "-dZ" if factor == -1 else f"{factor:g} dZ"
    return _binary(
        call,
        a,
        b,
        (text, lambda: a + factor * b, 1),
        (("dZ", lambda g: g, 0), (back, lambda g: factor * g, int(factor != 1))),
    )


def multiplication(call: FunctionCall) -> LayerEquations:
    a, b = _operands(call)
    slopes = (("dZ * B", lambda g: g * b, 1), ("dZ * A", lambda g: g * a, 1))
    return _binary(call, a, b, ("A * B, number by number", lambda: a * b, 1), slopes)


def division(call: FunctionCall) -> LayerEquations:
    if call.options.get("rounding_mode") is not None:
        raise NotCovered("it rounds")
    a, b = _operands(call, reverse=call.name == "rdiv")
    slopes = (("dZ / B", lambda g: g / b, 1), ("-dZ * A / B^2", lambda g: -g * a / (b * b), 4))
    return _binary(call, a, b, ("A / B, number by number", lambda: a / b, 1), slopes)


def selection(call: FunctionCall) -> LayerEquations:
    """`where(condition, A, B)` and `masked_fill(A, mask, value)`."""
    if call.name == "where":
        mask, a, b = call.get(0, "condition"), call.get(1, "input"), call.get(2, "other")
        text = "A where the condition holds, else B"
    else:
        b, mask, a = call.get(0, "input"), call.get(1, "mask"), call.get(2, "value")
        text = "the value A where the mask holds, else B"
    slopes = (("dZ where A was taken", lambda g: g * mask, 1), ("dZ where B was taken", lambda g: g * ~mask, 1))
    return _binary(call, a, b, (text, lambda: torch.where(mask, a, b), 0), slopes)


def maximum(call: FunctionCall) -> LayerEquations:
    """`maximum` and `minimum`; where both are equal, each gets half, as in torch."""
    a, b = _operands(call)
    sign = 1.0 if call.name.startswith("max") else -1.0

    def share(one: Any, other: Any) -> Tensor:
        return 1.0 * (sign * (one - other) > 0) + 0.5 * (one == other)

    word = "larger" if sign > 0 else "smaller"
    slopes = (
        (f"dZ where A is {word}", lambda g: g * share(a, b), 2),
        (f"dZ where B is {word}", lambda g: g * share(b, a), 2),
    )
    return _binary(call, a, b, (f"the {word} of A and B", lambda: torch.where(sign * (a - b) > 0, a, b), 1), slopes)


FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(CURVES, activation),
    **dict.fromkeys(WITH_SETTINGS, activation),
    **dict.fromkeys(["add", "sub", "rsub"], addition),
    "mul": multiplication,
    **dict.fromkeys(["div", "rdiv"], division),
    **dict.fromkeys(["where", "masked_fill"], selection),
    **dict.fromkeys(["maximum", "minimum"], maximum),
}
