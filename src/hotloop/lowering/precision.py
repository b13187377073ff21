"""The precision axis: in which numbers the forward pass multiplies; parameters and updates stay fp32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hotloop.lowering.ingredients import Ingredients
from hotloop.task import Computed

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def in_precision(parts: Ingredients) -> Ingredients:
    """tf32, or fp32 whatever the program chose, around the whole step; bf16 and fp16 by torch's autocast around forward.

    fp16 has its loss scaled.
    """
    precision = parts.plan.precision
    if precision == "tf32":
        return replace(parts, around=(*parts.around, tf32))
    if precision == "fp32":
        on_cuda = any(device.type == "cuda" for device in parts.devices)
        return replace(parts, around=(*parts.around, fp32 if on_cuda else fp32_on_cpu))
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
def fp32_on_cpu() -> Iterator[None]:
    """The same of oneDNN's, which compute in bf16 where a program chose that."""
    mkldnn: Any = torch.backends.mkldnn
    switches = (mkldnn.matmul, mkldnn.conv, mkldnn.rnn)
    with _put_back(switches):
        for switch in switches:
            switch.fp32_precision = "ieee"
        yield


@contextmanager
def _products(kind: str) -> Iterator[None]:
    """Sets torch's switches by all of their names, of which the older aren't readable where a program set the newer."""
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    mkldnn: Any = torch.backends.mkldnn
    newer = (matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul)  # the last since the oldest name stands for it, too
    with _put_back(newer):
        older = [(one, one.allow_tf32) for one in (matmul, cudnn) if _is_readable(one)]
        oldest = _oldest()
        try:
            for switch, _ in older:
                switch.allow_tf32 = kind == "tf32"
            if oldest is not None:
                torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
            for one in newer:
                one.fp32_precision = kind
            yield
        finally:
            for switch, allowed in older:
                switch.allow_tf32 = allowed
            if oldest is not None:
                torch.set_float32_matmul_precision(oldest)


@contextmanager
def _put_back(switches: Sequence[Any]) -> Iterator[None]:
    """Whatever is done to these, they are as before in the end."""
    chosen = [one.fp32_precision for one in switches]
    try:
        yield
    finally:
        for one, precision in zip(switches, chosen, strict=True):
            one.fp32_precision = "none"  # takes on what is chosen for all of them together
            if one.fp32_precision != precision:
                one.fp32_precision = precision


def _oldest() -> str | None:
    """What the program chose for all products at once, which alone tells `medium` from `high`; None if not readable."""
    with suppress(RuntimeError):
        return torch.get_float32_matmul_precision()
    return None


def _is_readable(switch: Any) -> bool:
    with suppress(RuntimeError):
        return switch.allow_tf32 is not None
    return False
