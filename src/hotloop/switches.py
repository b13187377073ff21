"""torch's switches of the format in which products of fp32 numbers are computed: read, set for a while, and put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from hotloop.arithmetic import Switches

_LEVELS = {"ieee": "highest", "tf32": "high", "bf16": "medium"}
"""What `torch.set_float32_matmul_precision` calls them."""

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


def read() -> dict[str, str]:
    """The switches as this process has them, by whatever name of torch's they were set; `ieee` where nothing is allowed."""
    return {name: "ieee" if (value := one.fp32_precision) == "none" else value for name, one in _SWITCHES.items()}


@contextmanager
def running_under(switches: Switches, device: str, *, written: bool = False) -> Iterator[None]:
    """Sets torch's switches by all of their names, of which the older aren't readable where a program set the newer.

    Args:
        device: the kind of device that computes. The oldest name stands for products on both kinds, and follows this one.
        written: set the switches also where the process has them already.
    """
    wanted, level = _agreeing(switches, device)
    oldest = _oldest()
    if not written and oldest in (level, None) and read() == wanted:
        yield
        return
    with _put_back():
        older = [(one, one.allow_tf32) for one in (_MATMUL, _CUDNN) if _is_readable(one)]
        try:
            for one, _ in older:
                one.allow_tf32 = wanted["cudnn.conv" if one is _CUDNN else "cuda.matmul"] == "tf32"
            if oldest is not None:
                torch.set_float32_matmul_precision(level)
            for name, switch in _SWITCHES.items():
                switch.fp32_precision = wanted[name]
            yield
        finally:
            for one, allowed in older:
                one.allow_tf32 = allowed
            if oldest is not None:
                torch.set_float32_matmul_precision(oldest)


def _agreeing(switches: Switches, device: str) -> tuple[dict[str, str], str]:
    """The switches, and the level of `set_float32_matmul_precision` that agrees with them.

    torch refuses to read or to use a level that contradicts a switch, so that products on the other kind of device, of
    which such a step has none, follow the level.
    """
    own, other = ("cuda.matmul", "mkldnn.matmul") if device == "cuda" else ("mkldnn.matmul", "cuda.matmul")
    level = "medium" if (switches[own], switches[other]) == ("tf32", "bf16") else _LEVELS[switches[own]]
    at_level = _AT_LEVEL[level]
    return {
        **switches,
        other: at_level if other == "mkldnn.matmul" else {"bf16": "tf32"}.get(at_level, at_level),
    }, level


@contextmanager
def _put_back() -> Iterator[None]:
    """Whatever is done to the switches, they are as before in the end."""
    before = {name: one.fp32_precision for name, one in _SWITCHES.items()}
    try:
        yield
    finally:
        for name, one in _SWITCHES.items():
            one.fp32_precision = "none"  # takes on what is chosen for all of them together
            if one.fp32_precision != before[name]:
                one.fp32_precision = before[name]


def _oldest() -> str | None:
    """What the program chose for all products at once, which alone tells `medium` from `high`; None if not readable."""
    with suppress(RuntimeError):
        return torch.get_float32_matmul_precision()
    return None


def _is_readable(switch: Any) -> bool:
    with suppress(RuntimeError):
        return switch.allow_tf32 is not None
    return False
