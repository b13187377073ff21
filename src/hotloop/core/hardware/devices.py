"""The devices that torch can use here, and checks of device names."""

from __future__ import annotations

import re
from difflib import get_close_matches

import torch

from hotloop.errors import DeviceError
from hotloop.plan import Plan

ACCELERATORS = ("cuda", "mps", "xpu")

_DEVICE_NAME = re.compile(r"(cpu|cuda|mps|xpu)(?::(0|[1-9]\d{0,3}))?")

_MISNAMED = {
    "gpu": "cuda for a GPU of NVIDIA or AMD, mps for Apple's, xpu for Intel's",
    "nvidia": "cuda for a GPU of NVIDIA",
    "rocm": "cuda for a GPU of AMD too, as in torch",
    "hip": "cuda for a GPU of AMD too, as in torch",
    "amd": "cuda for a GPU of AMD too, as in torch",
    "metal": "mps for Apple's GPU",
    "apple": "mps for Apple's GPU",
    "intel": "xpu for a GPU of Intel",
    "sycl": "xpu for a GPU of Intel",
}


def device_names() -> list[str]:
    """Returns the names of torch's devices here, the CPU first: `cpu`, `cuda:0`, `mps`."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type not in ACCELERATORS:
        return ["cpu"]
    if found.type == "mps":
        return ["cpu", "mps"]
    return ["cpu", *(f"{found.type}:{index}" for index in range(torch.accelerator.device_count()))]


def check_device(name: str | torch.device, option: str = "--device") -> torch.device:
    """Returns the device of that name; `cuda` and `xpu` without a number are torch's current device of the kind.

    Args:
        option: the option that set the name, for messages.

    Raises:
        DeviceError: the device is missing here, or hotloop can't train on it. No other device replaces it.
    """
    given, names = str(name), device_names()
    match = _DEVICE_NAME.fullmatch(given)
    if match is None:
        raise _unknown_device(given, names, option)
    kind, index = match.groups()
    if kind in ("cpu", "mps"):
        if kind not in names or index not in (None, "0"):
            raise _absent_device(given, kind, names, option)
        return torch.device(kind)
    if not any(device.startswith(kind) for device in names):
        raise _absent_device(given, kind, names, option)
    found = f"{kind}:{torch.accelerator.current_device_index() if index is None else index}"
    if found not in names:
        raise _absent_device(given, kind, names, option)
    return torch.device(found)


def _unknown_device(given: str, names: list[str], option: str) -> DeviceError:
    expected, kind = "one of: " + ", ".join(names), given.partition(":")[0].strip().lower()
    advice = f"Use {option} {_fastest_device(names)}"
    if kind in ("tpu", "xla"):
        return DeviceError(f"device {given!r} is a TPU, which hotloop can't train on", expected=expected, fix=advice)
    if kind == "meta":
        problem = f"device {given!r} holds shapes without numbers, so nothing can be trained on it"
        return DeviceError(problem, expected=expected, fix=advice)
    if kind in _MISNAMED:
        return DeviceError(f"device {given!r} has another name: {_MISNAMED[kind]}", expected=expected, fix=advice)
    if close := get_close_matches(given.strip().lower(), [*names, *ACCELERATORS], n=1):
        advice = f"Did you mean {close[0]}?"
    return DeviceError(f"there is no device called {given!r}", expected=expected, fix=advice)


def _absent_device(given: str, kind: str, names: list[str], option: str) -> DeviceError:
    alike = [device for device in names if device.startswith(kind)]
    advice = f"Use {option} {alike[0] if alike else _fastest_device(names)}"
    if not alike:
        advice += f", or {_remedy(kind)}"
    return DeviceError(f"device {given!r} isn't on this machine", expected="one of: " + ", ".join(names), fix=advice)


def _remedy(kind: str) -> str:
    """Returns what may make a missing kind of accelerator available."""
    if kind == "mps":
        return "run on a Mac with Apple silicon, where mps is the GPU"
    if kind == "xpu":
        built = torch.version.xpu is not None
        return "check Intel's GPU driver" if built else "install an XPU build of torch if there's a GPU of Intel"
    if torch.version.hip is not None:
        return "check with rocm-smi that the GPU works, and that HIP_VISIBLE_DEVICES doesn't hide it"
    if torch.version.cuda is not None:
        return "check with nvidia-smi that the GPU works, and that CUDA_VISIBLE_DEVICES doesn't hide it"
    return "install a CUDA build of torch if there's an NVIDIA GPU"


def _fastest_device(names: list[str]) -> str:
    return names[1] if len(names) > 1 else names[0]


def resolve_device(plan: Plan, device: str | None = None) -> Plan:
    """Returns the plan on the requested device, or else on this machine's accelerator; raises DeviceError."""
    if device is None and "device" not in plan.model_fields_set:
        device = next((name for name in device_names() if name != "cpu"), "cpu")
    return plan.with_axes(device=str(check_device(plan.device if device is None else device)))
