"""Worker processes that load samples: start, end, and the training process's wait for them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.queues import Queue
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from hotloop.core.processes import HANGUP
from hotloop.core.torch_private import ExceptionWrapper
from hotloop.data.seeded_dataset import show_dataset

Check = Callable[[], None]
"""Raises StopRequested if there is a reason to stop, such as a received signal."""


def never_stop() -> None: ...


_WATCH_S = 1.0
"""Time between two checks of a worker that the training process exists."""

_POLL_S = 0.5
"""Time between two checks for a stop while the training process waits for a batch."""


@dataclass(frozen=True)
class WorkerInit:
    """The initialisation of a worker process; an error while sending a batch is raised in the training process.

    The worker ends within a second of the training process. torch's workers check their parent alone: with `forkserver`
    the parent is a server that outlives the training process, and torch misses a kill while workers start.

    Attributes:
        then: the user's own initialisation.
        leaves_signals: whether the worker ignores Ctrl-C and the first SIGTERM, which a terminal or a batch job sends
            to all processes: training needs data for its last steps, and then ends its workers.
        parent: process id of the training process.
    """

    then: Callable[[int], None] | None = None
    leaves_signals: bool = True
    parent: int = field(default_factory=os.getpid)

    def __call__(self, worker: int) -> None:
        if is_orphaned(self.parent):
            os._exit(1)
        threading.Thread(target=_exit_with_parent, args=[self.parent], daemon=True).start()
        show_dataset()
        sys.excepthook = partial(_report_unless_orphaned, self.parent, sys.excepthook)
        Queue._on_queue_feeder_error = _report_error  # type: ignore[attr-defined]
        if self.leaves_signals:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            for number in (signal.SIGTERM, *HANGUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, _restore_default)
        if self.then is not None:
            self.then(worker)


def _restore_default(number: int, frame: FrameType | None) -> None:
    """Makes the next signal of this kind end the process, so that a hanging worker can be ended."""
    signal.signal(number, signal.SIG_DFL)


def is_orphaned(parent: int) -> bool:
    """Whether the process that started this worker has ended; a fork server is the parent of its workers."""
    server_child = getattr(multiprocessing.context, "ForkServerProcess", None)
    if server_child is not None and isinstance(multiprocessing.current_process(), server_child):
        started_by = multiprocessing.parent_process()
        return started_by is None or not started_by.is_alive()
    return os.getppid() != parent


def _exit_with_parent(parent: int) -> None:
    while not is_orphaned(parent):
        time.sleep(_WATCH_S)
    os._exit(1)


def _report_unless_orphaned(parent: int, report: Callable[..., Any], *error: Any) -> None:
    """Reports an error, unless an orphan loses a connection: connections close before their process ends."""
    if isinstance(error[1], ConnectionError | EOFError):
        time.sleep(2 * _WATCH_S)  # `_exit_with_parent` ends an orphan meanwhile
    report(*error)


def _report_error(queue: Any, error: Exception, item: Any) -> None:
    """Sends the error in place of a batch; Python 3.11 to 3.14 print the error in the worker and drop the batch."""
    if not (isinstance(item, tuple) and len(item) == 2):  # bytes without a receiver
        return
    number, batch = item
    if isinstance(batch, ExceptionWrapper):  # the error's class can't be sent
        batch.exc_type = RuntimeError
    else:
        worker = get_worker_info()
        batch = ExceptionWrapper(where=f"in DataLoader worker process {worker.id if worker else ''}")
    with queue._notempty:  # like `put`, but before later items such as the end of a stream
        queue._sem.acquire(block=False)
        queue._buffer.appendleft((number, batch))


@contextmanager
def report_from_workers(loader: Any) -> Iterator[None]:
    """Makes workers that the user's loader starts within the context report batches that can't be sent."""
    if not isinstance(loader, DataLoader) or loader.num_workers == 0:
        yield
        return
    before = loader.worker_init_fn
    loader.worker_init_fn = WorkerInit(before, leaves_signals=False)
    try:
        yield
    finally:
        loader.worker_init_fn = before


def check_while_waiting(batches: Any, check: Check) -> Any:
    """Makes a loader's iterator call `check` while waiting for its workers; returns the iterator."""
    if not hasattr(batches, "_try_get_data"):  # torch 2.11 to 2.13: waits for a batch up to a timeout
        return batches
    wait = type(batches)._try_get_data
    owner = weakref.ref(batches)  # without a reference cycle, workers end with the iterator

    def wait_and_check(timeout: float | None = None) -> tuple[bool, Any]:
        until = time.monotonic() + (_POLL_S if timeout is None else timeout)
        while True:
            check()
            received: tuple[bool, Any] = wait(owner(), timeout=max(0.0, min(_POLL_S, until - time.monotonic())))
            if received[0] or time.monotonic() >= until:
                return received

    batches._try_get_data = wait_and_check
    return batches


def end_workers(batches: Any) -> None:
    """Ends the processes of a loader's iterator. An error may refer to the iterator and so delay its deletion."""
    getattr(batches, "_shutdown_workers", lambda: None)()
