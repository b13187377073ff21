"""What this process may use of the machine: cores (affinity, containers' limits), memory, and the allocator."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil
import torch

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class CgroupLimits:
    """Limits of Linux control groups; None without a limit.

    Attributes:
        cores: CPU time, in cores.
        memory_bytes: total memory.
        free_bytes: the unused part, including file cache that the kernel can release.
    """

    cores: float | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None


def cgroup_limits(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> CgroupLimits:
    """Returns the tightest limits from this process's control group up to the root (version 1 or 2)."""
    cores: list[float] = []
    memory: list[int] = []
    free: list[int] = []
    for controllers, folder in _control_groups(root, membership):
        if "cpu" in controllers:
            cores += _core_limits(folder)
        if "memory" in controllers:
            limit, used = _memory_limits(folder)
            memory += limit
            free += [max(0, limit[0] - used)] if limit else []
    return CgroupLimits(min(cores, default=None), min(memory, default=None), min(free, default=None))


def _control_groups(root: Path, membership: Path) -> list[tuple[set[str], Path]]:
    found = []
    for line in _read_text(membership).splitlines():
        _, names, place = line.split(":", 2)
        controllers = set(names.split(",")) if names else {"cpu", "memory"}
        top = root / names if names else root
        group = top / place.lstrip("/")
        found += [(controllers, folder) for folder in (group, *group.parents) if folder.is_relative_to(top)]
    return found


def _core_limits(folder: Path) -> list[float]:
    values = _read_text(folder / "cpu.max").split()
    if len(values) != 2:
        values = [_read_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    quota, period = values
    return [int(quota) / int(period)] if quota.isdigit() and period.isdigit() and int(period) else []


def _memory_limits(folder: Path) -> tuple[list[int], int]:
    """Returns the limit in bytes, if any, and the used bytes without releasable file cache."""
    limit = _read_text(folder / "memory.max") or _read_text(folder / "memory.limit_in_bytes")
    used = _read_text(folder / "memory.current") or _read_text(folder / "memory.usage_in_bytes")
    if not (limit.strip().isdigit() and used.strip().isdigit()):
        return [], 0
    stats = dict(line.split(maxsplit=1) for line in _read_text(folder / "memory.stat").splitlines() if " " in line)
    cache = int(stats.get("total_inactive_file") or stats.get("inactive_file") or 0)
    return [int(limit)], max(0, int(used) - cache)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def allowed_cores() -> list[int]:
    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):  # not on macOS
        return process.cpu_affinity()
    return list(range(psutil.cpu_count() or 1))


def physical_core_count(cores: list[int], topology: Path = TOPOLOGY) -> int | None:
    """Returns the number of physical cores behind these logical cores; None if unknown."""
    if sys.platform == "darwin":
        # The fast cores of Apple silicon: an operation waits for its slowest thread.
        number = program_output("sysctl", "-n", "hw.perflevel0.physicalcpu") or ""
        return (int(number) if number.isdigit() else 0) or psutil.cpu_count(logical=False)
    places = {
        tuple(_read_text(topology / f"cpu{core}/topology/{name}") for name in ("physical_package_id", "core_id"))
        for core in cores
    }
    if any("" in place for place in places):
        physical = psutil.cpu_count(logical=False)
        return physical and min(physical, len(cores))
    return len(places)


def sensible_threads(allowed: int, physical: int | None, quota: float | None) -> int:
    """Returns the number of threads for one operation: one per allowed physical core.

    A quota counts in whole cores: the system stops threads beyond it in mid-operation while the others wait.
    """
    bounds = [allowed, physical or allowed, int(quota) if quota is not None else allowed]
    return max(1, min(bounds))


def program_output(*command: str) -> str | None:
    """Returns the output of a system program; None if it is missing, fails, or takes over 20 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True, errors="replace")
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def format_binary_bytes(number: float) -> str:
    """Returns a text such as `12.3 GiB`."""
    power = 0
    while number >= 1024 and power < len(UNITS) - 1:
        number, power = number / 1024, power + 1
    return f"{number:.0f} bytes" if power == 0 else f"{number:.1f} {UNITS[power]}"


def free_memory_bytes(device: torch.device) -> int:
    """Returns the bytes that this process can still allocate."""
    if device.type in ("cuda", "xpu"):
        module = torch.get_device_module(device)
        free, _ = module.mem_get_info(device)
        return int(free + module.memory_reserved(device) - module.memory_allocated(device))
    limits = (cgroup_limits().free_bytes, _free_address_space())
    return min([psutil.virtual_memory().available, *(limit for limit in limits if limit is not None)])


def _free_address_space() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else max(0, limit - psutil.Process().memory_info().vms)


GLIBC = "glibc"
_SET_BY = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
"""Environment variables that configure glibc's malloc."""


def active_allocator() -> str | None:
    """Returns `glibc` if a program can configure it; None for other allocators, or if the environment configures it."""
    is_configured = any(map(os.environ.get, _SET_BY)) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    return GLIBC if _is_glibc_malloc() and not is_configured else None


@cache
def _is_glibc_malloc() -> bool:
    """Returns whether `malloc` is glibc's: preloaded jemalloc and tcmalloc replace it."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        if not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
            return False
        used, own = (ctypes.CDLL(name).malloc for name in (None, "libc.so.6"))
    except (ValueError, OSError, AttributeError):  # another C library
        return False
    return ctypes.cast(used, ctypes.c_void_p).value == ctypes.cast(own, ctypes.c_void_p).value
