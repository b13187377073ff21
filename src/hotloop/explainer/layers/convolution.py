"""Convolutions as matrix products, by the windows of `hotloop.arrays`.

Each window of the input is a row of a matrix X_col (im2col), and Z = X_col W^T. Chellapilla, Puri
and Simard, "High performance convolutional neural networks for document processing", IWFHR 2006.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from hotloop.arrays.conv import Window
from hotloop.explainer.layers.equation import (
    EquationTerm,
    Formula,
    FunctionCall,
    LayerEquations,
    NotCovered,
    Side,
    named_operands,
    per_dimension,
)

MAX_WINDOW_NUMBERS = 2**24
"""Most elements of a matrix of windows; larger batches are computed in parts."""


def convolution(call: FunctionCall) -> LayerEquations:
    """Shapes: input (N, C, ...), weight (O, C / groups, ...)."""
    x, w = call.tensor(0, "input"), call.tensor(1, "weight")
    dims, given = w.ndim - 2, call.get(4, "padding", 0)
    dilation = per_dimension(call.get(5, "dilation", 1), dims)
    batched, padding, uneven = _add_batch(x, dims), given, [0] * dims
    if given in ("same", "valid"):  # an odd padding has one more at the end
        totals = [step * (size - 1) * (given == "same") for size, step in zip(w.shape[2:], dilation, strict=True)]
        padding, uneven = [total // 2 for total in totals], [total % 2 for total in totals]
    image = F.pad(batched, [side for more in reversed(uneven) for side in (0, more)])
    window = Window(
        tuple(w.shape[2:]), _sizes(call.get(3, "stride", 1), dims), _sizes(padding, dims), tuple(dilation), dims
    )
    groups, dz = call.get(6, "groups", 1), _add_batch(call.dz, dims)

    def gradient() -> Tensor:
        found = _correlate_adjoint(window, dz, w, groups, tuple(image.shape[2:]))
        return found[:, :, *map(slice, batched.shape[2:])].reshape(x.shape)

    rows, columns = len(batched) * prod(dz.shape[2:]), prod(w.shape[1:])
    flops = 2.0 * rows * w.numel()
    notes = [f"as a product: X_col is {rows}x{columns * groups}, a row for each window; W is {w.shape[0]}x{columns}"]
    if groups > 1:
        inner = columns, w.shape[0] // groups
        notes.append(f"in {groups} groups of channels, a product of {rows}x{inner[0]} by {inner[0]}x{inner[1]} each")
    return _equations(
        call,
        ("X_col W^T", lambda: _correlate(window, image, w, groups), flops),
        ("the windows of dZ W, added up where they overlap", gradient, flops),
        ("dZ^T X_col", lambda: _weight_gradient(window, image, dz, w, groups), flops),
        notes,
    )


def transposed_convolution(call: FunctionCall) -> LayerEquations:
    """Shapes: input (N, C, ...), weight (C, O / groups, ...). The forward is a convolution's backward."""
    x, w = call.tensor(0, "input"), call.tensor(1, "weight")
    dims, groups = w.ndim - 2, call.get(6, "groups", 1)
    batched, dz = _add_batch(x, dims), _add_batch(call.dz, dims)
    settings = (call.get(3, "stride", 1), call.get(4, "padding", 0), call.get(7, "dilation", 1))
    stride, padding, dilation = (_sizes(value, dims) for value in settings)
    window = Window(tuple(w.shape[2:]), stride, padding, dilation, dims)
    image = tuple(dz.shape[2:])
    if window.positions(image) != tuple(batched.shape[2:]):
        raise NotCovered("its output is larger than its windows reach")
    rows, columns = len(batched) * prod(batched.shape[2:]), prod(w.shape[1:])
    flops = 2.0 * rows * w.numel()
    notes = [f"as a product: X is {rows}x{w.shape[0]}, W is {w.shape[0]}x{columns}, dZ_col {rows}x{columns * groups}"]
    if groups > 1:
        inner = w.shape[0] // groups, columns
        notes.append(f"in {groups} groups of channels, a product of {rows}x{inner[0]} by {inner[0]}x{inner[1]} each")
    return _equations(
        call,
        (
            "the windows of X W, added up where they overlap",
            lambda: _correlate_adjoint(window, batched, w, groups, image),
            flops,
        ),
        ("dZ_col W^T", lambda: _correlate(window, dz, w, groups).reshape(x.shape), flops),
        ("X^T dZ_col", lambda: _weight_gradient(window, dz, batched, w, groups), flops),
        notes,
    )


def _equations(call: FunctionCall, z: Side, dx: Side, dw: Side, notes: list[str]) -> LayerEquations:
    x, w, b = call.tensor(0, "input"), call.tensor(1, "weight"), call.get(2, "bias")
    dims, shape = w.ndim - 2, call.dz.shape
    dz, bias = _add_batch(call.dz, dims), 0.0 if b is None else b.view(-1, *[1] * dims)
    forward = EquationTerm(
        "Z",
        z[0] + " + b" * (b is not None),
        lambda: (z[1]() + bias).reshape(shape),
        z[2],
        [x, w, *named_operands(b=b).values()],
    )
    backward = [EquationTerm("dX", *dx, [dz, w]), EquationTerm("dW", *dw, [dz, x])]
    if b is not None:
        total = "sum of dZ over all but its channels"
        backward.append(EquationTerm("db", total, lambda: dz.sum((0, *range(2, dz.ndim))), dz.numel(), [dz]))
    return LayerEquations(named_operands(X=x, W=w, b=b), [forward], backward, notes)


def _add_batch(x: Tensor, dims: int) -> Tensor:
    return x if x.ndim == dims + 2 else x[None]


def _sizes(values: object, dims: int) -> tuple[int, ...]:
    return tuple(per_dimension(values, dims))


def _batch_parts(window: Window, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Splits tensors along the batch so that the windows of a part don't exceed the maximum."""
    numbers = max(tensor[:1].numel() for tensor in tensors) * window.places
    return list(zip(*(tensor.split(max(1, MAX_WINDOW_NUMBERS // max(1, numbers))) for tensor in tensors), strict=True))


def _matrix(w: Tensor, groups: int) -> Tensor:
    """Maps (O, C / groups, ...) to (groups, O / groups, C / groups * elements of a window)."""
    return w.reshape(groups, w.shape[0] // groups, -1)


def _rows(image: Tensor, groups: int) -> Tensor:
    """Maps (n, O, ...) to (n, groups, O / groups, windows)."""
    return image.reshape(len(image), groups, image.shape[1] // groups, -1)


def _correlate(window: Window, x: Tensor, w: Tensor, groups: int) -> Tensor:
    """Computes X_col W^T: (n, C, *image) -> (n, O, *counts)."""
    parts = [_matrix(w, groups) @ window.columns(part, groups) for (part,) in _batch_parts(window, x)]
    return torch.cat(parts).reshape(len(x), w.shape[0], *window.positions(tuple(x.shape[2:])))


def _correlate_adjoint(window: Window, dz: Tensor, w: Tensor, groups: int, image: tuple[int, ...]) -> Tensor:
    """Computes the adjoint of `_correlate`: (n, O, *counts) -> (n, C, *image)."""
    parts = _batch_parts(window, dz.new_empty(1).expand(len(dz), w.shape[1] * groups, *image), dz)
    return torch.cat([window.fold_columns(_matrix(w, groups).mT @ _rows(part, groups), image) for _, part in parts])


def _weight_gradient(window: Window, x: Tensor, dz: Tensor, w: Tensor, groups: int) -> Tensor:
    """Computes dZ^T X_col in the weight's shape."""
    parts = _batch_parts(window, x, dz)
    products = [(_rows(out, groups) @ window.columns(part, groups).mT).sum(0) for part, out in parts]
    return torch.stack(products).sum(0).reshape(w.shape)


FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(["conv1d", "conv2d", "conv3d"], convolution),
    **dict.fromkeys(["conv_transpose1d", "conv_transpose2d", "conv_transpose3d"], transposed_convolution),
}
