"""One visit to a machine: runs parts of checks until the list or the time is over, and stores each result at once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock

from bench.gpu.catalogue import Check, Job
from bench.gpu.order import next_fitting
from bench.gpu.processes import Child, Ended
from bench.gpu.record import Record
from bench.gpu.setting import Setting

Say = Callable[[str], None]

_SPARE_S = 2.0
"""Kept for the table at the end of the budget."""

_LANES = 2
"""Checks of a rehearsal that run at the same time: its times count for nothing."""

_SLOWER = 3.0
"""Times the limits of a rehearsal, which may share two cores with other programs."""


@dataclass
class Lane:
    """One process at a time, which runs the parts of one check."""

    setting: Setting
    _child: Child | None = None
    _check: Check | None = None

    def run(self, job: Job, limit_s: float) -> Ended:
        """Runs one part, in the process of its check."""
        if self._child is None or self._check is not job.check:
            self.close()
            log = self.setting.scratch / "output" / f"{job.check.name}.txt"
            self._child, self._check = Child(job.check.module, self.setting, log), job.check
        ended = self._child.run(job.part.name, limit_s)
        if ended.status in ("failed", "late"):
            self.close()  # an error of CUDA stays with its process
        return ended

    def close(self) -> None:
        """Ends the process."""
        child, self._child = self._child, None
        if child is not None:
            child.close()


@dataclass
class Visit:
    """Runs parts.

    Attributes:
        budget_s: for everything; None without a limit.
        ended: results of this visit.
        cut: the part that the budget, or a signal, kept from its end.
    """

    setting: Setting
    record: Record
    say: Say
    budget_s: float | None
    began: float = field(default_factory=time.monotonic)
    ended: dict[str, Ended] = field(default_factory=dict)
    cut: str = ""
    _lock: Lock = field(default_factory=Lock)
    _is_stopped: bool = False

    def run(self, jobs: Sequence[Job]) -> None:
        """Runs the parts in their order; those that don't fit into the time that is left make way for later ones."""
        if self.setting.is_rehearsal and self.budget_s is None:
            return self._run_side_by_side(jobs)
        waiting, lane = list(jobs), Lane(self.setting)
        try:
            while (job := next_fitting(waiting, self.left_s)) is not None:
                waiting.remove(job)
                self.cut = job.key
                if self._run(job, lane):
                    self.cut = ""
                else:
                    return None
        finally:
            lane.close()

    def _run_side_by_side(self, jobs: Sequence[Job]) -> None:
        """Runs several checks at a time, each part of a check after the one before."""
        checks = dict.fromkeys(job.check for job in jobs)
        waiting = deque([job for job in jobs if job.check is check] for check in checks)
        lanes = [Lane(self.setting) for _ in range(_LANES)]
        with ThreadPoolExecutor(_LANES) as pool:
            running = [pool.submit(self._empty, waiting, lane) for lane in lanes]
            try:
                for one in running:
                    one.result()
            finally:
                self._is_stopped = True  # by a signal, where a lane still runs
                for lane in lanes:
                    lane.close()

    def _empty(self, waiting: deque[list[Job]], lane: Lane) -> None:
        while waiting and not self._is_stopped:
            for job in waiting.popleft():
                if self._is_stopped or not self._run(job, lane):
                    return

    @property
    def left_s(self) -> float | None:
        """Seconds that are left for parts."""
        return None if self.budget_s is None else self.budget_s - _SPARE_S - (time.monotonic() - self.began)

    def _run(self, job: Job, lane: Lane) -> bool:
        """Runs one part; False where the budget ended it."""
        if not self.setting.is_rehearsal and self.setting.device not in job.part.kinds:
            self._store(job, Ended("skipped", f"not for {self.setting.device}", 0.0, {}, ""))
            return True
        own_s = job.part.limit_s * (_SLOWER if self.setting.is_rehearsal else 1.0)
        left_s = self.left_s
        is_shorter = left_s is not None and left_s < own_s
        ended = lane.run(job, left_s if is_shorter and left_s is not None else own_s)
        if self._is_stopped:
            self.cut = job.key
            return False
        if ended.status == "late" and is_shorter:
            return False
        self._store(job, ended)
        return True

    def _store(self, job: Job, ended: Ended) -> None:
        with self._lock:
            self.ended[job.key] = ended
            self.record.store(job.key, ended)
            status = "FAILED" if ended.status in ("failed", "late") else ended.status
            self.say(f"{job.key} {status} ({ended.seconds:.0f} s): {ended.figure}")
