"""The precision axis: in which numbers the forward pass multiplies; parameters and updates stay fp32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hotloop.lowering.ingredients import Ingredients
from hotloop.task import Computed

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def in_precision(parts: Ingredients) -> Ingredients:
    """tf32 around the whole step; bf16 and fp16 by torch's autocast around the forward pass, fp16 with a scaled loss."""
    precision = parts.plan.precision
    if precision == "tf32":
        return replace(parts, around=(*parts.around, tf32))
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


@contextmanager
def tf32() -> Iterator[None]:
    """Matrix products and convolutions of fp32 numbers on NVIDIA's tensor cores, with 10 bits of mantissa."""
    settings: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [setting.allow_tf32 for setting in settings]
    try:
        for setting in settings:
            setting.allow_tf32 = True
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.allow_tf32 = value
