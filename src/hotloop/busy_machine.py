"""Whether other programs used the cores while something was profiled, what that costs, and what to do."""

from __future__ import annotations

from hotloop.measuring.crowding import crowding
from hotloop.profiles import Threads

_NOTABLY = 1.2
"""Times as long as they could take, from which on operations are said to wait for other programs."""

_BUSY_CORES, _BUSY_SHARE = 0.3, 0.1
"""Cores that other programs use, and their part of all cores, from which on a machine is busy."""


def busy_line(threads: Threads | None) -> str:
    """What to say of a machine whose cores other programs use; empty where they use next to none."""
    if threads is None or threads.others < max(_BUSY_CORES, _BUSY_SHARE * threads.cores):
        return ""
    free = max(1, threads.cores - round(threads.others))
    again = "run again when the machine is quiet"
    if threads.torch > free:
        again = f"set OMP_NUM_THREADS={free} and run again, best when the machine is quiet"
    return (
        f"The machine is busy: other programs kept {threads.others:.1f} of {threads.cores} cores busy. Times are too long, "
        f"and advice that depends on how fast operations are is left out: {again}."
    )


def with_crowding(threads: Threads | None) -> Threads | None:
    """The threads with what it costs that there are more of them than cores, if there are."""
    if threads is None or threads.torch <= threads.cores:
        return threads
    return threads.model_copy(update={"slower": crowding(threads.torch, threads.cores)})


def beside_others(threads: Threads | None) -> list[str]:
    """A note where other programs keep cores busy that torch's threads wait for, with what that costs just now."""
    if threads is None or threads.torch > threads.cores:
        return []
    free = max(1, threads.cores - round(threads.others))
    slower = crowding(threads.torch, free) if threads.torch > free else 1.0
    if slower < _NOTABLY:
        return []
    return [
        f"other programs kept {threads.others:.1f} of {threads.cores} cores busy, and the pieces of an operation wait for "
        f"each other: cut for {threads.torch} threads, operations take {slower:.1f} times as long as with {free} while "
        f"they run (OMP_NUM_THREADS={free}); times and limits are those of a shared machine"
    ]
