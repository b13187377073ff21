"""Patches of torch while a step is traced (torch 2.13; no upstream issues known).

Tests without the patches: `test_torch_captures_onednn_s_lstm`, `test_torch_s_cache_of_strides_ignores_onednn_s_switch`,
`test_torch_s_lerp_asks_for_its_weight`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from hotloop.core.patches import patch_attribute
from hotloop.lowering.compile.inductor_patches.grouped_mm_strides import traceable_groups


@contextmanager
def trace_mode() -> Iterator[None]:
    """Applies the patches, and hides warnings, which the eager step has shown."""
    with warnings.catch_warnings(), reset_stride_cache():
        warnings.simplefilter("ignore")
        with patch_attribute(torch._VF, "lstm", _without_fused_lstm), traceable_groups():
            yield


def _without_fused_lstm(lstm: Callable[..., Any]) -> Callable[..., Any]:
    """Disables oneDNN's fused LSTM layer, whose gradient Inductor can't compile.

    oneDNN's convolutions stay enabled: their meta kernels alone return channels-last results for channels-last images.
    """

    @wraps(lstm)
    def plain(*args: Any) -> Any:
        with torch.backends.mkldnn.flags(enabled=False):
            return lstm(*args)

    return plain


@contextmanager
def reset_stride_cache() -> Iterator[None]:
    """Clears FakeTensorMode's cache if oneDNN is off: cached convolution strides ignore this switch."""
    clear = FakeTensorMode.cache_clear if not torch.backends.mkldnn.enabled else lambda: None
    clear()
    try:
        yield
    finally:
        clear()


def _lerp_(start: Tensor, end: Tensor, weight: Any) -> Tensor:
    return start.add_((end - start) * weight)


DECOMPOSITIONS = {torch.ops.aten.lerp_.Scalar: _lerp_}
"""Replaces torch's decomposition, which branches on `weight < 0.5`: unknown for a schedule's number."""
