"""Pages that the system gives to steps with large activations, counted in a process of its own.

python -m tests.support.processes.page_fault_count [PARAMETER]

What earlier tests have freed would be found again by any allocator. A PARAMETER of mallopt is left untold.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import hotloop
from hotloop.lowering.program import Program
from hotloop.lowering.transforms import allocator as axis
from hotloop.plan import Plan
from tests.support.programs import advance

KEEP = Plan(allocator="keep")


def a_task(epochs: int = 1000) -> hotloop.Task:
    """Two of its activations have 64 MB each, and two gradients as much: no threshold that glibc chooses keeps such blocks.

    With next to no arithmetic, so that what takes time is the memory.
    """
    x = torch.randn(128, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    return hotloop.Task(
        model=lambda: nn.Sequential(
            nn.Conv2d(3, 3, 1),
            nn.Upsample(scale_factor=4.5),
            nn.ReLU(),
            nn.AvgPool2d(9),
            nn.Flatten(),
            nn.LazyLinear(3),
        ),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=(x, x[:, 0, 0, :3].argmax(1)),
        batch_size=64,
        epochs=epochs,
    )


def faults() -> int:
    """Pages that this process was given so far."""
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[7])


def of_a_step(program: Program, steps: int = 7) -> float:
    """Of the middle one, after some in which the process grows; in a few more it may by a block that finds no room."""
    advance(program, 4)
    found = []
    for _ in range(steps):
        before = faults()
        advance(program, 1)
        found.append(faults() - before)
    return statistics.median(found)


def after_an_evaluation(program: Program) -> float:
    with program.inference() as model:
        model(torch.randn(64, 3, 64, 64))
    return of_a_step(program)


def of_a_worker() -> list[bool]:
    """Whether a process keeps what is freed, and a fork of it does."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.write(writing, bytes([axis.keeps_freed_memory()]))
        os._exit(0)
    os.waitpid(child, 0)
    return [axis.keeps_freed_memory(), bool(os.read(reading, 1)[0])]


def thresholds() -> list[int]:
    """From which size on blocks are mapped by themselves: found before anything was told, and so by freeing one of 20 MiB."""
    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    found = [_untold(library)]
    library.free(library.malloc(20 << 20))
    return [*found, _untold(library)]


def _untold(library: ctypes.CDLL) -> int:
    """In a fork, since to look changes the allocator."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.write(writing, axis._mmap_threshold(library).to_bytes(8, "little"))
        os._exit(0)
    os.waitpid(child, 0)
    return int.from_bytes(os.read(reading, 8), "little")


def given_back(program: Program) -> int:
    """Bytes, when it is closed."""
    process = psutil.Process()
    kept = process.memory_info().rss
    program.close()
    return kept - process.memory_info().rss


def main() -> None:
    for parameter in sys.argv[1:]:
        del axis._KEEP_OPTIONS[int(parameter)]
    before, (keeping, usual) = thresholds(), (hotloop.lower(a_task(), KEEP), hotloop.lower(a_task()))
    found: dict[str, Any] = {
        "usual": of_a_step(usual),
        "kept": of_a_step(keeping),
    }
    advance(usual, 2)
    found["again"] = of_a_step(keeping)
    if sys.argv[1:]:
        print(json.dumps(found))
        return
    found |= {
        "evaluated": after_an_evaluation(keeping),
        "thresholds": before,
    }
    advance(keeping, 1)
    found["worker"] = of_a_worker()
    print(json.dumps(found | {"given back": given_back(keeping)}))


if __name__ == "__main__":
    main()
