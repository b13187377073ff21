"""What a process sees to before it forks ranks: CUDA, which forks can't use, and OpenMP's threads, which they wait for."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import torch

from hotloop.core.hardware.limits import format_binary_bytes, free_memory_bytes
from hotloop.errors import PlanError, TrainingError
from hotloop.plan import Plan

_SOFT_PAUSE = 1
"""OpenMP's `omp_pause_soft`: threads are given back, and all settings stay."""


def check_cuda(plan: Plan) -> None:
    """CUDA can't be used in a fork of a process that has used it.

    Raises:
        PlanError: this one has, and the plan's ranks would compute on it.
    """
    if torch.cuda.is_initialized() and ("device" not in plan.model_fields_set or plan.device.startswith("cuda")):
        raise PlanError(
            f"parallel={plan.parallel} on CUDA starts forks of this process, which has used CUDA already",
            expected="a process that hasn't, since CUDA can't be used in its forks",
            fix="train from a script or by `hotloop train`, or restart the notebook's kernel and train first",
        )


def end_openmp_threads() -> None:
    """Ends the threads that GNU's OpenMP keeps between operations; this process and its forks each start new ones.

    Other libraries of OpenMP see a fork by themselves. GNU's doesn't (https://gcc.gnu.org/bugzilla/show_bug.cgi?id=60035):
    a fork's first operation of several threads would wait for ever for the parent's.

    Raises:
        TrainingError: it is too old for that, and there may be such threads.
    """
    for path in _libraries():
        try:
            done = ctypes.CDLL(path).omp_pause_resource_all(_SOFT_PAUSE) == 0
        except (OSError, AttributeError):
            done = False
        if not done and torch.get_num_threads() > 1:
            raise TrainingError(
                f"forks of this process can't compute with several threads: {path} doesn't let go of those that it has",
                expected="a libgomp of GCC 9 or later, as torch's own wheels have it",
                fix="set OMP_NUM_THREADS=1, or train by the command: hotloop train task.py --ranks",
            )


def _libraries() -> list[str]:
    """The files of GNU's OpenMP that are loaded: torch's, and what other packages bring along."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.is_file() else []
    return sorted({line.split(maxsplit=5)[5] for line in lines if re.search(r"/libgomp[^/]*\.so[^/]*$", line)})


OWN_BYTES, FORK_BYTES = 256 << 20, 50 << 20
"""That a rank takes at least, for Python and torch alone: as a process of its own, and as a fork that shares most of it."""


def check_process_memory(processes: int, each_bytes: int, what: str = "ranks") -> None:
    """Without memory for all of them the system would kill processes, and not only these.

    Raises:
        PlanError: there is none.
    """
    room = free_memory_bytes(torch.device("cpu"))
    if processes * each_bytes > room:
        raise PlanError(
            f"{processes} {what}, with {format_binary_bytes(room)} of memory free",
            expected=f"at most {max(1, room // each_bytes)}, since each takes {format_binary_bytes(each_bytes)} before it trains",
            fix="use fewer, at most one for each core or device",
        )
