"""How much of the machine this process may use: affinity, containers' limits (cgroups), kinds of cores."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

CGROUPS = Path("/sys/fs/cgroup")

MEMBERSHIP = Path("/proc/self/cgroup")

TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class CgroupLimits:
    """Limits of Linux control groups; None where none is set.

    Attributes:
        cores: CPU time, in cores.
        memory_bytes: memory in all.
        memory_room_bytes: what is left of it, counting file cache that the kernel would give up.
    """

    cores: float | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None


def cgroup_limits(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> CgroupLimits:
    """The tightest limits on the way from this process's control group up to the root, in version 1 or 2."""
    cores: list[float] = []
    memory: list[int] = []
    room: list[int] = []
    for controllers, folder in _control_groups(root, membership):
        if "cpu" in controllers:
            cores += _core_limits(folder)
        if "memory" in controllers:
            limit, used = _memory_limits(folder)
            memory += limit
            room += [max(0, limit[0] - used)] if limit else []
    return CgroupLimits(min(cores, default=None), min(memory, default=None), min(room, default=None))


def _control_groups(root: Path, membership: Path) -> list[tuple[set[str], Path]]:
    """Every control group that this process stands in, with the controllers that are set there."""
    found = []
    for line in _read_text(membership).splitlines():
        _, names, place = line.split(":", 2)
        controllers = set(names.split(",")) if names else {"cpu", "memory"}
        top = root / names if names else root
        group = top / place.lstrip("/")
        found += [(controllers, folder) for folder in (group, *group.parents) if folder.is_relative_to(top)]
    return found


def _core_limits(folder: Path) -> list[float]:
    both = _read_text(folder / "cpu.max").split()
    quota, period = (
        both
        if len(both) == 2
        else (
            _read_text(folder / "cpu.cfs_quota_us").strip(),
            _read_text(folder / "cpu.cfs_period_us").strip(),
        )
    )
    return [int(quota) / int(period)] if quota.isdigit() and period.isdigit() and int(period) else []


def _memory_limits(folder: Path) -> tuple[list[int], int]:
    """The limit in bytes, if any, and the bytes that are used and can't be given up."""
    limit = _read_text(folder / "memory.max") or _read_text(folder / "memory.limit_in_bytes")
    used = _read_text(folder / "memory.current") or _read_text(folder / "memory.usage_in_bytes")
    if not (limit.strip().isdigit() and used.strip().isdigit()):
        return [], 0
    kept = dict(line.split(maxsplit=1) for line in _read_text(folder / "memory.stat").splitlines() if " " in line)
    cache = int(kept.get("total_inactive_file") or kept.get("inactive_file") or 0)
    return [int(limit)], max(0, int(used) - cache)


def _read_text(path: Path) -> str:
    """The file's text; empty where the system has no such file, or doesn't let us read it."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def allowed_cores() -> list[int]:
    """Numbers of the logical cores that this process may run on."""
    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):  # not on macOS
        return process.cpu_affinity()
    return list(range(psutil.cpu_count() or 1))


def physical_core_count(cores: list[int], topology: Path = TOPOLOGY) -> int | None:
    """How many physical cores stand behind these logical ones; None where the system doesn't tell."""
    if sys.platform == "darwin":
        return _performance_cores() or psutil.cpu_count(logical=False)
    places = {
        (
            _read_text(topology / f"cpu{core}/topology/physical_package_id"),
            _read_text(topology / f"cpu{core}/topology/core_id"),
        )
        for core in cores
    }
    if any("" in place for place in places):
        physical = psutil.cpu_count(logical=False)
        return physical and min(physical, len(cores))
    return len(places)


def _performance_cores() -> int | None:
    """Fast cores of a Mac with Apple silicon: an operation waits for its slowest thread, on a slow core."""
    number = program_output("sysctl", "-n", "hw.perflevel0.physicalcpu")
    return int(number) if number and number.isdigit() else None


def sensible_threads(allowed: int, physical: int | None, quota: float | None) -> int:
    """Threads for one operation: one per physical core that may be used; more would get in each other's way.

    A quota counts in whole cores, since threads beyond it are stopped in mid-operation while the others wait.
    """
    bounds = [allowed, physical or allowed, int(quota) if quota is not None else allowed]
    return max(1, min(bounds))


def program_output(*command: str) -> str | None:
    """What a small program of the system prints; None if it isn't there, fails, or takes over 20 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True, errors="replace")
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def format_binary_bytes(number: float) -> str:
    """`12.3 GiB`: bytes as one reads them."""
    power = 0
    while number >= 1024 and power < len(UNITS) - 1:
        number, power = number / 1024, power + 1
    return f"{number:.0f} bytes" if power == 0 else f"{number:.1f} {UNITS[power]}"


def free_memory_bytes(device: torch.device) -> int:
    """Memory that this process could still get."""
    if device.type in ("cuda", "xpu"):
        module = torch.get_device_module(device)
        free, _ = module.mem_get_info(device)
        return int(free + module.memory_reserved(device) - module.memory_allocated(device))
    limits = (cgroup_limits().free_bytes, _free_address_space())
    return min([psutil.virtual_memory().available, *(limit for limit in limits if limit is not None)])


def _free_address_space() -> int | None:
    """What `ulimit -v` leaves; None without such a limit."""
    if sys.platform == "win32":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else max(0, limit - psutil.Process().memory_info().vms)
