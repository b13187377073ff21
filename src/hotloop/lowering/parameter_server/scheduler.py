"""Assignment of an epoch's batches to workers: each batch counts once, and no worker is too far ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from hotloop.errors import HotloopError
from hotloop.lowering.parameter_server.server import WeightVersion


@dataclass(frozen=True)
class WorkItem:
    """A batch whose gradient a worker computes.

    Attributes:
        epoch, batch: place in the Task's order, both from 0.
        version: number of updates of the parameters at the assignment.
        turn: number of the epoch's start; items of earlier starts no longer count.
    """

    epoch: int
    batch: int
    version: int
    turn: int


@dataclass(frozen=True)
class _Lease:
    """An assigned item; `begun` counts the batches that each worker had begun at the assignment."""

    work: WorkItem
    worker: int
    begun: dict[int, int]


class BatchScheduler:
    """Assigns the batches of one epoch at a time, in the Task's order.

    The staleness is bounded as in SSP (Ho et al., NeurIPS 2013): while a worker computes a batch, no other begins more
    than `bound` + 1 new ones. SSP counts from the beginning of training, since each worker there has its own share of
    the data; here any free worker gets the next batch, so the count begins with each batch. A gradient misses at most
    `(workers - 1) * (bound + 2)` updates.

    A worker that may begin no new batch computes an assigned one, the slowest worker's first (backup tasks of
    MapReduce, Dean and Ghemawat, OSDI 2004, section 3.6). The first gradient of a batch counts and a later one is
    refused, so that a stopped or dead worker never blocks the others.

    Attributes:
        bound: None for no bound.
        counted: batch -> the worker whose gradient was applied, in this epoch.
        refused: number of gradients for batches that were counted already.
        paused: whether no new batches are assigned.
    """

    def __init__(self, bound: int | None = None) -> None:
        self.bound = bound
        self.counted: dict[int, int] = {}
        self.refused = 0
        self.paused = False
        self._leases: dict[int, _Lease] = {}
        self._begun: dict[int, int] = {}
        self._returned: deque[int] = deque()
        self._epoch = self._next = self._end = self._turn = 0

    def begin_epoch(self, epoch: int, first: int, end: int) -> None:
        """Begins an epoch with the batches from `first` to before `end`; earlier assignments no longer count."""
        self._epoch, self._next, self._end, self._turn = epoch, first, end, self._turn + 1
        self.counted = {}
        self._leases.clear()
        self._returned.clear()

    @property
    def is_done(self) -> bool:
        """Whether every batch of the epoch is counted."""
        return self._next == self._end and not self.outstanding

    @property
    def outstanding(self) -> int:
        """Number of assigned batches that aren't counted."""
        return len({lease.work.batch for lease in self._open_items()} | set(self._returned))

    def take(self, worker: int, version: int) -> WorkItem | None:
        """Assigns a batch with parameters of `version` updates; None if the worker must wait for another's gradient."""
        batch = self._choose(worker)
        if batch is None:
            return None
        work = WorkItem(self._epoch, batch, version, self._turn)
        self._begun[worker] = self._begun.get(worker, 0) + 1
        self._leases[worker] = _Lease(work, worker, dict(self._begun))
        return work

    def count(self, worker: int, work: WorkItem) -> bool:
        """Counts a gradient; returns whether it is to be applied."""
        lease = self._leases.get(worker)
        if lease is not None and lease.work == work:
            del self._leases[worker]
        if work.turn != self._turn or work.batch in self.counted:
            self.refused += 1
            return False
        self.counted[work.batch] = worker
        if work.batch in self._returned:
            self._returned.remove(work.batch)
        return True

    def release_worker(self, worker: int) -> int | None:
        """Removes a dead worker; returns its batch if no other worker computes it."""
        lease = self._leases.pop(worker, None)
        if lease is None or lease.work.batch in self.counted:
            return None
        batch = lease.work.batch
        if any(other.work.batch == batch for other in self._leases.values()):
            return None
        self._returned.append(batch)
        return batch

    def _choose(self, worker: int) -> int | None:
        others = [lease for lease in self._open_items() if lease.worker != worker]
        if slow := [lease for lease in others if self._is_ahead(worker, lease)]:
            return self._least_leased(slow)
        if self._returned:
            return self._returned.popleft()
        if self._next < self._end and not self.paused:
            self._next += 1
            return self._next - 1
        return self._least_leased(others)

    def _open_items(self) -> list[_Lease]:
        """Returns the assignments whose batch isn't counted yet, oldest first."""
        return [lease for lease in self._leases.values() if lease.work.batch not in self.counted]

    def _is_ahead(self, worker: int, lease: _Lease) -> bool:
        begun = self._begun.get(worker, 0) - lease.begun.get(worker, 0)
        return self.bound is not None and begun > self.bound

    def _least_leased(self, leases: Iterable[_Lease]) -> int | None:
        """Returns the batch that the fewest workers compute, the oldest of these."""
        assigned = [lease.work.batch for lease in self._open_items()]
        return min((lease.work.batch for lease in leases), key=assigned.count, default=None)


@dataclass(frozen=True)
class Gradient:
    """A worker's result for a batch; all tensors are on the CPU.

    Attributes:
        loss: 0-dim.
        scalars: further figures of the Task's step, 0-dim.
        weight: the loss's weight: a number, or a 0-dim tensor.
        gradients: of each parameter, in the model's order; None for a parameter without gradient.
        buffers: the model's buffers after the forward pass, in its order.
    """

    work: WorkItem
    samples: int
    loss: Tensor
    weight: Any
    gradients: list[Tensor | None]
    buffers: list[Tensor] = field(default_factory=list)
    scalars: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerReady:
    """The worker waits for its first batch, or for its first batch after a restart."""


@dataclass(frozen=True)
class WorkerLost:
    """The worker died; `reason` continues a sentence after its name: `was killed by SIGKILL`."""

    reason: str


WorkerAnswer = WorkerReady | Gradient | WorkerLost | HotloopError
"""An error is the reason why the worker couldn't compute its batch: it ends the training."""

PollHook = Callable[[], None]


def no_poll() -> None:
    pass


class WorkerPool(Protocol):
    """Workers, by number from 0; each computes one batch at a time."""

    def submit(self, worker: int, work: WorkItem, weights: WeightVersion) -> None:
        """Sends a batch to a worker that is ready or has answered; doesn't wait."""

    def receive(self, look: PollHook = no_poll) -> tuple[int, WorkerAnswer]:
        """Waits for the next answer, and returns its worker and the answer.

        Args:
            look: called repeatedly while there is none; an error of it ends the wait.

        Raises:
            TrainingError: all workers are gone.
        """

    def close(self) -> None:
        """Ends the workers at once."""
