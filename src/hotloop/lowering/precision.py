"""The precision axis: in which numbers the forward pass multiplies; parameters and updates stay fp32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hotloop.lowering.ingredients import Ingredients
from hotloop.task import Computed

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def in_precision(parts: Ingredients) -> Ingredients:
    """tf32, or on CUDA none of it, around the whole step; bf16 and fp16 by torch's autocast around the forward pass.

    fp16 has its loss scaled.
    """
    precision = parts.plan.precision
    if precision == "tf32":
        return replace(parts, around=(*parts.around, tf32))
    if precision == "fp32" and any(device.type == "cuda" for device in parts.devices):
        return replace(parts, around=(*parts.around, fp32))
    if precision not in _HALF:
        return parts
    compute = parts.compute

    def autocast(model: nn.Module, batch: Any) -> Computed:
        with numbers(parts):
            return compute(model, batch)

    return replace(parts, compute=autocast, scaled=precision == "fp16")


def numbers(parts: Ingredients) -> AbstractContextManager[Any]:
    """What the forward pass computes in: torch's autocast under bf16 and fp16."""
    dtype = _HALF.get(parts.plan.precision)
    return nullcontext() if dtype is None else torch.autocast(parts.device.type, dtype)


def tf32() -> AbstractContextManager[None]:
    """Matrix products and convolutions of fp32 numbers on NVIDIA's tensor cores, with 10 bits of mantissa."""
    return _products("tf32")


def fp32() -> AbstractContextManager[None]:
    """The same with all 23 bits: left alone, torch takes tf32 for convolutions and recurrent layers."""
    return _products("ieee")


@contextmanager
def _products(kind: str) -> Iterator[None]:
    """Sets torch's switches by both of their names, of which the older is not readable where a program set the newer."""
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    newer = (matmul, cudnn.conv, cudnn.rnn)
    chosen = [one.fp32_precision for one in newer]
    older = [(one, one.allow_tf32) for one in (matmul, cudnn) if _is_readable(one)]
    try:
        for switch, _ in older:
            switch.allow_tf32 = kind == "tf32"
        for one in newer:
            one.fp32_precision = kind
        yield
    finally:
        for switch, allowed in older:
            switch.allow_tf32 = allowed
        for one, precision in zip(newer, chosen, strict=True):
            one.fp32_precision = "none"  # takes on what is chosen for all of them together
            if one.fp32_precision != precision:
                one.fp32_precision = precision


def _is_readable(switch: Any) -> bool:
    with suppress(RuntimeError):
        return switch.allow_tf32 is not None
    return False
