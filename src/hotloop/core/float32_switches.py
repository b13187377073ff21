"""Reads, sets and restores torch's switches for the number format of float32 products."""

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
    """Returns the switches of this process, set by any of torch's interfaces; `none` counts as `ieee`."""
    return {name: "ieee" if (value := switch.fp32_precision) == "none" else value for name, switch in _SWITCHES.items()}


@contextmanager
def apply_switches(switches: Float32Switches, device: str, *, written: bool = False) -> Iterator[None]:
    """Sets the switches through all three torch interfaces within the context.

    torch raises an error when a program reads `allow_tf32` after it has set a newer interface.

    Args:
        device: kind of the computing device; it determines `set_float32_matmul_precision`, which affects CPU and CUDA.
        written: set the switches even if the process has these values already.
    """
    wanted, level = _consistent_switches(switches, device)
    matmul_level = _matmul_level()
    if not written and matmul_level in (level, None) and read_switches() == wanted:
        yield
        return
    with _restore_switches():
        tf32_switches = [(switch, switch.allow_tf32) for switch in (_MATMUL, _CUDNN) if _is_readable(switch)]
        try:
            for switch, _ in tf32_switches:
                switch.allow_tf32 = wanted["cudnn.conv" if switch is _CUDNN else "cuda.matmul"] == "tf32"
            if matmul_level is not None:
                torch.set_float32_matmul_precision(level)
            for name, switch in _SWITCHES.items():
                switch.fp32_precision = wanted[name]
            yield
        finally:
            for switch, allowed in tf32_switches:
                switch.allow_tf32 = allowed
            if matmul_level is not None:
                torch.set_float32_matmul_precision(matmul_level)


def _consistent_switches(switches: Float32Switches, device: str) -> tuple[dict[str, str], str]:
    """Returns the switches, and the level of `set_float32_matmul_precision` that agrees with them.

    torch rejects a level that contradicts a switch. So the switch of the other kind of device, which computes no
    product of the step, is set to agree with the level.
    """
    own, other = ("cuda.matmul", "mkldnn.matmul") if device == "cuda" else ("mkldnn.matmul", "cuda.matmul")
    level = "medium" if (switches[own], switches[other]) == ("tf32", "bf16") else _LEVELS[switches[own]]
    at_level = _AT_LEVEL[level]
    if other == "cuda.matmul" and at_level == "bf16":
        at_level = "tf32"
    return {**switches, other: at_level}, level


@contextmanager
def _restore_switches() -> Iterator[None]:
    before = {name: switch.fp32_precision for name, switch in _SWITCHES.items()}
    try:
        yield
    finally:
        for name, switch in _SWITCHES.items():
            switch.fp32_precision = "none"  # "none" selects the value of the common switch
            if switch.fp32_precision != before[name]:
                switch.fp32_precision = before[name]


def _matmul_level() -> str | None:
    """Returns the level, the only value that distinguishes `medium` from `high`; None if torch refuses to read it."""
    with suppress(RuntimeError):
        return torch.get_float32_matmul_precision()
    return None


def _is_readable(switch: Any) -> bool:
    with suppress(RuntimeError):
        return switch.allow_tf32 is not None
    return False
