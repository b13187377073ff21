"""The axis `cudnn`: on a CUDA device, cuDNN times the algorithms of a convolution or selects one by a heuristic.

Each thread caches the selected algorithm by shape (torch 2.13: ATen/native/cudnn/Conv_v8.cpp), and torch reads the cache
before the switch. So the switch affects only the first convolution of a shape in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch

from hotloop.lowering.context import LoweringContext

Result = TypeVar("Result")


def apply_cudnn(parts: LoweringContext) -> LoweringContext:
    """Adds `torch.backends.cudnn.benchmark` around training steps, and around their compiling and recording."""
    plan = parts.plan
    if plan.cudnn == "default":
        return parts
    notes = () if plan.graphs != "none" else (_FIRST_CHOICE,)
    return replace(parts, around=(*parts.around, benchmark_algorithms), notes=(*parts.notes, *notes))


_FIRST_CHOICE = (
    "cudnn=benchmark: a convolution of a shape that this process has computed before keeps its algorithm;"
    " graphs=step chooses anew when the step is recorded"
)


@contextmanager
def benchmark_algorithms() -> Iterator[None]:
    """Enables cuDNN's timing of algorithms within the context."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


class FreshAlgorithms:
    """Runs work in a new thread, whose cache of cuDNN algorithms is empty.

    The thread lives as long as this object, because a recorded step uses kernels that the thread's algorithms loaded.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cudnn")

    def __call__(self, work: Callable[[], Result]) -> Result:
        """Returns the result of `work`, or raises its error."""
        return self._thread.submit(work).result()


def cudnn_inexact_reasons(parts: LoweringContext) -> Iterator[str]:
    """Yields why a resumed run under this plan may differ from an uninterrupted one; nothing if cuDNN times none."""
    on_cuda = any(device.type == "cuda" for device in parts.devices)
    if parts.plan.cudnn == "benchmark":
        yield f"cudnn=benchmark: {_ANOTHER_CHOICE}"
    elif on_cuda and torch.backends.cudnn.benchmark:
        yield f"torch.backends.cudnn.benchmark is on: {_ANOTHER_CHOICE}"


_ANOTHER_CHOICE = "after a resume cuDNN may choose another algorithm for a convolution, so the last bits may differ"
