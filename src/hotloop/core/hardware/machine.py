"""Facts of this machine from the operating system, drivers and torch, without measurements, and what results depend on."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from datetime import UTC, datetime

import numpy as np
import psutil
import torch

from hotloop import __version__
from hotloop.core.float32_switches import read_switches
from hotloop.core.hardware import limits
from hotloop.core.hardware.devices import device_names
from hotloop.core.number_formats import describe_switches
from hotloop.core.records.hardware import PRECISIONS, Device, Figure, Processor

# Vector and matrix extensions in torch's list, in the order of display.
VECTOR_INSTRUCTIONS = (
    *("sse4_2", "avx", "fma3", "avx2", "avx_vnni", "avx_vnni_int8", "avx_vnni_int16", "avx_ne_convert"),
    *("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("avx10_1", "avx10_2", "amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    *("neon", "dot", "fp16_arith", "i8mm", "bf16", "sve", "sve2", "sve_bf16", "sme", "sme2"),
)

BF16_INSTRUCTIONS = {"avx512_bf16", "amx_bf16", "bf16", "sve_bf16"}
FP16_INSTRUCTIONS = {"avx512_fp16", "amx_fp16", "fp16_arith"}


def read_processor() -> Processor:
    capabilities = torch.cpu.get_capabilities()
    allowed = limits.allowed_cores()
    quota = limits.cgroup_limits().cores
    return Processor(
        model=_cpu_model(),
        architecture=platform.machine(),
        vectors=tuple(name for name in VECTOR_INSTRUCTIONS if capabilities.get(name)),
        kernels=torch.backends.cpu.get_cpu_capability(),
        physical_cores=psutil.cpu_count(logical=False),
        logical_cores=psutil.cpu_count(),
        allowed_cores=len(allowed),
        quota_cores=quota,
        threads=limits.sensible_threads(len(allowed), limits.physical_core_count(allowed), quota),
    )


def _cpu_model() -> str | None:
    return torch.cpu.get_capabilities().get("cpu_name") or platform.processor() or None


def describe_device(name: str, vectors: tuple[str, ...]) -> Device:
    """Returns a device of `device_names()` without speeds; `vectors` are the CPU's extensions."""
    kind, _, number = name.partition(":")
    index = int(number or 0)
    model, capability, precisions = _identity(kind, index, vectors)
    total, free = _device_memory(kind, index)
    how = "what Metal recommends at most, of the memory shared with the CPU" if kind == "mps" else ""
    return Device(name, kind, model, capability, precisions, _byte_figure(total, how), _byte_figure(free, how))


def _identity(kind: str, index: int, vectors: tuple[str, ...]) -> tuple[str | None, str | None, tuple[str, ...]]:
    if kind == "cuda":
        facts = torch.cuda.get_device_properties(index)
        amd = facts.gcnArchName if torch.version.hip else None
        precisions = cuda_precisions((facts.major, facts.minor), amd)
        return facts.name, amd or f"{facts.major}.{facts.minor}", precisions
    if kind == "xpu":
        return _xpu(index)
    if kind == "mps":
        model = limits.program_output("sysctl", "-n", "machdep.cpu.brand_string") or None
        bf16 = ("bf16",) if torch.backends.mps.is_macos_or_newer(14, 0) else ()
        return model, None, ("fp32", *bf16, "fp16")
    return _cpu_model(), None, cpu_precisions(vectors)


def device_free_bytes(device: torch.device) -> int | None:
    """Returns the free bytes of a device, on a CPU within the container's limits; None if unknown."""
    return _device_memory(device.type, device.index or 0)[1]


def _device_memory(kind: str, index: int) -> tuple[int | None, int | None]:
    if kind == "cpu":
        memory, within = psutil.virtual_memory(), limits.cgroup_limits()
        total = min(memory.total, within.memory_bytes or memory.total)
        room = memory.available if within.free_bytes is None else within.free_bytes
        return total, min(memory.available, room)
    if kind == "mps":
        total = torch.mps.recommended_max_memory()
        return total, max(0, total - torch.mps.driver_allocated_memory())
    try:
        free, total = torch.get_device_module(kind).mem_get_info(index)
    except RuntimeError:  # unknown to some drivers of integrated GPUs
        return None, None
    return total, free


def _byte_figure(value: float | None, how: str = "") -> Figure | None:
    return None if value is None else Figure(float(value), "bytes", "os", current_time(), how)


def current_time() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def cpu_precisions(vectors: tuple[str, ...]) -> tuple[str, ...]:
    """Returns fp32 and fp64, and bf16 and fp16 if the CPU has instructions: emulation is slow."""
    half = {
        "bf16": bool(BF16_INSTRUCTIONS & set(vectors)),
        "fp16": bool(FP16_INSTRUCTIONS & set(vectors)),
        "tf32": False,
    }
    return tuple(precision for precision in PRECISIONS if half.get(precision, True))


def cuda_precisions(capability: tuple[int, int], amd: str | None) -> tuple[str, ...]:
    """Returns the precisions of an NVIDIA GPU by compute capability, or of an AMD GPU by architecture (`gfx942`)."""
    bf16 = True if amd else capability >= (8, 0)
    tf32 = amd.startswith(("gfx94", "gfx95")) if amd else capability >= (8, 0)
    has = {"bf16": bf16, "tf32": tf32}
    return tuple(precision for precision in PRECISIONS if has.get(precision, True))


def _xpu(index: int) -> tuple[str, None, tuple[str, ...]]:
    facts = torch.xpu.get_device_properties(index)
    has = {
        "fp32": True,
        "bf16": getattr(facts, "has_bfloat16_conversions", False),
        "fp16": getattr(facts, "has_fp16", False),
        "fp64": getattr(facts, "has_fp64", False),
    }
    return facts.name, None, tuple(precision for precision in PRECISIONS if has.get(precision))


def library_versions(driver: str | None) -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hotloop": __version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "xpu": torch.version.xpu,
        "nvidia_driver": driver,
    }


def nvidia_gpus() -> tuple[list[str], str | None]:
    """Returns the models of NVIDIA GPUs that the driver lists, and the driver's version; empty without a driver."""
    rows = limits.program_output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    found = [line.rsplit(", ", 1) for line in (rows or "").splitlines() if ", " in line]
    return [model for model, _ in found], found[0][1] if found else None


def find_compiler() -> str | None:
    """Returns the path of the C++ compiler that torch.compile would use on the CPU; None without one."""
    usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    path = shutil.which(os.environ.get("CXX") or usual)  # torch.compile reads CXX too
    if path == "/usr/bin/clang++" and sys.platform == "darwin" and limits.program_output("xcode-select", "-p") is None:
        return None  # a stub that offers to install the compiler
    return path


def compiler_build() -> str | None:
    """Returns the compiler's real path and modification time (ns), which identify it without a call."""
    path = find_compiler()
    if path is None:
        return None
    file = os.path.realpath(path)
    return f"{file}, {os.stat(file).st_mtime_ns}"


def operating_system() -> str:
    return f"{platform.system()} {platform.release()}"


def result_versions() -> dict[str, str]:
    return {
        "hotloop": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def machine_name() -> str:
    """Returns a text with processor, this process's cores, torch's threads and kernels, and accelerators."""
    processor = read_processor()
    found = [describe_device(name, processor.vectors) for name in device_names() if name != "cpu"]
    cores = f"{processor.model or processor.architecture}, {processor.allowed_cores} cores"
    if processor.quota_cores is not None:
        cores += f" for the time of {processor.quota_cores:g}"
    used = f"{torch.get_num_threads()} threads, {processor.kernels} kernels"
    return ", ".join([cores, used, *(device.model or device.name for device in found)])


def speed_versions() -> dict[str, str]:
    """Returns the versions and settings that speeds depend on: `result_versions`, the C++ compiler, NVIDIA's driver, a
    configurable allocator, and float32 switches that differ from torch's defaults.
    """
    driver = nvidia_gpus()[1] if any(name.startswith("cuda") for name in device_names()) else None
    found = {"compiler": compiler_build(), "nvidia_driver": driver, "allocator": limits.active_allocator()}
    found["switches"] = describe_switches(read_switches()) or None
    return result_versions() | {name: version for name, version in found.items() if version is not None}
