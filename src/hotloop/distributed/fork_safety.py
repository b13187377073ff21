"""Prepares a process for forking ranks: checks CUDA and memory, ends OpenMP's threads."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import torch

from hotloop.core.hardware.limits import format_binary_bytes, free_memory_bytes
from hotloop.errors import PlanError, TrainingError
from hotloop.plan import Plan

_SOFT_PAUSE = 1
"""OpenMP's `omp_pause_soft`: ends threads, keeps all settings."""


def check_cuda(plan: Plan) -> None:
    """Checks that the plan's forks can use CUDA: a process that has used CUDA can't fork users of CUDA.

    Raises:
        PlanError: this process has used CUDA, and the plan computes on CUDA.
    """
    if torch.cuda.is_initialized() and ("device" not in plan.model_fields_set or plan.device.startswith("cuda")):
        raise PlanError(
            f"parallel={plan.parallel} on CUDA starts forks of this process, which has used CUDA already",
            expected="a process that hasn't, since CUDA can't be used in its forks",
            fix="train from a script or by `hotloop train`, or restart the notebook's kernel and train first",
        )


def end_openmp_threads() -> None:
    """Ends the idle threads of GNU's OpenMP; this process and its forks each start new ones.

    GNU's OpenMP doesn't detect a fork (https://gcc.gnu.org/bugzilla/show_bug.cgi?id=60035): the fork's first parallel
    operation would wait for the parent's threads for ever. Other OpenMP libraries detect forks.

    Raises:
        TrainingError: the library is too old to end its threads, and may have threads.
    """
    for path in _libraries():
        try:
            done = ctypes.CDLL(path).omp_pause_resource_all(_SOFT_PAUSE) == 0
        except (OSError, AttributeError):
            done = False
        if not done and torch.get_num_threads() > 1:
            raise TrainingError(
                f"forks of this process can't compute with several threads: {path} doesn't release its threads",
                expected="a libgomp of GCC 9 or later, as in torch's own wheels",
                fix="set OMP_NUM_THREADS=1, or train by the command: hotloop train task.py --ranks",
            )


def _libraries() -> list[str]:
    """Returns the files of all loaded GNU OpenMP libraries: torch's, and those of other packages."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.is_file() else []
    return sorted({line.split(maxsplit=5)[5] for line in lines if re.search(r"/libgomp[^/]*\.so[^/]*$", line)})


OWN_BYTES, FORK_BYTES = 256 << 20, 50 << 20
"""Least memory of a rank, for Python and torch alone: as a process, and as a fork that shares most of it."""


def check_process_memory(processes: int, each_bytes: int, what: str = "ranks") -> None:
    """Checks that free memory suffices for the processes: else the OS would kill some, or others.

    Raises:
        PlanError: the memory doesn't suffice.
    """
    free_bytes = free_memory_bytes(torch.device("cpu"))
    if processes * each_bytes > free_bytes:
        raise PlanError(
            f"{processes} {what}, with {format_binary_bytes(free_bytes)} of memory free",
            expected=f"at most {max(1, free_bytes // each_bytes)}, since each takes {format_binary_bytes(each_bytes)} before it trains",
            fix="use fewer, at most one for each core or device",
        )
