"""Memory that goes back to the system after each step, and comes anew."""

from __future__ import annotations

from collections.abc import Iterator

from hotloop.diagnosing.step import Step
from hotloop.profiles import Remedy

_PAGE_US = 2.0
"""The most that zeroing and mapping a page takes; 1 to 2 us on servers of today. Other work of the system is not won."""


def given_back(step: Step) -> Iterator[Remedy]:
    """Blocks that the C library gives back as soon as they are free: the system zeroes each page again for the next step."""
    paging, threads = step.profile.paging, step.profile.threads
    if paging is None or not step.on_cpu:
        return
    took = min(paging.system_ms, paging.pages * _PAGE_US / 1e3)
    yield Remedy(
        cause="memory is given back after each step, and comes anew in the next",
        where=step.profile.step_where or step.profile.source,
        remedy="keep it: start the script with MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 in the environment",
        gain=step.share(took / max(1.0, threads.busy if threads else 1.0)),
        evidence=f"in each step of {step.ms:.2f} ms the system hands out {paging.pages:,.0f} pages, each zeroed, and takes "
        f"{paging.system_ms:.2f} ms of processors' time",
        axes={"allocator": "keep"},
    )
