"""Samples the use of processor, memory, disk, network and GPUs by this process and its children."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import psutil


class SystemSampler:
    """Reads the counters of the system; a sample says what changed since the sample before.

    GPU figures need the package nvidia-ml-py, and are left out without it.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._gpus = _open_gpus()
        self._before = self._counters()
        psutil.cpu_percent()  # the first call only starts the interval

    def sample(self) -> dict[str, Any]:
        """Returns one row: percent of all cores, bytes, and bytes per second."""
        counters, before = self._counters(), self._before
        self._before = counters
        seconds = max(1e-6, counters["time"] - before["time"])
        rates = {
            f"{name}_per_s": round(max(0.0, counters[name] - before[name]) / seconds, 1)
            for name in counters.keys() & before.keys() - {"time"}
        }
        memory = psutil.virtual_memory()
        return {
            "time": round(time.time(), 3),
            "cpu_percent": psutil.cpu_percent(),
            "memory_bytes": self._resident_bytes(),
            "machine_memory_bytes": memory.total - memory.available,
            **rates,
            **self._gpu_figures(),
        }

    def _counters(self) -> dict[str, float]:
        found: dict[str, float] = {"time": time.monotonic()}
        with suppress(Exception):  # a container may hide the counters
            disk = psutil.disk_io_counters()
            if disk is not None:
                found |= {"disk_read_bytes": disk.read_bytes, "disk_written_bytes": disk.write_bytes}
        with suppress(Exception):
            net = psutil.net_io_counters()
            if net is not None:
                found |= {"net_received_bytes": net.bytes_recv, "net_sent_bytes": net.bytes_sent}
        return found

    def _resident_bytes(self) -> int:
        total = self._process.memory_info().rss
        for child in self._process.children(recursive=True):
            with suppress(psutil.Error):
                total += child.memory_info().rss
        return int(total)

    def _gpu_figures(self) -> dict[str, float]:
        figures: dict[str, float] = {}
        for number, (nvml, handle) in enumerate(self._gpus):
            with suppress(nvml.NVMLError):
                figures[f"gpu{number}_percent"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
                figures[f"gpu{number}_memory_bytes"] = nvml.nvmlDeviceGetMemoryInfo(handle).used
        return figures


def _open_gpus() -> list[tuple[Any, Any]]:
    """Returns NVML's module and a handle for each GPU; empty without the package, the driver or a GPU."""
    try:
        import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        return [(pynvml, pynvml.nvmlDeviceGetHandleByIndex(number)) for number in range(count)]
    except Exception:  # NVML fails in many ways, and training needs no figures of it
        return []
