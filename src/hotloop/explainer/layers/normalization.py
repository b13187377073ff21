"""Batch, layer, group, instance and RMS normalization.

The gradients are from Ioffe and Szegedy, "Batch normalization", ICML 2015, section 3; the others average over other
dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from hotloop.explainer.layers.equation import EquationTerm, Formula, FunctionCall, LayerEquations, named_operands

_FORWARD, _BACKWARD = 8, 10  # FLOPs per element: see hotloop.profiler.operator_cost
_RMS_FORWARD, _RMS_BACKWARD = 4, 8


@dataclass(frozen=True)
class NormalizedInput:
    """A tensor shaped for its statistics and weights.

    Attributes:
        x, dz: tensors of one shape.
        weight, bias: tensors that broadcast against `x`; None without them.
    """

    x: Tensor
    dz: Tensor
    statistics_dims: Sequence[int]
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    is_centred: bool = True

    def mean(self, value: Tensor) -> Tensor:
        return value.mean(list(self.statistics_dims), keepdim=True)

    @property
    def centred(self) -> Tensor:
        return self.x - self.mean(self.x) if self.is_centred else self.x

    @property
    def rstd(self) -> Tensor:
        return 1 / torch.sqrt(self.mean(self.centred**2) + self.eps)

    @property
    def normal(self) -> Tensor:
        return self.centred * self.rstd

    def forward(self) -> Tensor:
        scaled = self.normal if self.weight is None else self.normal * self.weight
        return scaled if self.bias is None else scaled + self.bias

    def gradient(self) -> Tensor:
        dn = self.dz if self.weight is None else self.dz * self.weight
        kept = dn - self.normal * self.mean(dn * self.normal)
        return self.rstd * (kept - self.mean(dn) if self.is_centred else kept)


def _normalization_equations(
    call: FunctionCall, seen: NormalizedInput, weight: Tensor | None, bias: Tensor | None, over: str
) -> LayerEquations:
    x = call.tensor(0, "input")
    name = "X^" if seen.is_centred else "X~"
    middle = f"{name} = " + ("(X - mean X) / sqrt(var X + eps)" if seen.is_centred else "X / sqrt(mean X^2 + eps)")
    scaled, dn = name + " * g" * (weight is not None), "dZ * g" if weight is not None else "dZ"
    share = f"{name} * mean({dn} * {name})"
    text = f"({dn} - mean({dn}) - {share}) / std" if seen.is_centred else f"({dn} - {share}) / rms"
    forward_flops, backward_flops = (_FORWARD, _BACKWARD) if seen.is_centred else (_RMS_FORWARD, _RMS_BACKWARD)
    inputs = [call.dz, x, *named_operands(g=weight).values()]
    size = x.numel()
    backward = [EquationTerm("dX", text, lambda: seen.gradient().reshape(x.shape), backward_flops * size, inputs)]
    if weight is not None and seen.weight is not None:
        summed = (seen.dz * seen.normal).sum_to_size(seen.weight.shape).reshape(weight.shape)
        backward.append(EquationTerm("dg", f"sum of dZ * {name}", lambda: summed, 2 * size, [call.dz, x]))
    if bias is not None and seen.bias is not None:
        total = seen.dz.sum_to_size(seen.bias.shape).reshape(bias.shape)
        backward.append(EquationTerm("db", "sum of dZ", lambda: total, size, [call.dz]))
    z_text = scaled + " + b" * (bias is not None) + f", {middle}"
    reads = [x, *named_operands(g=weight, b=bias).values()]
    forward = EquationTerm("Z", z_text, lambda: seen.forward().reshape(x.shape), forward_flops * x.numel(), reads)
    return LayerEquations(
        named_operands(X=x, g=weight, b=bias), [forward], backward, [f"mean and variance over {over}"]
    )


def _along_channels(value: Tensor | None, dims: int) -> Tensor | None:
    return None if value is None else value.reshape(1, -1, *[1] * (dims - 2))


def batch_norm(call: FunctionCall) -> LayerEquations:
    """input, weight, bias, running mean, running variance, training, momentum, eps."""
    x, weight, bias = call.tensor(0, "input"), call.get(1, "weight"), call.get(2, "bias")
    training, eps = call.get(5, "training"), call.get(7, "eps")
    g, b = _along_channels(weight, x.ndim), _along_channels(bias, x.ndim)
    if training:
        seen = NormalizedInput(x, call.dz, [0, *range(2, x.ndim)], g, b, eps)
        return _normalization_equations(call, seen, weight, bias, "the batch and all places of a channel")
    return _evaluation_equations(call, eps)


def _evaluation_equations(call: FunctionCall, eps: float) -> LayerEquations:
    """With the running mean and variance, as in evaluation."""
    x, dz, weight, bias = call.tensor(0, "input"), call.dz, call.get(1, "weight"), call.get(2, "bias")
    shape = (1, -1, *[1] * (x.ndim - 2))
    mean, var = call.tensor(3, "running_mean").reshape(shape), call.tensor(4, "running_var").reshape(shape)
    rstd = 1 / torch.sqrt(var + eps)
    normal = (x - mean) * rstd
    g, b = _along_channels(weight, x.ndim), _along_channels(bias, x.ndim)
    over = [0, *range(2, x.ndim)]
    scale = rstd if g is None else g * rstd
    backward = [EquationTerm("dX", "dZ * g / std", lambda: dz * scale, x.numel(), [dz])]
    if weight is not None:
        backward.append(EquationTerm("dg", "sum of dZ * X^", lambda: (dz * normal).sum(over), 2 * x.numel(), [dz, x]))
    if bias is not None:
        backward.append(EquationTerm("db", "sum of dZ", lambda: dz.sum(over), x.numel(), [dz]))
    z = EquationTerm(
        "Z",
        "X^ * g + b, X^ = (X - m) / sqrt(v + eps)",
        lambda: normal * (1 if g is None else g) + (0 if b is None else b),
        4 * x.numel(),
        [x],
    )
    return LayerEquations(
        named_operands(X=x, g=weight, b=bias), [z], backward, ["m and v are the running mean and variance: constants"]
    )


def layer_norm(call: FunctionCall) -> LayerEquations:
    """input, normalized shape, weight, bias, eps."""
    x, weight, bias = call.tensor(0, "input"), call.get(2, "weight"), call.get(3, "bias")
    over = list(range(x.ndim - len(call.get(1, "normalized_shape")), x.ndim))
    return _normalization_equations(
        call,
        NormalizedInput(x, call.dz, over, weight, bias, call.get(4, "eps", 1e-5)),
        weight,
        bias,
        f"the last {_dims(len(over))}",
    )


def rms_norm(call: FunctionCall) -> LayerEquations:
    """input, normalized shape, weight, eps: Zhang and Sennrich, "Root mean square layer normalization", 2019."""
    x, weight, eps = call.tensor(0, "input"), call.get(2, "weight"), call.get(3, "eps")
    over = list(range(x.ndim - len(call.get(1, "normalized_shape")), x.ndim))
    seen = NormalizedInput(
        x, call.dz, over, weight, None, torch.finfo(x.dtype).eps if eps is None else eps, is_centred=False
    )
    return _normalization_equations(call, seen, weight, None, f"the last {_dims(len(over))}")


def _dims(count: int) -> str:
    return "dimension" if count == 1 else f"{count} dimensions"


def group_norm(call: FunctionCall) -> LayerEquations:
    """input, groups, weight, bias, eps."""
    x, groups, weight, bias = (
        call.tensor(0, "input"),
        call.get(1, "num_groups"),
        call.get(2, "weight"),
        call.get(3, "bias"),
    )
    shape = (len(x), groups, x.shape[1] // groups, prod(x.shape[2:]))
    g, b = (None if value is None else value.reshape(1, groups, -1, 1) for value in (weight, bias))
    seen = NormalizedInput(x.reshape(shape), call.dz.reshape(shape), [2, 3], g, b, call.get(4, "eps", 1e-5))
    return _normalization_equations(
        call, seen, weight, bias, f"each sample's {groups} groups of channels, and their places"
    )


def instance_norm(call: FunctionCall) -> LayerEquations:
    """input, weight, bias, running mean, running variance, whether of the input, momentum, eps."""
    x, weight, bias = call.tensor(0, "input"), call.get(1, "weight"), call.get(2, "bias")
    g, b = _along_channels(weight, x.ndim), _along_channels(bias, x.ndim)
    if not call.get(5, "use_input_stats", True):
        return _evaluation_equations(call, call.get(7, "eps"))
    seen = NormalizedInput(x, call.dz, list(range(2, x.ndim)), g, b, call.get(7, "eps", 1e-5))
    return _normalization_equations(call, seen, weight, bias, "the places of each sample's channels")


FORMULAS: dict[str, Formula] = {
    "batch_norm": batch_norm,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "group_norm": group_norm,
    "instance_norm": instance_norm,
}
