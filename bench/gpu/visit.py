"""One visit to a machine: runs parts of checks until the list or the time is over, and stores each result at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.gpu.catalogue import Check, Job
from bench.gpu.order import next_fitting
from bench.gpu.processes import Child, Ended
from bench.gpu.record import Record
from bench.gpu.setting import Setting

Say = Callable[[str], None]

_SPARE_S = 2.0
"""Kept for the table at the end of the budget."""

_SLOWER = 3.0
"""Times the limits of a rehearsal, which may share two cores with other programs."""


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
    _child: Child | None = None
    _check: Check | None = None

    def run(self, jobs: Sequence[Job]) -> None:
        """Runs the parts in their order; those that don't fit into the time that is left make way for later ones."""
        waiting = list(jobs)
        try:
            while (job := next_fitting(waiting, self.left_s)) is not None:
                waiting.remove(job)
                self.cut = job.key
                if self._run(job):
                    self.cut = ""
                else:
                    return
        finally:
            self._close()

    @property
    def left_s(self) -> float | None:
        """Seconds that are left for parts."""
        return None if self.budget_s is None else self.budget_s - _SPARE_S - (time.monotonic() - self.began)

    def _run(self, job: Job) -> bool:
        """Runs one part; False where the budget ended it."""
        if not self.setting.is_rehearsal and self.setting.device not in job.part.kinds:
            self._store(job, Ended("skipped", f"not for {self.setting.device}", 0.0, {}, ""))
            return True
        own_s = job.part.limit_s * (_SLOWER if self.setting.is_rehearsal else 1.0)
        left_s = self.left_s
        is_shorter = left_s is not None and left_s < own_s
        ended = self._process(job.check).run(job.part.name, left_s if is_shorter and left_s is not None else own_s)
        if ended.status in ("failed", "late"):
            self._close()  # an error of CUDA stays with its process
        if ended.status == "late" and is_shorter:
            return False
        self._store(job, ended)
        return True

    def _store(self, job: Job, ended: Ended) -> None:
        self.ended[job.key] = ended
        self.record.store(job.key, ended)
        status = "FAILED" if ended.status in ("failed", "late") else ended.status
        self.say(f"{job.key} {status} ({ended.seconds:.0f} s): {ended.figure}")

    def _process(self, check: Check) -> Child:
        """The process of a check; there is one at a time."""
        if self._child is None or self._check is not check:
            self._close()
            log = self.setting.scratch / "output" / f"{check.name}.txt"
            self._child, self._check = Child(check.module, self.setting, log), check
        return self._child

    def _close(self) -> None:
        if self._child is not None:
            self._child.close()
        self._child = None
