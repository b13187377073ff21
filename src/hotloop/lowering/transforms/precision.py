"""The precision axis: the number format of products in the forward pass; parameters and updates stay fp32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hotloop.core.float32_switches import apply_switches, read_switches
from hotloop.core.number_formats import IEEE, own_settings
from hotloop.lowering.context import LoweringContext
from hotloop.task import StepResult

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}

_TF32 = {"cuda.matmul": "tf32", "cudnn.conv": "tf32", "cudnn.rnn": "tf32", "mkldnn.matmul": "tf32"}


def apply_precision(parts: LoweringContext) -> LoweringContext:
    """Sets torch's precision switches around the whole step, and autocast around forward for bf16 and fp16.

    `fp32` and `tf32` set their own switches; other values use the process' current ones, whatever is set later. fp16
    scales the loss.
    """
    precision = parts.plan.precision
    device = "cuda" if any(device.type == "cuda" for device in parts.devices) else parts.device.type
    named = {"fp32": IEEE, "tf32": _TF32}.get(precision)
    switches = read_switches() | (named or {})
    around = partial(apply_switches, switches, device, written=named is not None)
    line = own_settings(switches, device) if precision == "default" else ""
    notes = (*parts.notes, line) if line else parts.notes
    parts = replace(parts, switches=switches, around=(*parts.around, around), notes=notes)
    if precision not in _HALF:
        return parts
    compute = parts.compute

    def autocast(model: nn.Module, batch: Any) -> StepResult:
        with autocast_context(parts):
            return compute(model, batch)

    return replace(parts, compute=autocast, scaled=precision == "fp16")


def autocast_context(parts: LoweringContext) -> AbstractContextManager[Any]:
    """Returns the context of the forward pass: autocast for bf16 and fp16."""
    dtype = _HALF.get(parts.plan.precision)
    return nullcontext() if dtype is None else torch.autocast(parts.device.type, dtype)
