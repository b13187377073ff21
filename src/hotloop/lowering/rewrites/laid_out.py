"""A tensor in the order of memory of another, where the compiler keeps that with channels last.

Inductor lays what convolutions give with channels last, and what dense layers give by rows. An operation that takes both,
such as the gradient of the pooling between them, would gather the one number by number, once for each number of a window.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

_CHANNELS_LAST = [3, 0, 2, 1]
"""Inductor's ranks of the strides of (samples, channels, rows, columns): the channels' is the smallest."""


def laid_out(given: Tensor, image: Tensor) -> Tensor:
    """The same values; both (samples, channels, rows, columns), of other rows and columns."""
    return _operator()(given, image)


@cache
def _operator() -> Any:
    @torch.library.custom_op("hotloop::laid_out", mutates_args=())
    def laid_out(given: Tensor, image: Tensor) -> Tensor:
        return given.clone()

    @laid_out.register_fake
    def _(given: Tensor, image: Tensor) -> Tensor:
        return torch.empty_like(given)

    return torch.ops.hotloop.laid_out.default


@cache
def known_to_inductor() -> None:
    """Has Inductor know the operation, before it compiles a graph that may have some."""
    from torch._inductor.lowering import register_lowering

    register_lowering(_operator(), type_promotion_kind=None)(_lowered)


def _lowered(given: Any, image: Any) -> Any:
    from torch._inductor.ir import ExternKernel

    return ExternKernel.require_stride_order(given, _CHANNELS_LAST) if _has_channels_last(image) else given


def _has_channels_last(image: Any) -> bool:
    """Whether what an image is computed from, number by number, lies so."""
    from torch._inductor.ir import get_stride_order
    from torch._inductor.virtualized import V

    found = [V.graph.try_get_buffer(name) for name in image.get_read_names()]
    same = [one for one in found if one is not None and list(one.get_size()) == list(image.get_size())]
    return bool(same) and all(get_stride_order(one.get_stride()) == _CHANNELS_LAST for one in same)
