"""Reductions along dimensions, cumulative sums and softmax."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from hotloop import arrays
from hotloop.explainer.layers.activations import maximum
from hotloop.explainer.layers.equation import (
    Formula,
    FunctionCall,
    LayerEquations,
    NotCovered,
    one_operand,
)


def _dims(call: FunctionCall, x: Tensor) -> list[int]:
    dims = call.get(1, "dim", call.options.get("axis"))
    if len(call.arguments) > 2 and all(type(value) is int for value in call.arguments[1:]):
        dims = call.arguments[1:]  # x.sum(0, 1)
    if dims is None or dims in ((), []):
        return list(range(x.ndim))
    return [dim % max(1, x.ndim) for dim in ([dims] if isinstance(dims, int) else dims)]


def _expand(value: Tensor, x: Tensor, dims: list[int]) -> Tensor:
    """Returns a reduced tensor in the shape of `x`."""
    shape = [1 if place in dims else size for place, size in enumerate(x.shape)]
    return value.reshape(shape).expand(x.shape)


def reduction(call: FunctionCall) -> LayerEquations:
    """`sum` and `mean` over some dimensions."""
    x, dz = call.tensor(0, "input"), call.dz
    dims = _dims(call, x)
    count = math.prod(x.shape[dim] for dim in dims) if call.name == "mean" else 1
    over = "all" if len(dims) == x.ndim else f"dimension {', '.join(map(str, dims))}"
    text = f"sum of X over {over}" + (f" / {count}" if call.name == "mean" else "")
    return one_operand(
        x,
        (text, lambda: (x.sum(dims) / count if dims else x / count).reshape(dz.shape), x.numel()),
        (
            "dZ" + (f" / {count}" if count != 1 else "") + " for each number that was summed",
            lambda: _expand(dz / count, x, dims),
            int(count != 1) * x.numel(),
        ),
        [dz],
    )


def extremum(call: FunctionCall) -> LayerEquations:
    """`max`, `min`, `amax` and `amin`: the gradient goes to the index of the extremum, or evenly to all equal ones."""
    if isinstance(call.get(1, "other"), Tensor):
        return maximum(call)
    x, dz = call.tensor(0, "input"), call.dz
    dims = _dims(call, x)
    largest = "max" in call.name
    alone = call.name in ("max", "min") and len(dims) < x.ndim  # the function returns one index

    def value() -> Tensor:
        return x.amax(dims, keepdim=True) if largest else x.amin(dims, keepdim=True)

    def share() -> Tensor:
        if alone:
            place = x.argmax(dims[0], keepdim=True) if largest else x.argmin(dims[0], keepdim=True)
            return torch.zeros_like(x).scatter_(dims[0], place, 1.0)
        found = (x == value()).to(x.dtype)
        return found / found.sum(dims, keepdim=True)

    over = "all" if len(dims) == x.ndim else f"dimension {', '.join(map(str, dims))}"
    word = "largest" if largest else "smallest"
    return one_operand(
        x,
        (f"the {word} of X over {over}", lambda: value().reshape(dz.shape), x.numel()),
        (f"dZ at the place of the {word}, zero elsewhere", lambda: share() * _expand(dz, x, dims), x.numel()),
        [dz, x],
    )


def variance(call: FunctionCall) -> LayerEquations:
    """`var` and `std` over some dimensions, with torch's correction."""
    x, dz = call.tensor(0, "input"), call.dz
    place = call.get(1, "dim")
    dims = (
        list(range(x.ndim))
        if place is None or isinstance(place, bool)
        else _dims(replace(call, arguments=(x, place)), x)
    )
    given = call.options.get("correction", call.get(2, "unbiased", call.options.get("unbiased", True)))
    if isinstance(place, bool):
        given = place
    count = math.prod(x.shape[dim] for dim in dims) - (1 if given is True or given is None else int(given))
    rooted = call.name == "std"

    def centred() -> Tensor:
        return x - x.mean(dims, keepdim=True)

    def value() -> Tensor:
        found = (centred() ** 2).sum(dims) / count
        return (found.sqrt() if rooted else found).reshape(dz.shape)

    def gradient() -> Tensor:
        scale = dz / value() if rooted else 2 * dz
        return _expand(scale, x, dims) * centred() / count

    text = f"sum of (X - mean X)^2 / {count}"
    slope = f"dZ (X - mean X) / ({count} Z)" if rooted else f"2 dZ (X - mean X) / {count}"
    z = (f"sqrt of the {text}" if rooted else text, value, 4 * x.numel())
    return one_operand(x, z, (slope, gradient, 3 * x.numel()), [dz, x])


def vector_norm(call: FunctionCall) -> LayerEquations:
    """`linalg_vector_norm` of order 2 over some dimensions."""
    x, dz = call.tensor(0, "input"), call.dz
    if call.get(1, "ord", 2) != 2:
        raise NotCovered("its order isn't 2")
    place = call.get(2, "dim")
    dims = list(range(x.ndim)) if place is None else _dims(replace(call, arguments=(x, place)), x)

    def value() -> Tensor:
        return (x * x).sum(dims).sqrt()

    def gradient() -> Tensor:
        norm = _expand(value(), x, dims)
        return torch.where(norm > 0, _expand(dz, x, dims) * x / norm, torch.zeros_like(x))

    z = ("sqrt of the sum of X^2", lambda: value().reshape(dz.shape), 2 * x.numel())
    return one_operand(x, z, ("dZ X / Z", gradient, 2 * x.numel()), [dz, x])


def cumulative_sum(call: FunctionCall) -> LayerEquations:
    """`cumsum`: each element of the gradient is the sum from its index on."""
    x, dz, dim = call.tensor(0, "input"), call.dz, call.get(1, "dim")
    return one_operand(
        x,
        (f"sums of X up to each place of dimension {dim}", lambda: torch.cumsum(x, dim), x.numel()),
        ("sums of dZ from each place on", lambda: dz.flip(dim).cumsum(dim).flip(dim), x.numel()),
        [dz],
    )


def log_sum_exp(call: FunctionCall) -> LayerEquations:
    """`logsumexp` over some dimensions."""
    x, dz = call.tensor(0, "input"), call.dz
    dims = _dims(call, x)

    def shares() -> Tensor:
        parts = torch.exp(x - x.amax(dims, keepdim=True))
        return parts / parts.sum(dims, keepdim=True)

    def value() -> Tensor:
        high = x.amax(dims, keepdim=True)
        return (torch.exp(x - high).sum(dims, keepdim=True).log() + high).reshape(dz.shape)

    z = ("log of the sum of exp X", value, 3 * x.numel())
    return one_operand(x, z, ("dZ softmax X", lambda: _expand(dz, x, dims) * shares(), 4 * x.numel()), [dz, x])


def softmax(call: FunctionCall) -> LayerEquations:
    """P = exp(X) / sum of exp(X) along a dimension, or its logarithm."""
    x, dz = call.tensor(0, "input"), call.dz
    dim = call.get(1, "dim")
    if dim is None:
        raise NotCovered("it names no dimension")

    reads = [dz, call.outputs[0]]
    if call.name == "softmax":
        layer = arrays.Softmax(dim)

        def gradient() -> Tensor:
            layer.forward(x)
            return layer.backward(dz)

        z = (f"exp X / sum of exp X along dimension {dim}", lambda: layer.forward(x), 5 * x.numel())
        back = ("Z * (dZ - sum of dZ * Z along it)", gradient, 4 * x.numel())
        return one_operand(x, z, back, reads)

    def log_softmax() -> Tensor:
        shifted = x - x.amax(dim, keepdim=True)
        return shifted - shifted.exp().sum(dim, keepdim=True).log()

    z = (f"X - log of the sum of exp X along dimension {dim}", log_softmax, 5 * x.numel())
    back = (
        "dZ - exp Z * sum of dZ along it",
        lambda: dz - log_softmax().exp() * dz.sum(dim, keepdim=True),
        4 * x.numel(),
    )
    return one_operand(x, z, back, reads)


FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(["max", "min", "amax", "amin"], extremum),
    **dict.fromkeys(["sum", "mean"], reduction),
    **dict.fromkeys(["var", "std"], variance),
    "linalg_vector_norm": vector_norm,
    "cumsum": cumulative_sum,
    "logsumexp": log_sum_exp,
    **dict.fromkeys(["softmax", "log_softmax"], softmax),
}
