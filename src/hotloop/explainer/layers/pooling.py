"""Pooling: the maximum or the mean of each window."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hotloop.arrays.conv import Window
from hotloop.explainer.layers.equation import (
    Formula,
    FunctionCall,
    LayerEquations,
    NotCovered,
    one_operand,
    per_dimension,
)


def _window(call: FunctionCall, dims: int, *, dilation: object = 1) -> tuple[Window, Tensor]:
    """Returns the window, and the input as (N, C, ...). Windows beyond the padding (ceil_mode) aren't covered."""
    x = call.tensor(0, "input")
    batched = x if x.ndim == dims + 2 else x[None]
    kernel = call.get(1, "kernel_size")
    settings = (kernel, call.get(2, "stride") or kernel, call.get(3, "padding", 0), dilation)
    size, stride, pad, spread = (tuple(per_dimension(value, dims)) for value in settings)
    window = Window(size, stride, pad, spread, dims)
    if window.positions(tuple(batched.shape[2:])) != tuple(call.dz.shape[-dims:]):
        raise NotCovered("a window reaches beyond the padding (ceil_mode)")
    return window, batched


def _over_places(dz: Tensor, image: Tensor, dims: int) -> Tensor:
    """Returns dz as (N, C, 1, ...), to broadcast over the places of a window."""
    return dz.reshape(*image.shape[:2], 1, *dz.shape[-dims:])


def max_pool(call: FunctionCall) -> LayerEquations:
    """Z is the maximum of each window; its gradient goes to that element alone."""
    dims = int(call.name[len("max_pool")])
    x, dz = call.tensor(0, "input"), call.dz
    window, image = _window(call, dims, dilation=call.get(4, "dilation", 1))

    def gradient() -> Tensor:
        seen = window.unfold(image, fill=-torch.inf)
        chosen = torch.zeros_like(seen).scatter_(2, seen.argmax(2, keepdim=True), 1.0)
        return window.fold(chosen * _over_places(dz, image, dims), tuple(image.shape[2:])).reshape(x.shape)

    return one_operand(
        x,
        (
            f"the largest of each window of {window!r}",
            lambda: window.unfold(image, fill=-torch.inf).amax(2).reshape(dz.shape),
            dz.numel() * window.places,
        ),
        ("dZ at the place of the largest, zero elsewhere", gradient, dz.numel()),
        [dz, x],
    )


def average_pool(call: FunctionCall) -> LayerEquations:
    """Z is the mean of each window; its gradient is divided evenly over the window."""
    dims = int(call.name[len("avg_pool")])
    x, dz = call.tensor(0, "input"), call.dz
    window, image = _window(call, dims)
    if call.get(6, "divisor_override") is not None:
        raise NotCovered("it divides by a number of its own")
    inside = window.unfold(torch.ones_like(image[:1, :1]))  # ones, and zeros in the padding
    size = inside.sum(2) if not call.get(5, "count_include_pad", True) else float(window.places)

    def gradient() -> Tensor:
        share = _over_places(dz, image, dims) / (size[:, :, None] if isinstance(size, Tensor) else size)
        shape = (*share.shape[:2], window.places, *share.shape[3:])
        return window.fold(share.expand(shape), tuple(image.shape[2:])).reshape(x.shape)

    flops = dz.numel() * window.places
    return one_operand(
        x,
        (
            f"mean of each window of {window!r}",
            lambda: (window.unfold(image).sum(2) / size).reshape(dz.shape),
            flops,
        ),
        (f"dZ / {window.places} at each place of its window, summed where they overlap", gradient, flops),
        [dz],
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

    means = f"means over {_times(dz.shape[-dims:])} even parts of {_times(x.shape[-dims:])}"
    return one_operand(
        x,
        (means, lambda: along(x, back=False), x.numel()),
        ("dZ / size of its part, at each place of it", lambda: along(dz, back=True), x.numel()),
        [dz],
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
