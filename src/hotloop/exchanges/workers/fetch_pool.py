"""Worker processes that fetch the batches of one pass of a loader ahead of the script: torch's own loader and workers."""

from __future__ import annotations

import multiprocessing.process
import os
import signal
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling, worker

from hotloop.core.patches import Patches
from hotloop.core.processes import end_with_parent
from hotloop.core.random.rng import generator_states
from hotloop.errors import describe_error
from hotloop.exchanges.dataset_watch import DatasetWatch
from hotloop.exchanges.workers.batch_order import BatchOrder
from hotloop.exchanges.workers.worker_limits import difference, why_unfit_batch

Fetched = tuple[str, Any]
"""Why a worker can't fetch a batch, and the batch; one of both is empty."""

_TWICE = 2
"""First batches that each worker reads twice during a proof: a hidden state makes the second one differ."""

DRAWS, CHANGES = "its samples draw random numbers", "reading a sample changes the data set"


class WatchedBatches(Dataset):
    """The script's batches, with the reason why a worker's batch may differ from that of the script's own process.

    Args:
        fetch: returns the batch of some rows.
        watch: the data set's objects before the fork.
        is_proof: whether the first batches are read twice.
    """

    def __init__(self, fetch: Callable[[Any], Any], watch: DatasetWatch, *, is_proof: bool) -> None:
        self._fetch, self._watch = fetch, watch
        self._twice = _TWICE if is_proof else 0

    def __getitem__(self, rows: Any) -> Fetched:
        states = generator_states()
        try:
            batch = self._fetch(rows)
            wrong = why_unfit_batch(batch)
            if self._twice and not wrong:
                self._twice -= 1
                wrong = "a sample differs when it is read again" if difference(batch, self._fetch(rows)) else ""
            if generator_states() != states:
                wrong = DRAWS
            elif self._watch.has_changed():
                wrong = CHANGES
        except Exception as error:  # the script's own process then raises the error
            wrong = f"a worker raised {describe_error(error).splitlines()[0][:200]}"
        return (wrong, None) if wrong else ("", batch)


class FetchPool:
    """Forks workers at the first `begin`; they end with this object.

    Args:
        order: the script's batches.
        batches: what the workers fetch.
        workers: number of processes.
        timeout_s: seconds after which a batch that is still missing is an error.
    """

    def __init__(self, order: BatchOrder, batches: WatchedBatches, workers: int, timeout_s: float) -> None:
        self._order = order
        self._next: int | None = None
        self._results: Any = None
        self._loader = DataLoader(
            batches,
            batch_size=None,
            sampler=_Ahead(order),
            num_workers=workers,
            collate_fn=_same,
            timeout=timeout_s,
            worker_init_fn=_begin_worker(os.getpid()),
            multiprocessing_context="fork",
            generator=torch.Generator(),  # the base seed of the workers isn't drawn from the script's generator
            persistent_workers=True,
        )

    @property
    def is_running(self) -> bool:
        """Whether workers fetch ahead."""
        return self._next is not None

    def begin(self) -> None:
        """Lets the workers begin with the batch after the one that the script has taken last."""
        self._next = self._order.taken
        with _unnoticed():
            self._results = iter(self._loader)
        _hide(self._results)

    def pause(self) -> None:
        """Stops reading ahead; the next `begin` drops what the workers have fetched."""
        self._next = None

    def take(self) -> Fetched | None:
        """Returns the batch that the script has taken last, waiting for it; None if the workers don't fetch this one.

        Raises:
            RuntimeError: a worker died or hangs.
        """
        if self._next != self._order.taken - 1:
            self.pause()
            return None
        self._next += 1
        try:
            return next(self._results)
        except StopIteration:
            return None

    def end(self) -> None:
        """Ends the workers."""
        if self._results is not None:
            self._results._shutdown_workers()
        self._next = self._results = None

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of Python
            self.end()


class _Ahead:
    """A sampler for torch's loader; each pass begins where the script is."""

    def __init__(self, order: BatchOrder) -> None:
        self._order = order

    def __iter__(self) -> Iterator[list[int]]:
        return self._order.read_ahead()


def _same(fetched: Any) -> Any:
    return fetched


_started = weakref.WeakSet[Any]()
"""Torch's iterators with workers of this process."""


def abandon_pools() -> None:
    """In a forked process: ends no worker of its parent."""
    for results in list(_started):
        results._shutdown, results._worker_pids_set = True, False


def _hide(results: Any) -> None:
    """Takes the workers from Python's list of children: other code ends or waits for all of them, in forks as well."""
    _started.add(results)
    results._worker_pids_set = False
    for process in results._workers:
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]  # Python has no public way


@contextmanager
def _unnoticed() -> Iterator[None]:
    """Starts workers without a trace in the script's process.

    Torch (2.13) raises an error from a handler of SIGCHLD, wherever the script is, if a worker dies. Signals are blocked, since
    a new worker has the script's handlers until `worker_init_fn` runs.
    """
    patches, before = Patches(), signal.pthread_sigmask(signal.SIG_BLOCK, _signals())
    patches.patch(signal_handling, "_set_worker_pids", lambda original: lambda *args: None)
    patches.patch(signal_handling, "_set_SIGCHLD_handler", lambda original: lambda: None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        patches.undo()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _signals() -> set[int]:
    """Returns the signals with a handler in Python, and Ctrl-C."""
    return {signal.SIGINT, *(one for one in signal.valid_signals() if callable(signal.getsignal(one)))}


def _begin_worker(parent: int) -> Callable[[int], None]:
    def begin(number: int) -> None:
        end_with_parent(parent, signal.SIGKILL)
        blocked = _signals()
        for one in blocked - {signal.SIGTERM}:  # torch has set a handler for SIGTERM
            signal.signal(one, signal.SIG_IGN if one == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        worker._worker_info = None  # a data set finds itself in the script's own process

    return begin
