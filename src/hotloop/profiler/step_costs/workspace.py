"""Bytes that an operator allocates beside its results, of which fake tensors know nothing.

The sizes are those of oneDNN on a CPU with AVX2, measured by torch's allocator (torch 2.13): convolutions copy their
tensors to a blocked layout, whose channels are multiples of 8, and an LSTM keeps its gates for the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

_CHANNELS = 8  # of a block
_FLAT_CHANNELS = (1, 3)  # of images that a first convolution reads in their own layout
_LSTM_STATES, _LSTM_START, _LSTM_SCRATCH = 15.2, 10.0, 4.17  # floats per step, row and unit; per row and unit
CUBLAS_BYTES = 8_519_680  # torch's default workspace of cuBLAS, `:4096:2:16:8`
_CUBLAS_NAMES = ("mm", "addmm", "bmm", "baddbmm")


def workspace_bytes(name: str, arguments: Sequence[Any], device: str) -> int:
    """Returns the bytes that an operator frees when it ends."""
    if device != "cpu":
        return CUBLAS_BYTES if name in _CUBLAS_NAMES else 0
    if name == "convolution":
        return _convolution(*arguments)
    if name == "convolution_backward":
        return _convolution_backward(*arguments)
    if name.startswith("mkldnn_rnn_layer"):
        x, *weights = arguments[:3]
        floats = _LSTM_SCRATCH * prod(x.shape[:-1]) * weights[1].shape[-1] + sum(weight.numel() for weight in weights)
        return int(floats * x.element_size())
    return 0


def saved_workspace_bytes(name: str, arguments: Sequence[Any]) -> int:
    """Returns the bytes that an operator saves for its backward in its last result, which a fake one lacks."""
    if name != "mkldnn_rnn_layer":
        return 0
    x, recurrent = arguments[0], arguments[2]
    steps, rows, units = x.shape[0], x.shape[1], recurrent.shape[-1]
    return int((_LSTM_STATES * steps + _LSTM_START) * rows * units * x.element_size())


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _blocked(size: int, channels: int) -> int:
    return size * (-(-channels // _CHANNELS) * _CHANNELS) // max(channels, 1)


def _convolution(
    image: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, *rest: Any
) -> int:
    out, channels = _result_bytes(image, weight, stride, padding, dilation, transposed, *rest)
    blocked_out, weights = _blocked(out, channels), _bytes(weight)
    flat = image.shape[1] in _FLAT_CHANNELS and not transposed
    blocked_in = 0 if flat else _blocked(_bytes(image), image.shape[1])
    if transposed:
        return max(2 * out, 2 * blocked_in + weights)
    return max(blocked_in + weights + blocked_out - out, blocked_out)


def _result_bytes(
    image: Tensor,
    weight: Tensor,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    extra: Any,
    groups: int,
) -> tuple[int, int]:
    """Returns the bytes and channels of a convolution's result."""

    def at(values: Any, axis: int) -> int:
        return values[axis % len(values)]

    sides = []
    for axis, (size, kernel) in enumerate(zip(image.shape[2:], weight.shape[2:], strict=True)):
        reach = at(dilation, axis) * (kernel - 1)
        if transposed:
            sides.append((size - 1) * at(stride, axis) - 2 * at(padding, axis) + reach + at(extra, axis) + 1)
        else:
            sides.append((size + 2 * at(padding, axis) - reach - 1) // at(stride, axis) + 1)
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    return image.shape[0] * channels * prod(sides) * image.element_size(), channels


def _convolution_backward(
    gradient: Tensor,
    image: Tensor,
    weight: Tensor,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    extra: Any,
    groups: int,
    mask: Any,
) -> int:
    """Returns the most of two products: for the input's gradient, then, while this exists, for the weight's."""
    plain_in, weights = _bytes(image), _bytes(weight)
    blocked_in = _blocked(plain_in, image.shape[1])
    blocked_out = _blocked(_bytes(gradient), gradient.shape[1])
    is_strided, is_depthwise = max(stride) > 1, groups == image.shape[1] and groups > 1
    results = plain_in * mask[0] + weights * mask[1]
    peaks = [0]
    if mask[0]:
        copies = 3 * plain_in if is_strided and not transposed else plain_in + blocked_in
        peaks += [blocked_out + weights + blocked_in, copies]
    if mask[1]:
        is_flat = image.shape[1] in _FLAT_CHANNELS and not is_strided
        copied = 0 if is_depthwise else blocked_out + (0 if is_flat else blocked_in)
        peaks.append(plain_in * mask[0] + copied + weights)
    return max(max(peaks) - results, 0)
