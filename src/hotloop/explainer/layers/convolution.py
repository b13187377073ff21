"""Convolutions as matrix products.

Each window of the input is a row of a matrix X_col (im2col), and Z = X_col W^T. Chellapilla, Puri
and Simard, "High performance convolutional neural networks for document processing", IWFHR 2006.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from hotloop.explainer.layers.equation import (
    EquationTerm,
    Formula,
    FunctionCall,
    LayerEquations,
    NotCovered,
    named_operands,
    per_dimension,
)

MAX_WINDOW_NUMBERS = 2**24
"""Most elements of a matrix of windows; larger batches are computed in parts."""


@dataclass(frozen=True)
class WindowLayout:
    """The positions of a kernel on an image of any number of dimensions.

    Attributes:
        image: sizes without batch and channels.
        padding: sizes before and after each dimension.
    """

    image: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: list[int]
    padding: list[tuple[int, int]]
    dilation: list[int]

    @property
    def pad(self) -> list[int]:
        return [size + sum(pad) for size, pad in zip(self.image, self.padding, strict=True)]

    @property
    def counts(self) -> list[int]:
        """Number of windows in each dimension."""
        zipped = zip(self.pad, self.kernel, self.stride, self.dilation, strict=True)
        return [(size - step * (kernel - 1) - 1) // stride + 1 for size, kernel, stride, step in zipped]

    def window_indices(self) -> Tensor:
        """int64 (windows, elements of a window): indices into the flattened padded image."""
        found = torch.zeros(1, 1, dtype=torch.int64)
        for size, count, kernel, stride, step in zip(
            self.pad, self.counts, self.kernel, self.stride, self.dilation, strict=True
        ):
            along = torch.arange(count)[:, None] * stride + torch.arange(kernel) * step
            grown = found[:, None, :, None] * size + along[None, :, None, :]
            found = grown.reshape(len(found) * count, -1)
        return found

    def unfold(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Maps (N, C, *image) to (N, windows, C, elements of a window)."""
        pads = [side for pad in reversed(self.padding) for side in pad]
        flat = F.pad(x, pads, value=fill).flatten(2)
        places = self.window_indices().to(x.device)
        return flat[:, :, places].transpose(1, 2)

    def fold(self, windows: Tensor) -> Tensor:
        """Computes the adjoint of `unfold`: adds each number to the element it came from."""
        batch, _, channels, _ = windows.shape
        flat = windows.new_zeros(batch, channels, prod(self.pad))
        places = self.window_indices().to(windows.device)
        flat.index_add_(2, places.flatten(), windows.transpose(1, 2).flatten(2))
        image = flat.reshape(batch, channels, *self.pad)
        for place, (size, (before, _)) in enumerate(zip(self.image, self.padding, strict=True)):
            image = image.narrow(2 + place, before, size)
        return image


def convolution(call: FunctionCall) -> LayerEquations:
    """Shapes: input (N, C, ...), weight (O, C / groups, ...)."""
    x, w, b = call.tensor(0, "input"), call.tensor(1, "weight"), call.get(2, "bias")
    dims, groups = w.ndim - 2, call.get(6, "groups", 1)
    batched = _add_batch(x, dims)
    stride, dilation = per_dimension(call.get(3, "stride", 1), dims), per_dimension(call.get(5, "dilation", 1), dims)
    padding = _padding(call.get(4, "padding", 0), w.shape[2:], dilation)
    windows = WindowLayout(tuple(batched.shape[2:]), tuple(w.shape[2:]), stride, padding, dilation)
    dz = _add_batch(call.dz, dims)
    rows, columns = len(batched) * prod(windows.counts), prod(w.shape[1:])
    flops = 2.0 * rows * w.numel()
    text = f"X_col W^T{' + b' * (b is not None)}"
    out_shape, bias = call.dz.shape, 0.0 if b is None else b.view(-1, *[1] * dims)

    def forward() -> Tensor:
        return (_correlate(windows, batched, w, groups) + bias).reshape(out_shape)

    backward = [
        EquationTerm(
            "dX",
            "the windows of dZ W, added up where they overlap",
            lambda: _correlate_adjoint(windows, dz, w, groups).reshape(x.shape),
            flops,
            [dz, w],
        ),
        EquationTerm("dW", "dZ^T X_col", lambda: _weight_gradient(windows, batched, dz, w, groups), flops, [dz, x]),
    ]
    if b is not None:
        backward.append(
            EquationTerm(
                "db", "sum of dZ over all but its channels", lambda: dz.sum((0, *range(2, dz.ndim))), dz.numel(), [dz]
            )
        )
    notes = [f"as a product: X_col is {rows}x{columns * groups}, a row for each window; W is {w.shape[0]}x{columns}"]
    if groups > 1:
        notes.append(
            f"in {groups} groups of channels, a product of {rows}x{columns} by {columns}x{w.shape[0] // groups} each"
        )
    return LayerEquations(
        named_operands(X=x, W=w, b=b),
        [EquationTerm("Z", text, forward, flops, [x, w, *named_operands(b=b).values()])],
        backward,
        notes,
    )


def transposed_convolution(call: FunctionCall) -> LayerEquations:
    """Shapes: input (N, C, ...), weight (C, O / groups, ...). The forward is a convolution's backward."""
    x, w, b = call.tensor(0, "input"), call.tensor(1, "weight"), call.get(2, "bias")
    dims, groups = w.ndim - 2, call.get(6, "groups", 1)
    batched, dz = _add_batch(x, dims), _add_batch(call.dz, dims)
    padding = [(pad, pad) for pad in per_dimension(call.get(4, "padding", 0), dims)]
    stride, dilation = per_dimension(call.get(3, "stride", 1), dims), per_dimension(call.get(7, "dilation", 1), dims)
    windows = WindowLayout(tuple(dz.shape[2:]), tuple(w.shape[2:]), stride, padding, dilation)
    if windows.counts != list(batched.shape[2:]):
        raise NotCovered("its output is larger than its windows reach")
    rows, columns = len(batched) * prod(windows.counts), prod(w.shape[1:])
    flops = 2.0 * rows * w.numel()
    out_shape, bias = call.dz.shape, 0.0 if b is None else b.view(-1, *[1] * dims)

    def forward() -> Tensor:
        return (_correlate_adjoint(windows, batched, w, groups) + bias).reshape(out_shape)

    backward = [
        EquationTerm("dX", "dZ_col W^T", lambda: _correlate(windows, dz, w, groups).reshape(x.shape), flops, [dz, w]),
        EquationTerm("dW", "X^T dZ_col", lambda: _weight_gradient(windows, dz, batched, w, groups), flops, [dz, x]),
    ]
    if b is not None:
        backward.append(
            EquationTerm(
                "db", "sum of dZ over all but its channels", lambda: dz.sum((0, *range(2, dz.ndim))), dz.numel(), [dz]
            )
        )
    text = "the windows of X W, added up where they overlap" + " + b" * (b is not None)
    notes = [f"as a product: X is {rows}x{w.shape[0]}, W is {w.shape[0]}x{columns}, dZ_col {rows}x{columns * groups}"]
    if groups > 1:
        notes.append(
            f"in {groups} groups of channels, a product of {rows}x{w.shape[0] // groups} by "
            f"{w.shape[0] // groups}x{columns} each"
        )
    return LayerEquations(
        named_operands(X=x, W=w, b=b),
        [EquationTerm("Z", text, forward, flops, [x, w, *named_operands(b=b).values()])],
        backward,
        notes,
    )


def _add_batch(x: Tensor, dims: int) -> Tensor:
    return x if x.ndim == dims + 2 else x[None]


def _padding(given_: object, kernel: torch.Size, dilation: list[int]) -> list[tuple[int, int]]:
    if given_ == "same":
        totals = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    values = [0] * len(kernel) if given_ == "valid" else per_dimension(given_, len(kernel))
    return [(value, value) for value in values]


def _batch_parts(windows: WindowLayout, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Splits tensors along the batch so that the windows of a part don't exceed the maximum."""
    channels = max(tensor.shape[1] for tensor in tensors)
    size = max(1, MAX_WINDOW_NUMBERS // max(1, channels * prod(windows.counts) * prod(windows.kernel)))
    return list(zip(*(tensor.split(size) for tensor in tensors), strict=True))


def _group_columns(columns: Tensor, groups: int) -> Tensor:
    """Maps (n, windows, C, k) to (groups, n * windows, C / groups * k)."""
    n, count, channels, places = columns.shape
    split = columns.reshape(n * count, groups, channels // groups * places)
    return split.transpose(0, 1)


def _rows(image: Tensor, groups: int) -> Tensor:
    """Maps (n, C, ...) to (groups, n * windows, C / groups)."""
    rows = image.flatten(2).transpose(1, 2).reshape(-1, groups, image.shape[1] // groups)
    return rows.transpose(0, 1)


def _correlate(windows: WindowLayout, x: Tensor, w: Tensor, groups: int) -> Tensor:
    """Computes X_col W^T: (n, C, *image) -> (n, O, *counts); w (O, C / groups, ...)."""
    matrix = w.reshape(groups, w.shape[0] // groups, -1)

    def part(piece: Tensor) -> Tensor:
        z = _group_columns(windows.unfold(piece), groups) @ matrix.mT
        return z.transpose(0, 1).reshape(len(piece), -1, w.shape[0]).mT.reshape(len(piece), -1, *windows.counts)

    return torch.cat([part(piece) for (piece,) in _batch_parts(windows, x)])


def _correlate_adjoint(windows: WindowLayout, dz: Tensor, w: Tensor, groups: int) -> Tensor:
    """Computes the adjoint of `_correlate`: (n, O, *counts) -> (n, C, *image)."""
    matrix = w.reshape(groups, w.shape[0] // groups, -1)
    channels, places = w.shape[1] * groups, prod(windows.kernel)

    def part(piece: Tensor) -> Tensor:
        columns = (_rows(piece, groups) @ matrix).transpose(0, 1)
        return windows.fold(columns.reshape(len(piece), -1, channels, places))

    return torch.cat([part(piece) for (piece,) in _batch_parts(windows, dz)])


def _weight_gradient(windows: WindowLayout, x: Tensor, dz: Tensor, w: Tensor, groups: int) -> Tensor:
    """Computes dZ^T X_col in the weight's shape."""

    def product(image: Tensor, out: Tensor) -> Tensor:
        return _rows(out, groups).mT @ _group_columns(windows.unfold(image), groups)

    total = sum((product(a, b) for a, b in _batch_parts(windows, x, dz)), start=w.new_zeros(()))
    return total.reshape(w.shape)


FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(["conv1d", "conv2d", "conv3d"], convolution),
    **dict.fromkeys(["conv_transpose1d", "conv_transpose2d", "conv_transpose3d"], transposed_convolution),
}
