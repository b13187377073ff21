"""One pass of the script over a loader: each batch comes from a worker or from the script's own process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.utils.data._utils.fetch import _MapDatasetFetcher

from hotloop.errors import describe_error
from hotloop.exchanges.dataset_watch import DatasetWatch
from hotloop.exchanges.workers.batch_order import BatchOrder
from hotloop.exchanges.workers.fetch_pool import FetchPool, WatchedBatches
from hotloop.exchanges.workers.worker_limits import why_unfit_data
from hotloop.exchanges.workers.worker_site import WorkerSite
from hotloop.scripts.child import raise_signal_error


class LoaderPass:
    """Chooses who fetches each batch.

    Args:
        site: of the loader's data set.
        order: the loader's batches.
        fetcher: torch's, of the script's iterator.
        is_enabled: whether used exchanges are on.
    """

    def __init__(
        self, site: WorkerSite, order: BatchOrder, fetcher: _MapDatasetFetcher, is_enabled: Callable[[], bool]
    ) -> None:
        self.order = order
        self._site, self._is_enabled, self._dataset = site, is_enabled, fetcher.dataset
        # Another object than the iterator's own, whose end is the end of this pass.
        self._fetch = _MapDatasetFetcher(fetcher.dataset, True, fetcher.collate_fn, fetcher.drop_last).fetch
        self._pool: FetchPool | None = None
        self._watch: DatasetWatch | None = None
        self._last_s: float | None = None
        self._fetch_s: float | None = None
        self._is_fetched = False
        site.begin_pass()

    def begin_batch(self) -> None:
        """Notes that the script asks for a batch."""
        self._fetch_s, self._is_fetched = None, False

    def end_batch(self) -> None:
        """Notes that the script gets a batch."""
        if not self._is_fetched and self._pool is not None:
            self._site.leave("its samples are cut from memory")
        now = time.perf_counter()
        if self._last_s is not None and self._is_fetched:
            self._site.end_batch(now - self._last_s, self._fetch_s)
        self._last_s = now

    def fetch(self, own: Callable[[], Any]) -> Any:
        """Returns the batch that the script has taken last from `order`.

        Args:
            own: fetches in the script's own process.
        """
        self._is_fetched = True
        if self._site.is_fast:
            return own()
        if self._site.part is None:
            return self._timed(own)
        found = self._take()
        return own() if found is None else self._site.deliver(found[0], own)

    def end(self) -> None:
        """Ends the workers of this pass."""
        if self._pool is not None:
            self._pool.end()
        self._pool = self._watch = None

    def _timed(self, own: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        batch = own()
        self._fetch_s = time.perf_counter() - began
        self._site.note_batch(batch)
        return batch

    def _take(self) -> tuple[Any] | None:
        """Returns a worker's batch; None if the script's own process fetches this one."""
        try:
            if self._wants_workers():
                return self._take_from_workers()
            if self._pool is not None:
                self._pool.pause()
        except Exception as error:  # such as a limit of processes, or the death of a worker
            raise_signal_error(error)
            self._site.leave(f"its workers failed: {describe_error(error).splitlines()[0][:200]}")
        if not self._site.is_tried:
            self.end()
        return None

    def _wants_workers(self) -> bool:
        part = self._site.part
        assert part is not None
        if part.stage == "race":
            return self._site.uses_workers
        return part.stage == "proof" or (part.stage == "use" and self._is_enabled())

    def _take_from_workers(self) -> tuple[Any] | None:
        pool, watch = self._pool, self._watch
        if pool is None or watch is None:
            self._start()
            return None
        if not pool.is_running:
            if watch.has_changed():
                self.end()
                self._start()
            else:
                pool.begin()
            return None
        fetched = pool.take()
        if fetched is None:
            return None
        wrong, batch = fetched
        if wrong:
            self._site.leave(wrong)
            self.end()
            return None
        if watch.has_changed():
            self._site.note_change()
            self.end()
            return None
        return (batch,)

    def _start(self) -> None:
        """Starts workers for the batches after this one."""
        part, watch = self._site.part, DatasetWatch(self._dataset)
        assert part is not None
        if why := why_unfit_data(self._dataset, watch):
            self._site.leave(why)
            return
        batches = WatchedBatches(self._fetch, watch, is_proof=part.stage == "proof")
        self._watch, self._pool = watch, FetchPool(self.order, batches, self._site.workers, self._site.timeout_s)
        self._pool.begin()
