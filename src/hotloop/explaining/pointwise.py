"""Activations, sums and products of two tensors, and what sums a tensor up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hotloop.explaining.curves import CURVES, curve_of
from hotloop.explaining.terms import Call, Formula, Term, Unexplained, Worked, summed_to


def activation(call: Call) -> Worked:
    """Z = f(X), dX = dZ f'(X)."""
    x, dz, curve = call.tensor(0, "input"), call.dz, curve_of(call)
    size = x.numel()
    slope = curve.slope_text if " " not in curve.slope_text or curve.slope_text[0] in "([" else f"({curve.slope_text})"
    return Worked(
        {"X": x},
        [Term("Z", curve.text, lambda: curve.value(x), curve.flops[0] * size, [x])],
        [Term("dX", f"dZ * {slope}", lambda: dz * curve.slope(x), curve.flops[1] * size, [dz, x])],
    )


def _operands(call: Call, *, reverse: bool = False) -> tuple[Any, Any]:
    a, b = call.get(0, "input"), call.get(1, "other")
    return (b, a) if reverse else (a, b)


def _two(call: Call, a: Any, b: Any, z: tuple[str, Callable[[], Tensor], int], slopes: tuple) -> Worked:
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
            Term(
                f"d{name}",
                text + (f", summed to the shape of {name}" if stretched else ""),
                partial(_stretched, factor, dz, value.shape),
                (flops + stretched) * dz.numel(),
                [dz, *(tensors if flops else [])] if flops or stretched else [],  # else dZ itself goes on
            )
        )
    return Worked(named, [Term("Z", z[0], z[1], z[2] * dz.numel(), tensors)], backward, _numbers(a, b))


def _stretched(factor: Callable[[Tensor], Tensor], dz: Tensor, shape: torch.Size) -> Tensor:
    return summed_to(factor(dz), shape)


def _numbers(a: Any, b: Any) -> list[str]:
    return [f"{name} is {value:g}" for name, value in (("A", a), ("B", b)) if isinstance(value, int | float)]


def added(call: Call) -> Worked:
    """A residual sum, among others: the gradient goes on to both unchanged."""
    a, b = _operands(call)
    alpha = call.options.get("alpha", 1)
    sign = call.name
    if sign == "rsub":
        a, b = b, a
    factor = -alpha if sign in ("sub", "rsub") else alpha
    text = "A + B" if factor == 1 else "A - B" if factor == -1 else f"A + {factor:g} B"
    back = "dZ" if factor == 1 else "-dZ" if factor == -1 else f"{factor:g} dZ"
    return _two(
        call,
        a,
        b,
        (text, lambda: a + factor * b, 1),
        (("dZ", lambda g: g, 0), (back, lambda g: factor * g, int(factor != 1))),
    )


def multiplied(call: Call) -> Worked:
    a, b = _operands(call)
    slopes = (("dZ * B", lambda g: g * b, 1), ("dZ * A", lambda g: g * a, 1))
    return _two(call, a, b, ("A * B, number by number", lambda: a * b, 1), slopes)


def divided(call: Call) -> Worked:
    if call.options.get("rounding_mode") is not None:
        raise Unexplained("it rounds")
    a, b = _operands(call, reverse=call.name == "rdiv")
    slopes = (("dZ / B", lambda g: g / b, 1), ("-dZ * A / B^2", lambda g: -g * a / (b * b), 4))
    return _two(call, a, b, ("A / B, number by number", lambda: a / b, 1), slopes)


def chosen(call: Call) -> Worked:
    """`where(condition, A, B)` and `masked_fill(A, mask, value)`."""
    if call.name == "where":
        mask, a, b = call.get(0, "condition"), call.get(1, "input"), call.get(2, "other")
        text = "A where the condition holds, else B"
    else:
        b, mask, a = call.get(0, "input"), call.get(1, "mask"), call.get(2, "value")
        text = "the value A where the mask holds, else B"
    slopes = (
        ("dZ where A was taken", lambda g: g * mask, 1),
        ("dZ where B was taken", lambda g: g * ~mask, 1),
    )
    return _two(call, a, b, (text, lambda: torch.where(mask, a, b), 0), slopes)


def larger(call: Call) -> Worked:
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
    return _two(call, a, b, (f"the {word} of A and B", lambda: torch.where(sign * (a - b) > 0, a, b), 1), slopes)


FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(CURVES, activation),
    **dict.fromkeys(
        ["leaky_relu", "elu", "softplus", "gelu", "clamp", "clip", "hardtanh", "clamp_min", "clamp_max", "pow"],
        activation,
    ),
    **dict.fromkeys(["add", "sub", "rsub"], added),
    "mul": multiplied,
    **dict.fromkeys(["div", "rdiv"], divided),
    **dict.fromkeys(["where", "masked_fill"], chosen),
    **dict.fromkeys(["maximum", "minimum"], larger),
}
