"""How much memory there is left for this process."""

from __future__ import annotations

import sys

import psutil
import torch

from hotloop.probe.limits import cgroup_limits

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def size(number: float) -> str:
    """`12.3 GiB`: bytes as one reads them."""
    power = 0
    while number >= 1024 and power < len(UNITS) - 1:
        number, power = number / 1024, power + 1
    return f"{number:.0f} bytes" if power == 0 else f"{number:.1f} {UNITS[power]}"


def room_bytes(device: torch.device) -> int:
    """Memory that this process could still get."""
    if device.type in ("cuda", "xpu"):
        module = torch.get_device_module(device)
        free, _ = module.mem_get_info(device)
        return int(free + module.memory_reserved(device) - module.memory_allocated(device))
    limits = (cgroup_limits().memory_room_bytes, _address_room())
    return min([psutil.virtual_memory().available, *(limit for limit in limits if limit is not None)])


def _address_room() -> int | None:
    """What `ulimit -v` leaves; None without such a limit."""
    if sys.platform == "win32":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else max(0, limit - psutil.Process().memory_info().vms)
