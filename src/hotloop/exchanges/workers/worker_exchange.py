"""The worker exchange: processes fetch the batches of a slow data set ahead, for loaders without workers of their own.

The sampler, its random numbers, and the base seed of each iterator stay the script's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import Dataset
from torch.utils.data._utils.collate import default_collate
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from hotloop.core.patches import Patches
from hotloop.exchanges.workers.batch_order import BatchOrder, ahead_limit
from hotloop.exchanges.workers.fetch_pool import abandon_pools
from hotloop.exchanges.workers.loader_pass import LoaderPass
from hotloop.exchanges.workers.worker_site import MakePart, WorkerSite
from hotloop.profiler.base.transparency import hide_from_warnings
from hotloop.scripts.child import strip_own_frames

_MAX_SITES = 32


class WorkerExchange:
    """Follows each pass of the script over a loader.

    Install this exchange before `LoaderExchange`, whose samples in memory need no workers.

    Args:
        make_part: creates a part of kind, name and exchanges.
        is_mine: whether calls of this process and thread are exchanged.
        is_enabled: whether used exchanges are on.
    """

    def __init__(self, make_part: MakePart, is_mine: Callable[[], bool], is_enabled: Callable[[], bool]) -> None:
        self._make_part, self._is_mine, self._is_enabled = make_part, is_mine, is_enabled
        self._sites: dict[int, WorkerSite] = {}
        self._made = 0
        self._passes = WeakKeyDictionary[_MapDatasetFetcher, LoaderPass]()
        self._patches = Patches()

    def install(self) -> None:
        self._patches.patch(_SingleProcessDataLoaderIter, "_next_data", self._following())
        self._patches.patch(_MapDatasetFetcher, "fetch", self._exchanging())

    def remove(self) -> None:
        self._patches.undo()
        self.end()

    def end(self) -> None:
        """Ends all workers."""
        for one in list(self._passes.values()):
            one.end()

    def abandon(self) -> None:
        """In a forked process: the workers belong to the parent."""
        abandon_pools()
        self._patches.undo()

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
    def _following(self) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def next_data(iterator: Any) -> Any:
                one = self._pass(iterator) if self._is_mine() else None
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

        return make

    @hide_from_warnings
    def _exchanging(self) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def fetch(fetcher: Any, index: Any) -> Any:
                one = self._passes.get(fetcher) if self._is_mine() else None
                if one is None:
                    return original(fetcher, index)
                return one.fetch(functools.partial(original, fetcher, index))

            return fetch

        return make

    def _pass(self, iterator: Any) -> LoaderPass | None:
        fetcher = iterator._dataset_fetcher
        found = self._passes.get(fetcher)
        if found is None and not iterator._num_yielded and type(iterator) is _SingleProcessDataLoaderIter:
            found = self._begin(iterator, fetcher)
        return found

    def _begin(self, iterator: Any, fetcher: Any) -> LoaderPass | None:
        """Follows a new iterator if workers may fetch its batches."""
        if type(fetcher) is not _MapDatasetFetcher or not fetcher.auto_collation:
            return None
        if fetcher.collate_fn is not default_collate:
            return None
        try:
            limit = ahead_limit(iterator._index_sampler)
            site = None if limit is None else self._site(fetcher.dataset, len(iterator._index_sampler))
        except Exception:  # such as a data set without a length
            return None
        if limit is None or site is None or not site.is_tried:
            return None
        iterator._sampler_iter = order = BatchOrder(iterator._sampler_iter, limit)
        found = self._passes[fetcher] = LoaderPass(site, order, fetcher, self._is_enabled)
        return found

    def _site(self, dataset: Any, batches: int) -> WorkerSite | None:
        if not isinstance(dataset, Dataset):
            return None  # such as a list, which has no weak references
        key = id(dataset)
        site = self._sites.get(key)
        if site is None or site.dataset() is not dataset:
            if self._made >= _MAX_SITES:
                return None
            self._made += 1
            site = self._sites[key] = WorkerSite(
                dataset, batches, self._make_part, lambda _: self._sites.pop(key, None)
            )
        return site
