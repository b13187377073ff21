"""Warnings about other programs that use CPU cores during a profile."""

from __future__ import annotations

from hotloop.core.records.profile import ThreadUse
from hotloop.tuning.races.system_load import oversubscription

_NOTABLE_SLOWDOWN = 1.2
"""Smallest reported slowdown: duration of operations over their duration on an idle machine."""

_BUSY_CORES, _BUSY_SHARE = 0.3, 0.1
"""Least cores, and least share of all cores, that other programs use on a busy machine."""


def busy_warning(threads: ThreadUse | None) -> str:
    """Returns the warning that other programs use the cores; empty if they use almost none."""
    if threads is None or threads.others < max(_BUSY_CORES, _BUSY_SHARE * threads.cores):
        return ""
    free, again = max(1, threads.cores - round(threads.others)), "run again when the machine is quiet"
    if threads.torch > free:
        again = f"set OMP_NUM_THREADS={free} and run again, best when the machine is quiet"
    return (
        f"The machine is busy: other programs kept {threads.others:.1f} of {threads.cores} cores busy. Times are too long, "
        f"and advice that depends on how fast operations are is left out: {again}."
    )


def with_oversubscription(threads: ThreadUse | None) -> ThreadUse | None:
    """Returns the threads, with the measured slowdown if torch has more threads than the machine has cores."""
    if threads is None or threads.torch <= threads.cores:
        return threads
    return threads.model_copy(update={"slower": oversubscription(threads.torch, threads.cores)})


def slowdown_notes(threads: ThreadUse | None) -> list[str]:
    """Returns a note with the current slowdown if torch's threads wait for cores that other programs use."""
    if threads is None or threads.torch > threads.cores:
        return []
    free = max(1, threads.cores - round(threads.others))
    slower = oversubscription(threads.torch, free) if threads.torch > free else 1.0
    if slower < _NOTABLE_SLOWDOWN:
        return []
    return [
        f"other programs kept {threads.others:.1f} of {threads.cores} cores busy, and the pieces of an operation wait for "
        f"each other: cut for {threads.torch} threads, operations take {slower:.1f} times as long as with {free} while "
        f"they run (OMP_NUM_THREADS={free}); times and limits are those of a shared machine"
    ]
