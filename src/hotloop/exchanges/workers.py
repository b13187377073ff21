"""The worker exchange: processes fetch the batches of a slow data set ahead, for loaders without workers of their own.

The sampler, its random numbers, and the base seed of each iterator stay the script's own. A worker's batches are compared with the
script's own, then raced.
"""

from __future__ import annotations

import functools
import math
import multiprocessing.process
import os
import shutil
import signal
import statistics
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import psutil
import torch
from torch import Tensor, distributed
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from hotloop.core.patches import Patches
from hotloop.core.processes import end_with_parent
from hotloop.core.random.rng import generator_states
from hotloop.core.torch_private import MapDatasetFetcher, signal_handling, worker
from hotloop.data.batch_difference import batch_difference, batch_leaves
from hotloop.data.batch_tree import map_tensors, tree_tensors
from hotloop.data.dataset_changes import names_in_sample_code
from hotloop.exchanges.dataset_watch import DatasetWatch
from hotloop.exchanges.loader_exchange import SIDE_EFFECTS, describe_dataset
from hotloop.exchanges.part import CallComparison, DatasetExchange, Part, Session, first_line
from hotloop.exchanges.races import Seconds, TimedStep, WindowPairs
from hotloop.profiler.base.transparency import hide_from_warnings
from hotloop.scripts.child import raise_signal_error, strip_own_frames

_TIMED_BATCHES = 8
"""Batches after which the share of the fetch in the time of a batch is known."""

_MIN_FETCH_S, _MIN_SHARE = 1e-3, 0.2
"""Least seconds of a fetch, and least share of the time of a batch, for which workers are tried."""

_MIN_PASS_S = 2.0
"""Least seconds of all fetches of a pass of the loader: each pass starts its workers anew, in about 0.05 s."""

_WARM_UP_BATCHES = 2
"""Batches after a switch that the race leaves out, besides the first one of each window: workers begin or finish."""

_MIN_TIMEOUT_S, _TIMEOUT_FETCHES = 10.0, 20
"""Seconds, and multiples of a fetch's time, after which a worker that hangs is ended."""

_MAX_CHANGES = 3
"""Changes of the data set within a pass, after each of which new workers start."""

_PROCESS_NAMES = frozenset(
    ("get_worker_info", "initial_seed", "get_rng_state", "getstate", "get_state", "current_process")
)
"""Names of functions whose result is another in a worker."""

_WORKER_BYTES = 128 << 20
"""Free memory that a worker needs: a fork shares most of its memory with the script's process."""

_SHARED_MEMORY = "/dev/shm"

_TWICE = 2
"""First batches that each worker reads twice during a proof: a hidden state makes the second one differ."""

DRAWS, CHANGES = "its samples draw random numbers", "reading a sample changes the data set"

Fetched = tuple[str, Any]
"""Why a worker can't fetch a batch, and the batch; one of both is empty."""


class WorkerExchange(DatasetExchange["WorkerSite"]):
    """Follows each pass of the script over a loader.

    Install this exchange before `LoaderExchange`, whose samples in memory need no workers.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._passes = WeakKeyDictionary[MapDatasetFetcher, LoaderPass]()

    def install(self) -> None:
        self._patches.patch(_SingleProcessDataLoaderIter, "_next_data", self._following)
        self._patches.patch(MapDatasetFetcher, "fetch", self._exchanging)

    def remove(self) -> None:
        super().remove()
        self.end()

    def end(self) -> None:
        """Ends all workers."""
        for one in list(self._passes.values()):
            one.end()

    def abandon(self) -> None:
        abandon_pools()
        super().abandon()

    @property
    def is_busy(self) -> bool:
        """Whether a race needs the next steps."""
        return any(site.part is not None and site.part.stage == "race" for site in list(self._sites.values()))

    @property
    def is_over(self) -> bool:
        """Whether workers fetch no batches, and none is timed for a decision."""
        return not any(site.is_tried for site in list(self._sites.values()))

    def races_now(self) -> bool:
        """Returns whether a race has used a batch since the last call."""
        raced = [site.has_raced() for site in self._sites.values()]
        return any(raced)

    @hide_from_warnings
    def _following(self, original: Any) -> Any:
        session = self._session

        @functools.wraps(original)
        def next_data(iterator: Any) -> Any:
            one = self._pass(iterator) if session.is_mine() else None
            if one is None:
                return original(iterator)
            one.begin_batch()
            try:
                batch = original(iterator)
            except BaseException as error:
                one.end()
                error.__traceback__ = strip_own_frames(error)
                raise
            one.end_batch()
            return batch

        return next_data

    @hide_from_warnings
    def _exchanging(self, original: Any) -> Any:
        session = self._session

        @functools.wraps(original)
        def fetch(fetcher: Any, index: Any) -> Any:
            one = self._passes.get(fetcher) if session.is_mine() else None
            if one is None:
                return original(fetcher, index)
            return one.fetch(functools.partial(original, fetcher, index))

        return fetch

    def _pass(self, iterator: Any) -> LoaderPass | None:
        fetcher = iterator._dataset_fetcher
        found = self._passes.get(fetcher)
        if found is None and not iterator._num_yielded and type(iterator) is _SingleProcessDataLoaderIter:
            found = self._begin(iterator, fetcher)
        return found

    def _begin(self, iterator: Any, fetcher: Any) -> LoaderPass | None:
        """Follows a new iterator if workers may fetch its batches."""
        if type(fetcher) is not MapDatasetFetcher or not fetcher.auto_collation:
            return None
        if fetcher.collate_fn is not default_collate:
            return None
        try:
            limit = ahead_limit(iterator._index_sampler)
            batches = 0 if limit is None else len(iterator._index_sampler)
            site = None if limit is None else self._site(fetcher.dataset)
        except Exception:  # such as a data set without a length
            return None
        if limit is None or site is None or not site.is_tried:
            return None
        site.begin_pass(batches)
        iterator._sampler_iter = order = BatchOrder(iterator._sampler_iter, limit)
        found = self._passes[fetcher] = LoaderPass(site, order, fetcher, self._session)
        return found

    def _make_site(self, dataset: Any, ended: Callable[[Any], Any]) -> WorkerSite:
        return WorkerSite(dataset, self._session, ended)


class WorkerSite:
    """The facts of one data set.

    Attributes:
        part: None until the fetch is known to be slow.
        is_fast: whether the fetch is too fast for workers.
        uses_workers: whether the race's present window has workers.
        workers: number of processes of a pass.
        timeout_s: most seconds that the script waits for a worker's batch.

    Args:
        dataset: the script's.
        session: makes the part.
        ended: is called when the data set is freed.
    """

    def __init__(self, dataset: Any, session: Session, ended: Callable[[Any], Any]) -> None:
        self.dataset, self._session = ref(dataset, ended), session
        self.part: Part | None = None
        self.is_fast = self.uses_workers = False
        self.workers, self.timeout_s = 0, _MIN_TIMEOUT_S
        self._times: list[tuple[float, float]] = []
        self._pairs = WindowPairs(self._switch)
        self._batches = self._skipped = self._changes = self._batch_bytes = 0
        self._has_raced = False

    @property
    def is_tried(self) -> bool:
        """Whether the data set's batches are timed, or fetched by workers."""
        return not self.is_fast and (self.part is None or self.part.stage != "off")

    def leave(self, reason: str) -> None:
        """Leaves all batches to the script's own process from now on."""
        assert self.part is not None
        if self.part.stage == "use":
            self.part.take_back(reason)
        elif self.part.stage != "off":
            self.part.refuse(reason)

    def begin_pass(self, batches: int) -> None:
        """Notes that a pass of the loader begins, of so many batches, with cold workers."""
        self._batches, self._skipped = batches, 0

    def note_change(self) -> None:
        """Notes that the script changed the data set within a pass."""
        self._changes += 1
        if self._changes > _MAX_CHANGES:
            self.leave("the script changes the data set while it is read")

    def note_batch(self, batch: Any) -> None:
        """Notes the size of a batch that the script's own process has fetched."""
        self._batch_bytes = sum(value.nbytes for value in tree_tensors(batch))
        if self.part is None and why_unfit_batch(batch):
            self.is_fast = True  # without a part, since its batches can not be compared

    def end_batch(self, batch_s: float, fetch_s: float | None) -> None:
        """Adds a batch's time to the race, or to what is known before.

        Args:
            batch_s: seconds since the batch before.
            fetch_s: seconds of its fetch in the script's own process; None if unknown.
        """
        if self.part is None and fetch_s is not None and not self.is_fast:
            self._times.append((batch_s, fetch_s))
            if len(self._times) >= _TIMED_BATCHES:
                self._choose()
        elif self.part is not None and self.part.stage == "race":
            self._race(batch_s)

    def has_raced(self) -> bool:
        """Returns whether a race has used a batch since the last call."""
        found, self._has_raced = self._has_raced, False
        return found

    def deliver(self, batch: Any, own: Callable[[], Any]) -> Any:
        """Returns a worker's batch as ordinary tensors, or the script's own after a comparison."""
        part = self.part
        assert part is not None
        if part.stage == "race":
            return _copy(batch)
        return part.call(own, lambda: _copy(batch), lambda: _compare(own, batch), enabled=True)

    def _choose(self) -> None:
        """Makes a part if the fetch takes much of the time."""
        times, self._times = self._times, []
        batch_s, fetch_s = (statistics.median(column) for column in zip(*times, strict=True))
        if fetch_s < max(_MIN_FETCH_S, _MIN_SHARE * batch_s):
            self.is_fast = True
            return
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self.workers = min(cores, math.ceil(fetch_s / max(batch_s - fetch_s, 1e-2 * fetch_s)))
        self.timeout_s = max(_MIN_TIMEOUT_S, _TIMEOUT_FETCHES * fetch_s)
        name = "1 process fetches ahead" if self.workers == 1 else f"{self.workers} processes fetch ahead"
        self.part = self._session.make_part("workers", describe_dataset(self.dataset()), [name])
        why = why_unfit_process() or why_short_of_memory(self.workers, self._batch_bytes)
        if not why and self._batches * fetch_s < _MIN_PASS_S:
            why = f"all its batches take {self._batches * fetch_s:.2g} s, too little to start processes"
        if why:
            self.part.refuse(why)

    def _race(self, batch_s: float) -> None:
        self._has_raced = True
        if self._skipped < _WARM_UP_BATCHES:
            self._skipped += 1
        elif not self._pairs.is_open:
            self._pairs.begin()
        elif self._pairs.step_ended(TimedStep(Seconds(batch_s))) is not None and self._pairs.is_over:
            assert self.part is not None
            self.part.decide(self._pairs.times)

    def _switch(self, uses_workers: bool) -> None:
        self.uses_workers, self._skipped = uses_workers, 0


def _copy(batch: Any) -> Any:
    """Copies a batch out of the memory that workers share."""
    return map_tensors(Tensor.clone, batch)


def _compare(own: Callable[[], Any], batch: Any) -> tuple[Any, CallComparison]:
    """Returns the batch of the script's own process, and whether the worker's has the same bits."""
    mine = own()
    wrong = batch_difference(batch, mine)
    numbers = sum(value.numel() for value in tree_tensors(mine))
    return mine, CallComparison(not wrong, numbers, wrong and f"a worker's batch differs: {wrong}")


class LoaderPass:
    """Chooses who fetches each batch.

    Args:
        site: of the loader's data set.
        order: the loader's batches.
        fetcher: torch's, of the script's iterator.
        session: says whether used exchanges are on.
    """

    def __init__(self, site: WorkerSite, order: BatchOrder, fetcher: MapDatasetFetcher, session: Session) -> None:
        self.order = order
        self._site, self._session, self._dataset = site, session, fetcher.dataset
        # Another object than the iterator's own, whose end is the end of this pass.
        self._fetch = MapDatasetFetcher(fetcher.dataset, True, fetcher.collate_fn, fetcher.drop_last).fetch
        self._pool: FetchPool | None = None
        self._watch: DatasetWatch | None = None
        self._last_s: float | None = None
        self._fetch_s: float | None = None
        self._is_fetched = False

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
            self._site.leave(f"its workers failed: {first_line(error)}")
        if not self._site.is_tried:
            self.end()
        return None

    def _wants_workers(self) -> bool:
        part = self._site.part
        assert part is not None
        if part.stage == "race":
            return self._site.uses_workers
        return part.stage == "proof" or (part.stage == "use" and self._session.is_enabled)

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


class BatchOrder:
    """Takes the place of a sampler's iterator; what was read ahead comes first.

    Attributes:
        taken: number of batches that the script has taken.

    Args:
        source: the sampler's iterator.
        limit: number of batches that may be read ahead.
    """

    def __init__(self, source: Iterator[list[int]], limit: int = sys.maxsize) -> None:
        self._source, self._limit = source, limit
        self._ahead: deque[list[int]] = deque()
        self.taken = 0

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        rows = self._ahead.popleft() if self._ahead else next(self._source)
        self.taken += 1
        return rows

    def read_ahead(self) -> Iterator[list[int]]:
        """Yields the rows of each batch after the one that the script has taken last; the script still takes them all."""
        position = self.taken
        while position < self._limit:
            while len(self._ahead) <= position - self.taken:
                try:
                    self._ahead.append(next(self._source))
                except StopIteration:
                    return
            yield self._ahead[position - self.taken]
            position += 1


def ahead_limit(sampler: Any) -> int | None:
    """Returns how many batches of a sampler may be read ahead without another order of random numbers; None for none.

    Torch's samplers draw all their random numbers at the first batch, which is never read ahead. A `RandomSampler` with a
    generator of the script draws once more at its end, so the last batch isn't read ahead.
    """
    if type(sampler) is not BatchSampler:
        return None
    rows = sampler.sampler
    if type(rows) in (SequentialSampler, SubsetRandomSampler, WeightedRandomSampler):
        return sys.maxsize
    if type(rows) is not RandomSampler:
        return None
    if rows.generator is None:
        return sys.maxsize
    if rows.replacement or rows.num_samples != len(rows.data_source):
        return None
    return len(sampler) - 1


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
                wrong = "a sample differs when it is read again" if batch_difference(batch, self._fetch(rows)) else ""
            if generator_states() != states:
                wrong = DRAWS
            elif self._watch.has_changed():
                wrong = CHANGES
        except Exception as error:  # the script's own process then raises the error
            wrong = f"a worker raised {first_line(error)}"
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


_started = WeakSet[Any]()
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


def why_unfit_process() -> str:
    """Returns why this process can't have workers; empty if it can."""
    if sys.platform != "linux":
        return "the workers are forks that end with the script, which only Linux allows here"
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return "several ranks share this machine's cores"
    return ""


def why_unfit_data(dataset: Dataset, watch: DatasetWatch) -> str:
    """Returns why a data set can't be read in another process; empty if it can, as far as its code and objects show.

    Args:
        watch: the data set's objects.
    """
    if watch.unfit:
        return watch.unfit
    if found := sorted((SIDE_EFFECTS | _PROCESS_NAMES) & names_in_sample_code(dataset)):
        return f"its code uses {found[0]}, so it may do more than return a sample"
    return ""


def why_short_of_memory(workers: int, batch_bytes: int) -> str:
    """Returns why there is too little memory for workers with two batches each; empty if there is enough."""
    ahead_bytes = 2 * (2 * workers + 1) * batch_bytes
    if ahead_bytes + workers * _WORKER_BYTES > psutil.virtual_memory().available:
        return "its workers need more memory than is free"
    if ahead_bytes > shutil.disk_usage(_SHARED_MEMORY).free:
        return f"its workers need {ahead_bytes / 1e6:,.0f} MB of shared memory, more than is free in {_SHARED_MEMORY}"
    return ""


def why_unfit_batch(batch: Any) -> str:
    """Returns why a batch can't come from another process with equal bits; empty if it can."""
    if not _has_plain_containers(batch):
        return "its batches have containers that are neither tuple, list nor dict"
    places = set[int]()
    for _, leaf in batch_leaves(batch):
        if isinstance(leaf, Tensor):
            is_plain = type(leaf) is Tensor and leaf.layout == torch.strided and leaf.device.type == "cpu"
            if not is_plain or leaf.requires_grad or leaf.is_quantized or leaf.is_conj() or leaf.is_neg():
                return "its batches have tensors that are no plain tensors on the CPU"
            if leaf.numel() and leaf.data_ptr() in places:
                return "its batches have a tensor twice"
            places.add(leaf.data_ptr())
        elif type(leaf) not in (str, bytes, int, float, bool, type(None)):
            return f"its batches have a {type(leaf).__name__}"
    return ""


def _has_plain_containers(tree: Any) -> bool:
    if type(tree) is dict:
        return all(type(key) in (str, int) for key in tree) and all(map(_has_plain_containers, tree.values()))
    if type(tree) in (list, tuple):
        return all(map(_has_plain_containers, tree))
    return not isinstance(tree, Mapping | list | tuple)
