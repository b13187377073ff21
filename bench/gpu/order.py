"""Which parts to run, and in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.gpu.catalogue import Job
from bench.gpu.record import Stored
from hotloop.errors import HotloopError

_RANKS = {None: 0, "failed": 1, "skipped": 2, "passed": 2}
"""By the status that is known: parts that never ran come first, so that a failing part can't keep later ones waiting."""


def chosen(jobs: Sequence[Job], only: str | None) -> list[Job]:
    """The parts that `--only a,b/c` names: checks, or single parts.

    Raises:
        HotloopError: a name is unknown.
    """
    if only is None:
        return list(jobs)
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = {job.check.name for job in jobs} | {job.key for job in jobs}
    if unknown := [name for name in names if name not in known]:
        checks = dict.fromkeys(job.check.name for job in jobs)
        raise HotloopError(
            f"--only {', '.join(unknown)}: there is no such check",
            expected=f"some of {', '.join(checks)}, or parts such as {jobs[0].key}",
            fix="see --list",
        )
    return [job for job in jobs if job.check.name in names or job.key in names]


def ordered(jobs: Sequence[Job], known: Mapping[str, Stored], *, repeat: bool) -> list[Job]:
    """Parts without a passing result first, each group in the order of the list.

    Args:
        repeat: whether parts that passed before run again at the end.
    """

    def rank(job: Job) -> int:
        return _RANKS[known[job.key]["status"] if job.key in known else None]

    return [job for job in sorted(jobs, key=rank) if repeat or rank(job) < 2]


def next_fitting(jobs: Sequence[Job], left_s: float | None) -> Job | None:
    """The first part that is expected to end in the time that is left; None where no part is."""
    return next((job for job in jobs if left_s is None or job.part.estimate_s <= left_s), None)
