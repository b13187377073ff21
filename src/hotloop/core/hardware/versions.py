"""The machine and the versions that results and speeds depend on."""

from __future__ import annotations

import platform

import numpy as np
import torch

from hotloop import __version__
from hotloop.core.float32_switches import read_switches
from hotloop.core.hardware import allocators, machine
from hotloop.core.hardware.devices import device_names
from hotloop.core.number_formats import describe_switches


def result_versions() -> dict[str, str]:
    return {
        "hotloop": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def machine_name() -> str:
    """Returns a text with processor, this process's cores, torch's threads and kernels, and accelerators."""
    processor = machine.read_processor()
    found = [machine.describe_device(name, processor.vectors) for name in device_names() if name != "cpu"]
    cores = f"{processor.model or processor.architecture}, {processor.allowed_cores} cores"
    if processor.quota_cores is not None:
        cores += f" for the time of {processor.quota_cores:g}"
    used = f"{torch.get_num_threads()} threads, {processor.kernels} kernels"
    return ", ".join([cores, used, *(device.model or device.name for device in found)])


def speed_versions() -> dict[str, str]:
    """Returns the versions and settings that speeds depend on: `result_versions`, the C++ compiler, NVIDIA's driver, a
    configurable allocator, and float32 switches that differ from torch's defaults.
    """
    driver = machine.nvidia_gpus()[1] if any(name.startswith("cuda") for name in device_names()) else None
    found = {"compiler": machine.compiler_build(), "nvidia_driver": driver, "allocator": allocators.active_allocator()}
    found["switches"] = describe_switches(read_switches()) or None
    return result_versions() | {name: version for name, version in found.items() if version is not None}
