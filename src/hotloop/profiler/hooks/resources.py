"""CPU and memory use of the process, garbage collections, and Python processes that the script starts."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path
from statistics import median, median_low
from typing import Any

import psutil
import torch

from hotloop.core.hardware import limits
from hotloop.core.hardware.limits import cgroup_limits
from hotloop.core.hardware.machine_load import LoadMeter
from hotloop.core.patches import Patches
from hotloop.profiler.base.call_sites import CallSites
from hotloop.profiler.base.steps import Kind
from hotloop.profiler.hooks.torch_hooks import with_callbacks

try:  # at import, before the script's folder is on the path
    import resource
except ImportError:  # Windows has none
    resource = None  # type: ignore[assignment]


class Cores:
    """Busy cores of this process in clean steps, and of others meanwhile; system time and pages of this process."""

    def __init__(self) -> None:
        self._cpu = self._wall = 0.0
        self._began = (0.0, 0.0)
        self._system = (0.0, 0.0)
        self._pages = limits.active_allocator() is not None
        self._load = LoadMeter()

    def begin(self) -> None:
        self._system = self._of_system()
        self._began = (time.process_time(), time.perf_counter())

    def end(self, *, clean: bool) -> tuple[float, float, float]:
        """Returns milliseconds of CPU time since `begin`, of that in the system, and memory pages; see `StepFact`."""
        cpu, wall = time.process_time() - self._began[0], time.perf_counter() - self._began[1]
        if clean:
            self._cpu, self._wall = self._cpu + cpu, self._wall + wall
        (system_ms, pages), before = self._of_system(), self._system
        return cpu * 1e3, system_ms - before[0], pages - before[1]

    def _of_system(self) -> tuple[float, float]:
        """Milliseconds in the system so far, and pages that the system provided."""
        if not self._pages or resource is None:
            return 0.0, 0.0
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_stime * 1e3, float(used.ru_minflt)

    def record(self) -> dict[str, Any] | None:
        """Returns fields of `Threads`; None before the first clean step."""
        if not self._wall:
            return None
        return {
            "torch": torch.get_num_threads(),
            "cores": available_cores(),
            "busy": self._cpu / self._wall,
            "others": self._load.others(),
        }


def available_cores() -> int:
    """Returns the number of cores that this process may use: its CPU affinity, limited by the container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_limits().cores
    return allowed if quota is None else max(1, min(allowed, ceil(quota)))


def memory_in_use(device: str, *, peak: bool = False) -> int:
    """Returns bytes of tensors on a device, now or at the peak; for the CPU, of the whole process."""
    kind = torch.device(device).type
    if kind in ("cuda", "xpu"):
        module = torch.get_device_module(kind)
        return int(module.max_memory_allocated() if peak else module.memory_allocated())
    if not peak or sys.platform == "win32":
        return int(psutil.Process().memory_info().rss)
    return _peak_process_memory()


def _peak_process_memory() -> int:
    """On Linux `ru_maxrss` includes the peak of the process that started this one."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    assert resource is not None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(most if sys.platform == "darwin" else most * 1024)


def compile_seconds() -> float:
    """Returns the time of torch.compile in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    taken = getattr(dynamo, "compilation_time_metrics", {})
    return float(sum(taken.get("_compile.compile_inner", ())))


_FULL_GENERATION = 2


class GarbageCollections:
    """Records full garbage collections on the training thread: time and line. Young generations are usual."""

    kinds: Sequence[Kind] = ("instrumented",)

    def __init__(self, sites: CallSites) -> None:
        self._sites = sites
        self._steps: list[tuple[int, float]] = []
        self._spent: Counter[str] = Counter()
        self._many = self._thread = 0
        self._ms = self._began = 0.0

    def begin(self) -> None:
        self._many, self._ms, self._thread = 0, 0.0, threading.get_ident()
        gc.callbacks.append(self._on_collection)

    def end(self) -> None:
        if self._leave():
            self._steps.append((self._many, self._ms))

    def drop(self) -> None:
        self._leave()

    def close(self) -> None:
        self._leave()

    def _leave(self) -> bool:
        if self._on_collection not in gc.callbacks:
            return False
        gc.callbacks.remove(self._on_collection)
        return True

    def _on_collection(self, what: str, info: dict[str, int]) -> None:
        if threading.get_ident() != self._thread or info["generation"] < _FULL_GENERATION:
            return
        if what == "start":
            self._began = time.perf_counter()
            return
        ms = (time.perf_counter() - self._began) * 1e3
        self._many, self._ms = self._many + 1, self._ms + ms
        self._spent[self._sites.caller_line()] += ms  # type: ignore[assignment]

    def records(self) -> dict[str, list[dict[str, Any]]]:
        """Returns fields of `SlowPattern` at the line with the most time; an empty list replaces an earlier record."""
        many = median_low([many for many, _ in self._steps]) if self._steps else 0
        if not many:
            return {"collections": []}
        ms, ((where, _),) = median([ms for _, ms in self._steps]), self._spent.most_common(1)
        return {"collections": [{"what": "garbage collection", "where": where, "per_step": float(many), "ms": ms}]}


class ChildCounter:
    """Counts processes of `multiprocessing`, forks, and Python programs."""

    def __init__(self) -> None:
        self._forks = self._programs = 0
        self._patches = Patches()

    def install(self) -> None:
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_parent=self._count_fork)
        starting = with_callbacks(lambda: True, self._count_program, lambda *ended: None)
        self._patches.patch(subprocess.Popen, "_execute_child", starting)

    def remove(self) -> None:
        self._patches.undo()

    @property
    def count(self) -> int:
        """Number of processes; a process of `multiprocessing` may be a fork as well."""
        made = getattr(sys.modules.get("multiprocessing.process"), "_process_counter", None)
        numbered = "".join(filter(str.isdigit, repr(made)))  # `count(3)`; `next` would use up a number
        return max(self._forks, int(numbered or 1) - 1) + self._programs

    def _count_fork(self) -> None:
        self._forks += 1

    def _count_program(self, args: tuple, kwargs: dict) -> None:
        command = args[1] if len(args) > 1 else ()
        first = command[0] if isinstance(command, list | tuple) and command else command
        name = os.path.basename(os.fsdecode(first)) if isinstance(first, str | bytes | os.PathLike) else ""
        self._programs += name.startswith("python")
