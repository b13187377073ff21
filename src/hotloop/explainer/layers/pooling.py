"""Pooling: the maximum or the mean of each window."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from hotloop.explainer.layers.convolution import WindowLayout
from hotloop.explainer.layers.equation import (
    EquationTerm,
    Formula,
    FunctionCall,
    LayerEquations,
    NotCovered,
    per_dimension,
)


def _windows(call: FunctionCall, dims: int, *, dilation: object = 1) -> tuple[WindowLayout, Tensor]:
    """Returns the windows, and the input as (N, C, ...). Windows beyond the padding (ceil_mode) aren't covered."""
    x = call.tensor(0, "input")
    batched = x if x.ndim == dims + 2 else x[None]
    kernel = per_dimension(call.get(1, "kernel_size"), dims)
    stride = per_dimension(call.get(2, "stride") or kernel, dims)
    padding = [(pad, pad) for pad in per_dimension(call.get(3, "padding", 0), dims)]
    windows = WindowLayout(tuple(batched.shape[2:]), tuple(kernel), stride, padding, per_dimension(dilation, dims))
    if tuple(windows.counts) != tuple(call.dz.shape[-dims:]):
        raise NotCovered("a window reaches beyond the padding (ceil_mode)")
    return windows, batched


def max_pool(call: FunctionCall) -> LayerEquations:
    """Z is the maximum of each window; its gradient goes to that element alone."""
    dims = int(call.name[len("max_pool")])
    x, dz = call.tensor(0, "input"), call.dz
    windows, image = _windows(call, dims, dilation=call.get(4, "dilation", 1))

    def columns() -> Tensor:
        return windows.unfold(image, fill=-torch.inf)

    def gradient() -> Tensor:
        seen = columns()
        chosen = torch.zeros_like(seen).scatter_(3, seen.argmax(3, keepdim=True), 1.0)
        grad = dz.reshape(*image.shape[:2], -1).transpose(1, 2).unsqueeze(3)
        return windows.fold(chosen * grad).reshape(x.shape)

    def forward() -> Tensor:
        return columns().amax(3).transpose(1, 2).reshape(dz.shape)

    flops = dz.numel() * prod(windows.kernel)
    return LayerEquations(
        {"X": x},
        [EquationTerm("Z", f"the largest of each window of {_times(windows.kernel)}", forward, flops, [x])],
        [EquationTerm("dX", "dZ at the place of the largest, zero elsewhere", gradient, dz.numel(), [dz, x])],
    )


def average_pool(call: FunctionCall) -> LayerEquations:
    """Z is the mean of each window; its gradient is divided evenly over the window."""
    dims = int(call.name[len("avg_pool")])
    x, dz = call.tensor(0, "input"), call.dz
    windows, image = _windows(call, dims)
    if call.get(6, "divisor_override") is not None:
        raise NotCovered("it divides by a number of its own")
    counted = torch.ones_like(image[:1, :1])
    whole = float(prod(windows.kernel))
    size = torch.full_like(windows.unfold(counted).sum(3), whole)
    if not call.get(5, "count_include_pad", True):
        size = windows.unfold(counted).sum(3)

    def forward() -> Tensor:
        return (windows.unfold(image).sum(3) / size).transpose(1, 2).reshape(dz.shape)

    def gradient() -> Tensor:
        grad = dz.reshape(*image.shape[:2], -1).transpose(1, 2) / size
        return windows.fold(grad.unsqueeze(3).expand(*grad.shape, prod(windows.kernel))).reshape(x.shape)

    flops = dz.numel() * prod(windows.kernel)
    return LayerEquations(
        {"X": x},
        [EquationTerm("Z", f"mean of each window of {_times(windows.kernel)}", forward, flops, [x])],
        [
            EquationTerm(
                "dX", f"dZ / {whole:g} at each place of its window, summed where they overlap", gradient, flops, [dz]
            )
        ],
    )


def adaptive_average_pool(call: FunctionCall) -> LayerEquations:
    """Z is the mean of near-equal parts: window i of n over m elements is from i m / n to (i + 1) m / n."""
    dims = int(call.name[len("adaptive_avg_pool")])
    x, dz = call.tensor(0, "input"), call.dz
    parts = [_averages(size, count).to(x.device) for size, count in zip(x.shape[-dims:], dz.shape[-dims:], strict=True)]

    def along(value: Tensor, *, back: bool) -> Tensor:
        for part in parts:  # each step reduces the first dimension and appends the result as the last
            value = torch.tensordot(value, part if back else part.T, dims=([value.ndim - dims], [0]))
        return value

    return LayerEquations(
        {"X": x},
        [
            EquationTerm(
                "Z",
                f"means over {_times(dz.shape[-dims:])} even parts of {_times(x.shape[-dims:])}",
                lambda: along(x, back=False),
                x.numel(),
                [x],
            )
        ],
        [
            EquationTerm(
                "dX", "dZ / size of its part, at each place of it", lambda: along(dz, back=True), x.numel(), [dz]
            )
        ],
    )


def adaptive_max_pool(call: FunctionCall) -> LayerEquations:
    """Z is the maximum of each part; all parts must have the same size."""
    dims = int(call.name[len("adaptive_max_pool")])
    x, dz = call.tensor(0, "input"), call.dz
    sizes, counts = x.shape[-dims:], dz.shape[-dims:]
    if any(size % count for size, count in zip(sizes, counts, strict=True)):
        raise NotCovered("its parts overlap")
    kernel = [size // count for size, count in zip(sizes, counts, strict=True)]
    return max_pool(replace(call, name=f"max_pool{dims}d", arguments=(x, kernel), options={}))


def _averages(size: int, count: int) -> Tensor:
    """Returns the (count, size) matrix of the parts' means."""
    matrix = torch.zeros(count, size, dtype=torch.float64)
    for part in range(count):
        start, end = part * size // count, -(-(part + 1) * size // count)
        matrix[part, start:end] = 1 / (end - start)
    return matrix


def _times(sizes: object) -> str:
    return "x".join(str(size) for size in sizes)  # type: ignore[attr-defined]


FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(["max_pool1d", "max_pool2d", "max_pool3d"], max_pool),
    **dict.fromkeys(["avg_pool1d", "avg_pool2d", "avg_pool3d"], average_pool),
    **dict.fromkeys(["adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"], adaptive_max_pool),
    **dict.fromkeys(["adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"], adaptive_average_pool),
}
