"""torch's switches for the number format of float32 products: reading, setting and restoring."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from hotloop.core.number_formats import Float32Switches

_LEVELS = {"ieee": "highest", "tf32": "high", "bf16": "medium"}
"""The levels of `torch.set_float32_matmul_precision` by switch value."""

_AT_LEVEL = {level: switch for switch, level in _LEVELS.items()}


_MATMUL: Any = torch.backends.cuda.matmul
_CUDNN: Any = torch.backends.cudnn
_MKLDNN: Any = torch.backends.mkldnn
_SWITCHES = {
    "cuda.matmul": _MATMUL,
    "cudnn.conv": _CUDNN.conv,
    "cudnn.rnn": _CUDNN.rnn,
    "mkldnn.matmul": _MKLDNN.matmul,
    "mkldnn.conv": _MKLDNN.conv,
    "mkldnn.rnn": _MKLDNN.rnn,
}


def read_switches() -> dict[str, str]:
    """Returns the switches of this process, whichever torch interface set them; `none` counts as `ieee`."""
    return {name: "ieee" if (value := one.fp32_precision) == "none" else value for name, one in _SWITCHES.items()}


@contextmanager
def apply_switches(switches: Float32Switches, device: str, *, written: bool = False) -> Iterator[None]:
    """Sets torch's switches through all three torch interfaces within the context.

    torch refuses to read an tf32_switches interface if a program has set a newer one.

    Args:
        device: the kind of device that computes; it determines `set_float32_matmul_precision`, which affects CPU and CUDA.
        written: set the switches even if the process has these values already.
    """
    wanted, level = _consistent_switches(switches, device)
    matmul_level = _matmul_level()
    if not written and matmul_level in (level, None) and read_switches() == wanted:
        yield
        return
    with _restore_switches():
        tf32_switches = [(one, one.allow_tf32) for one in (_MATMUL, _CUDNN) if _is_readable(one)]
        try:
            for one, _ in tf32_switches:
                one.allow_tf32 = wanted["cudnn.conv" if one is _CUDNN else "cuda.matmul"] == "tf32"
            if matmul_level is not None:
                torch.set_float32_matmul_precision(level)
            for name, switch in _SWITCHES.items():
                switch.fp32_precision = wanted[name]
            yield
        finally:
            for one, allowed in tf32_switches:
                one.allow_tf32 = allowed
            if matmul_level is not None:
                torch.set_float32_matmul_precision(matmul_level)


def _consistent_switches(switches: Float32Switches, device: str) -> tuple[dict[str, str], str]:
    """Returns the switches, and the level of `set_float32_matmul_precision` that agrees with them.

    torch rejects a level that contradicts a switch. So the switch of the other kind of device, on which the step computes no
    products, is set to agree with the level.
    """
    own, other = ("cuda.matmul", "mkldnn.matmul") if device == "cuda" else ("mkldnn.matmul", "cuda.matmul")
    level = "medium" if (switches[own], switches[other]) == ("tf32", "bf16") else _LEVELS[switches[own]]
    at_level = _AT_LEVEL[level]
    return {
        **switches,
        other: at_level if other == "mkldnn.matmul" else {"bf16": "tf32"}.get(at_level, at_level),
    }, level


@contextmanager
def _restore_switches() -> Iterator[None]:
    """Restores the switches after the context."""
    before = {name: one.fp32_precision for name, one in _SWITCHES.items()}
    try:
        yield
    finally:
        for name, one in _SWITCHES.items():
            one.fp32_precision = "none"  # "none" selects the value of the common switch
            if one.fp32_precision != before[name]:
                one.fp32_precision = before[name]


def _matmul_level() -> str | None:
    """Returns the level of `set_float32_matmul_precision`, which alone distinguishes `medium` from `high`; None if unreadable."""
    with suppress(RuntimeError):
        return torch.get_float32_matmul_precision()
    return None


def _is_readable(switch: Any) -> bool:
    with suppress(RuntimeError):
        return switch.allow_tf32 is not None
    return False
