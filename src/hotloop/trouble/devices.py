"""What torch says when tensors on different devices meet, in all the ways it says so."""

from __future__ import annotations

import re

_DEVICE = re.compile(r"\b(cpu|gpu|cuda|mps|xpu|meta|hpu|xla)(:\d+)?\b", re.IGNORECASE)
_TENSOR = re.compile(r"\btorch\.(?:(cuda|xpu|mps|hpu)\.)?[A-Z]\w*Tensor\b")
_SAID = re.compile(
    r"(same|different|expected|on) device|device type|but expected (it to be )?on|type \(torch\.\S+Tensor\)"
    r"|Placeholder storage has not been allocated",
    re.IGNORECASE,
)
_MISSING = re.compile(
    r"not compiled with \w+ enabled|No (CUDA|HIP|XPU) GPUs are available|Found no NVIDIA driver|invalid device ordinal"
)


def mismatch(text: str, own: str) -> list[str] | None:
    """The two devices that `text`, an error of torch, speaks of; None if it is about something else.

    Args:
        own: the device of the plan, which texts that name only one device don't mention.
    """
    if not _SAID.search(text):
        return None
    found = list(dict.fromkeys(_named(text)))
    if len(found) == 1 and "same device" in text:
        found.append(own if own.partition(":")[0] != found[0].partition(":")[0] else "another device")
    return found[:2] if len(found) > 1 else None


def asks_for_missing(text: str) -> bool:
    """Whether the user's code asked for a device that this machine, or this torch, doesn't have."""
    return _MISSING.search(text) is not None


def _named(text: str) -> list[str]:
    if typed := [match[1] or "cpu" for match in _TENSOR.finditer(text)]:
        return typed
    if "Placeholder storage" in text:
        return ["cpu", "mps"]
    return [match[0].lower() for match in _DEVICE.finditer(text)]
