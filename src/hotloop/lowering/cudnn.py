"""The cudnn axis: whether cuDNN times the algorithms of a convolution on a CUDA device, or chooses one by a heuristic.

torch stores the chosen algorithm by shape, in each thread (torch 2.13: ATen/native/cudnn/Conv_v8.cpp), and reads the store
before the switch. So the switch counts only where a thread convolves a shape for the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch

from hotloop.lowering.ingredients import Ingredients

Result = TypeVar("Result")


def with_cudnn(parts: Ingredients) -> Ingredients:
    """`torch.backends.cudnn.benchmark` around training steps, also while a step is compiled and recorded."""
    plan = parts.plan
    if plan.cudnn == "default":
        return parts
    notes = () if plan.graphs != "none" else (_FIRST_CHOICE,)
    return replace(parts, around=(*parts.around, benchmarking), notes=(*parts.notes, *notes))


_FIRST_CHOICE = (
    "cudnn=benchmark: a convolution of a shape that this process has computed before keeps its algorithm;"
    " graphs=step chooses anew when the step is recorded"
)


@contextmanager
def benchmarking() -> Iterator[None]:
    """Switches cuDNN's timing of algorithms on, and restores the switch."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


class FreshChoice:
    """Runs work in a thread of its own, in which cuDNN has chosen no algorithm yet.

    The thread lives as long as this object does, since a recorded step uses what the thread's algorithms have loaded.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cudnn")

    def __call__(self, work: Callable[[], Result]) -> Result:
        """The result of `work`; its error is raised here."""
        return self._thread.submit(work).result()


def inexact_reasons(parts: Ingredients) -> Iterator[str]:
    """Why a resumed run under this plan may differ from an uninterrupted run; nothing where cuDNN times no algorithms."""
    on_cuda = any(device.type == "cuda" for device in parts.devices)
    if parts.plan.cudnn == "benchmark":
        yield f"cudnn=benchmark: {_ANOTHER_CHOICE}"
    elif on_cuda and torch.backends.cudnn.benchmark:
        yield f"torch.backends.cudnn.benchmark is on: {_ANOTHER_CHOICE}"


_ANOTHER_CHOICE = "after a resume cuDNN may choose another algorithm for a convolution, so the last bits may differ"
