"""Which worker computes which batch of an epoch, how far it may run ahead, and that each batch counts once."""

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
    """A batch of the Task's order, to compute the gradient of.

    Attributes:
        epoch, batch: where in the order, both from 0.
        version: updates that the parameters had had when it was handed out.
        turn: of the ledger; what was handed out before it was opened anew counts no more.
    """

    epoch: int
    batch: int
    version: int
    turn: int


@dataclass(frozen=True)
class _Lease:
    """`begun` says how many batches each worker had begun when this one was handed out."""

    work: WorkItem
    worker: int
    begun: dict[int, int]


class BatchScheduler:
    """The account of one epoch at a time.

    Batches go out in the Task's order. The staleness is bounded as in SSP (Ho et al., More effective distributed ML via
    a stale synchronous parallel parameter server, NeurIPS 2013): while a worker computes a batch, no other begins more
    than `bound` + 1 new ones. SSP counts from the beginning of training, since each worker there has a share of its
    own; here whoever is free gets the next batch, so the count begins with each batch, and a gradient still misses at
    most `(workers - 1) * (bound + 2)` updates.

    A worker that may begin nothing new computes what another holds already, the slowest's first (the backup tasks of
    Dean and Ghemawat, MapReduce, OSDI 2004, section 3.6). Whichever gradient comes first counts and the other is
    refused, so that one that is stopped, or lost without a word, never holds up the others.

    Attributes:
        bound: None for no bound.
        counted: batch -> the worker whose gradient was applied, of the present epoch.
        refused: gradients that came when their batch was counted already, since the beginning.
        paused: hand out nothing new.
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

    def is_open(self, epoch: int, first: int, end: int) -> None:
        """Begins the account of an epoch's batches from `first` to before `end`; whatever is still out is forgotten."""
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
        """Batches that were handed out and are not counted."""
        return len({lease.work.batch for lease in self._open_items()} | set(self._returned))

    def take(self, worker: int, version: int) -> WorkItem | None:
        """What the worker is to compute with parameters that had `version` updates; None: wait until something counts."""
        batch = self._choose(worker)
        if batch is None:
            return None
        work = WorkItem(self._epoch, batch, version, self._turn)
        self._begun[worker] = self._begun.get(worker, 0) + 1
        self._leases[worker] = _Lease(work, worker, dict(self._begun))
        return work

    def count(self, worker: int, work: WorkItem) -> bool:
        """Notes that a gradient has come; whether it is to be applied."""
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
        """The worker is gone: the batch that goes to another now; None if there is none, or another has it already."""
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
        """Those whose batch is not counted yet, the oldest first."""
        return [lease for lease in self._leases.values() if lease.work.batch not in self.counted]

    def _is_ahead(self, worker: int, lease: _Lease) -> bool:
        """Whether the worker has begun more than the bound since the lease was given."""
        begun = self._begun.get(worker, 0) - lease.begun.get(worker, 0)
        return self.bound is not None and begun > self.bound

    def _least_leased(self, leases: Iterable[_Lease]) -> int | None:
        """The batch that the fewest workers compute, the oldest of them."""
        held = [lease.work.batch for lease in self._open_items()]
        return min((lease.work.batch for lease in leases), key=held.count, default=None)


@dataclass(frozen=True)
class Gradient:
    """What a worker made of a batch; all tensors on the CPU.

    Attributes:
        loss: 0-dim.
        scalars: further ones that the Task's step gave, 0-dim.
        weight: what the loss counts: a number, or a 0-dim tensor.
        gradients: of each parameter, in the model's order; None where it has none.
        buffers: of the model after the forward pass, in its order.
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
    """The worker waits for its first batch, or for its first one after it came back."""


@dataclass(frozen=True)
class WorkerLost:
    """The worker died; `why` goes on from its name: `was killed by SIGKILL`."""

    reason: str


WorkerAnswer = WorkerReady | Gradient | WorkerLost | HotloopError
"""An error is what kept the worker from computing its batch: it ends the training."""

PollHook = Callable[[], None]


def no_poll() -> None:
    """Looks at nothing."""


class WorkerPool(Protocol):
    """Workers, by number from 0; each computes one batch at a time."""

    def submit(self, worker: int, work: WorkItem, weights: WeightVersion) -> None:
        """Hands out a batch to a worker that is ready or has answered; does not wait."""

    def receive(self, look: PollHook = no_poll) -> tuple[int, WorkerAnswer]:
        """Waits for the next answer, and says whose it is.

        Args:
            look: called now and then while none comes; what it raises ends the wait.

        Raises:
            TrainingError: all workers are gone.
        """

    def close(self) -> None:
        """Ends the workers, whatever they are doing."""
