"""Processes that load samples: what each of them does first, and how the process that trains waits for them."""

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

from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, get_worker_info

from hotloop.data.seeded import show_dataset
from hotloop.handlers import HANGUP

Check = Callable[[], None]
"""Raises Stopped where there is a reason to stop, such as a signal that has come."""


def goes_on() -> None:
    """The check of who never stops."""


_WATCH_S = 1.0
"""Between two questions of a worker whether the process that trains is there."""

_POLL_S = 0.5
"""Between two questions whether to stop, while no batch comes."""


@dataclass(frozen=True)
class InWorker:
    """What a worker process does first; a batch that can't be sent then raises its error in the process that trains.

    The worker ends within a second of that process. torch's workers look at their parent, which under `forkserver` is a server
    that lives as long as they do, and torch doesn't see a process that is killed while workers start.

    Attributes:
        then: what the user has workers do first.
        leaves_signals: whether Ctrl-C and SIGTERM are left to the process that trains. These signals reach all processes of
            a terminal or a batch job, but training still needs data for its last steps, and then ends its workers itself.
    """

    then: Callable[[int], None] | None = None
    leaves_signals: bool = True
    parent: int = field(default_factory=os.getpid)

    def __call__(self, worker: int) -> None:
        if is_orphaned(self.parent):
            os._exit(1)
        threading.Thread(target=_end_with, args=[self.parent], daemon=True).start()
        show_dataset()
        sys.excepthook = partial(_unless_orphaned, self.parent, sys.excepthook)
        Queue._on_queue_feeder_error = _report  # type: ignore[attr-defined]
        if self.leaves_signals:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            for number in (signal.SIGTERM, *HANGUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, _once_ignored)
        if self.then is not None:
            self.then(worker)


def _once_ignored(number: int, frame: FrameType | None) -> None:
    """Lets the next signal of this kind end the process, as nothing else would a worker that hangs."""
    signal.signal(number, signal.SIG_DFL)


def is_orphaned(parent: int) -> bool:
    """Whether the process that started this worker is gone; the parent of a fork server's children is the server."""
    if _is_served():
        started_by = multiprocessing.parent_process()
        return started_by is None or not started_by.is_alive()
    return os.getppid() != parent


def _is_served() -> bool:
    served = getattr(multiprocessing.context, "ForkServerProcess", None)
    return served is not None and isinstance(multiprocessing.current_process(), served)


def _end_with(parent: int) -> None:
    while not is_orphaned(parent):
        time.sleep(_WATCH_S)
    os._exit(1)


def _unless_orphaned(parent: int, report: Callable[..., Any], *error: Any) -> None:
    """Reports an error, such as one of the thread that hands tensors over; connections end before their process does."""
    if isinstance(error[1], ConnectionError | EOFError):
        time.sleep(2 * _WATCH_S)  # `_end_with` ends an orphan meanwhile
    report(*error)


def _report(queue: Any, error: Exception, item: Any) -> None:
    """Puts the error in the place of a batch; Python 3.11 to 3.14 print it in the worker and drop the batch."""
    if not (isinstance(item, tuple) and len(item) == 2):  # bytes that nobody receives any more
        return
    number, batch = item
    if isinstance(batch, ExceptionWrapper):  # of a class that can't be sent
        batch.exc_type = RuntimeError
    else:
        worker = get_worker_info()
        batch = ExceptionWrapper(where=f"in DataLoader worker process {worker.id if worker else ''}")
    with queue._notempty:  # as `put` has it, but before what was put since, such as the end of a stream
        queue._sem.acquire(block=False)
        queue._buffer.appendleft((number, batch))


@contextmanager
def reporting(loader: Any) -> Iterator[None]:
    """Has the workers that a loader of the user's starts meanwhile report batches that can't be sent."""
    if not isinstance(loader, DataLoader) or loader.num_workers == 0:
        yield
        return
    before = loader.worker_init_fn
    loader.worker_init_fn = InWorker(before, leaves_signals=False)
    try:
        yield
    finally:
        loader.worker_init_fn = before


def checking(batches: Any, check: Check) -> Any:
    """The same iterator of a loader, which calls `check` while it waits for its workers."""
    if not hasattr(batches, "_try_get_data"):  # torch 2.11 to 2.13: waits for a batch for a while
        return batches
    wait, owner = type(batches)._try_get_data, weakref.ref(batches)  # no cycle, so that workers end with the iterator

    def patient(timeout: float | None = None) -> tuple[bool, Any]:
        until = time.monotonic() + (_POLL_S if timeout is None else timeout)
        while True:
            check()
            found: tuple[bool, Any] = wait(owner(), timeout=max(0.0, min(_POLL_S, until - time.monotonic())))
            if found[0] or time.monotonic() >= until:
                return found

    batches._try_get_data = patient
    return batches


def end_workers(batches: Any) -> None:
    """Ends the processes of a loader's iterator; its deletion alone may come late, as an error under way holds it."""
    getattr(batches, "_shutdown_workers", lambda: None)()
