"""Records how training uses DataLoaders."""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hotloop.core.patches import Patches
from hotloop.profiler.base.call_sites import CallSites, is_library
from hotloop.profiler.hooks.torch_hooks import with_callbacks

_MAX_SAMPLES = 256
_MAX_LOADERS = 20
_TORCH_DATASETS = TensorDataset.__getitem__.__code__.co_filename


@dataclass
class _LoaderStart:
    """A new iterator until its first batch: seconds to create it, and until samples are requested, if timed."""

    where: str
    seconds: float
    index_s: float = 0.0


class _LoaderStats:
    """Records of one loader.

    Attributes:
        inner, makes: class of the data set that makes the samples, and the method that does.
        data: returns the loader's data set while it is alive.
        drawn, row_sum: batches and samples drawn in the current step.
        drawing_s, evaluating_s, opening_s: time in the current step; in evaluations; before samples are requested.
        steps, rows: number of steps that drew batches; samples in each of them.
        draws: of these steps: batches, seconds, seconds in evaluations.
        opened, openings: number of new iterators; seconds of opening and of drawing in steps that time both.
    """

    def __init__(self, iterator: Any, where: str, sites: CallSites) -> None:
        dataset = _innermost_dataset(iterator._dataset)
        self.inner, self.data = type(dataset), _weak_getter(iterator._dataset)
        together = iterator._auto_collation
        whole = together and hasattr(dataset, "__getitems__") and _has_batch_getitem(iterator._dataset)
        self.makes = "__getitems__" if whole else "__getitem__"
        self.drawn = self.row_sum = self.steps = self.opened = 0
        self.drawing_s = self.evaluating_s = self.opening_s = 0.0
        self.draws: deque[tuple[int, float, float]] = deque(maxlen=_MAX_SAMPLES)
        self.openings: deque[tuple[float, float]] = deque(maxlen=_MAX_SAMPLES)
        self.rows: deque[int] = deque(maxlen=_MAX_SAMPLES)
        self.sample_s: list[float] = []
        self.record: dict[str, Any] = {
            "where": where,
            "dataset": self.inner.__name__,
            "sample_where": _sample_place(dataset, self.makes, where, sites),
            "collate_where": _own_place(getattr(iterator, "_collate_fn", None), sites) if together else "",
            "samples": _length(iterator._dataset),
            "stream": isinstance(iterator._dataset, IterableDataset),
            "batch_size": _batch_size(iterator._index_sampler) if together else None,
            "workers": iterator._num_workers,
            "pinned": bool(iterator._pin_memory),
            "sample_ms": None,
            "at_once": whole or not together,
            "batches": _length(iterator._index_sampler),
        }

    def forget_step(self) -> None:
        self.drawn = self.row_sum = 0
        self.drawing_s = self.evaluating_s = self.opening_s = 0.0

    def end_step(self, *, counted: bool, timed: bool) -> None:
        self.steps += bool(self.drawn)
        if self.row_sum:
            self.rows.append(self.row_sum)
        if counted and self.drawn:
            self.draws.append((self.drawn, self.drawing_s, self.evaluating_s))
            if timed or self.record["workers"]:
                self.openings.append((self.opening_s, self.drawing_s))

    def as_record(self, most: int, counted: int) -> dict[str, Any]:
        self.record |= {"share": self.steps / max(1, most), "opened": self.opened / max(1, counted)}
        if self.sample_s:
            self.record["sample_ms"] = median(self.sample_s) * 1e3
        if self.draws:
            drawn, drawing_s, evaluating_s = map(median, zip(*self.draws, strict=True))
            self.record |= {"draws": drawn, "drawing_ms": drawing_s * 1e3, "evaluating_ms": evaluating_s * 1e3}
        if self.openings and (drawing_s := sum(pair[1] for pair in self.openings)):
            self.record["opening_ms"] = sum(pair[0] for pair in self.openings) / drawing_s * self.record["drawing_ms"]
        return self.record


class LoaderRecorder:
    """Counts the batches of loaders, and times samples in some steps.

    Attributes:
        used: whether batches were drawn in the last step.
        rows: samples per network call, for training without a loader.
    """

    def __init__(self, sites: CallSites) -> None:
        self.used = False
        self.rows: int | None = None
        self._sites = sites
        self._loaders: dict[tuple[Any, ...], _LoaderStats] = {}
        self._iterators: WeakKeyDictionary[Any, _LoaderStats] = WeakKeyDictionary()
        self._patches = Patches()
        self._counted, self._timed, self._counted_steps = True, False, 0
        self._openings: WeakKeyDictionary[Any, _LoaderStart] = WeakKeyDictionary()
        self._light_counts: list[tuple[ref, int]] | None = None
        self._latest: tuple[Callable[[], Any], _LoaderStats | None] = lambda: None, None

    def begin(self, *, timed: bool, counted: bool = True) -> None:
        self._counted, self._timed = counted, timed
        self.forget_step()
        if timed:
            self._time_samples()

    def forget_step(self) -> None:
        for loader in self._loaders.values():
            loader.forget_step()

    def begin_light_steps(self) -> None:
        """From here on batches are not recorded; `end_light_steps` counts them. Repeated calls are cheap."""
        counts = self._light_counts
        known = [ref(one) for one in self._iterators] if counts is None else [one for one, _ in counts]
        self._light_counts = [(one, it._num_yielded) for one in known if (it := one()) is not None]

    def iterator_made(self, iterator: Any, seconds: float = 0.0) -> bool:
        """Returns whether a new iterator begins another epoch of the loader that was drawn from last.

        The data set identifies the loader; the line that will draw is unknown yet.
        """
        if not isinstance(iterator, _BaseDataLoaderIter):  # a library's own iterator
            return False
        if self._counted:
            self._openings[iterator] = _LoaderStart(self._sites.caller_line(4), seconds)
        same = [loader for loader in self._loaders.values() if loader.data() is iterator._dataset]
        if len(same) != 1 or same[0] is not self._latest[1]:
            return False
        if self._light_counts is not None:
            self._iterators[iterator] = same[0]
            self._light_counts = [one for one in self._light_counts if one[0]() is not iterator] + [(ref(iterator), 0)]
        return True

    def end_light_steps(self) -> None:
        for iterator, before in self._light_counts or ():
            if (alive := iterator()) is not None:
                self._iterators[alive].drawn += alive._num_yielded - before
        self._light_counts = None

    def drawn_loaders(self) -> list[str]:
        return [f"loader {number}" for number, loader in enumerate(self._loaders.values()) if loader.drawn]

    def remove(self) -> None:
        self._patches.undo()

    def end(self) -> None:
        self.remove()
        for loader in self._loaders.values():
            loader.end_step(counted=self._counted, timed=self._timed)
        self._counted_steps += self._counted
        self.used = bool(self.drawn_loaders())

    def batch_drawn(self, loader: Any, batch: Any, seconds: float = 0.0, *, evaluates: bool = False) -> bool:
        """Records a `__next__` or `__iter__` that took some seconds; returns whether a batch was drawn."""
        latest, known = self._latest
        if latest() is not loader:
            if isinstance(loader, DataLoader):
                return False
            known = self._known(loader)
            self._latest = ref(loader), known
        if known is not None:
            known.drawn += 1
            if self._counted:
                known.row_sum += _rows(batch) or 0
                spent = seconds + self._note_start(loader, known, seconds)
                known.drawing_s += spent
                known.evaluating_s += spent if evaluates else 0.0
        return True

    def _note_start(self, iterator: Any, loader: _LoaderStats, seconds: float) -> float:
        """Records the start of an iterator at its first batch; returns the seconds to create the iterator.

        With workers, opening includes the wait for the first batch; later batches are made while the network trains.
        """
        opening = self._openings.pop(iterator, None)
        if opening is None:
            return 0.0
        loader.opened += 1
        loader.record["opened_where"] = opening.where
        loader.opening_s += opening.seconds + (seconds if loader.record["workers"] else opening.index_s)
        return opening.seconds

    def samples_per_step(self) -> float | None:
        """Returns samples per step of the most used loader, else samples per network call."""
        most = max(self._loaders.values(), key=lambda loader: loader.steps, default=None)
        return median(most.rows) if most is not None and most.rows else self.rows

    def records(self) -> list[dict[str, Any]]:
        used = sorted(self._loaders.values(), key=lambda loader: -loader.steps)
        return [loader.as_record(used[0].steps, self._counted_steps) for loader in used if loader.steps]

    def _known(self, iterator: Any) -> _LoaderStats | None:
        """Loaders with the same drawing line, class and length of data set count as one."""
        known = self._iterators.get(iterator)
        if known is None:
            where = self._sites.caller_line(5)
            key = (where, type(iterator._dataset).__name__, _length(iterator._dataset))
            if key not in self._loaders and len(self._loaders) < _MAX_LOADERS:
                self._loaders[key] = _LoaderStats(iterator, where, self._sites)
            known = self._loaders.get(key)
            if known is not None:
                self._iterators[iterator] = known
        return known

    def _time_samples(self) -> None:
        self._patches.patch(_BaseDataLoaderIter, "_next_index", self._timing_index())
        for loader in self._loaders.values():
            # Only methods written in Python can be replaced.
            here = loader.record["workers"] == 0 and isinstance(getattr(loader.inner, loader.makes, None), FunctionType)
            if here and len(loader.sample_s) < _MAX_SAMPLES:
                self._patches.patch(loader.inner, loader.makes, self._timing(loader))

    def _timing_index(self) -> Callable[[Any], Any]:
        def ended(token: float, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
            if (opening := self._openings.get(args[0])) is not None:
                opening.index_s += time.perf_counter() - token

        return with_callbacks(lambda: bool(self._openings), lambda args, kwargs: time.perf_counter(), ended)

    def _timing(self, loader: _LoaderStats) -> Callable[[Any], Any]:
        def ended(token: float, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
            if done:
                loader.sample_s.append(time.perf_counter() - token)

        return with_callbacks(
            lambda: len(loader.sample_s) < _MAX_SAMPLES, lambda args, kwargs: time.perf_counter(), ended
        )


def _weak_getter(dataset: Any) -> Callable[[], Any]:
    """Returns None for data sets without weak references, such as lists."""
    try:
        return ref(dataset)
    except TypeError:
        return lambda: None


def _innermost_dataset(dataset: Any) -> Any:
    for _ in range(10):
        if (inside := _wrapped_dataset(dataset)) is None:
            break
        dataset = inside
    return dataset


def _wrapped_dataset(dataset: Any) -> Any:
    """Reads torch's own data sets only: elsewhere, attributes of these names may mean anything."""
    if not type(dataset).__module__.startswith("torch.utils.data"):
        return None
    several = getattr(dataset, "datasets", None)
    return getattr(dataset, "dataset", several[0] if isinstance(several, list | tuple) and several else None)


def _has_batch_getitem(dataset: Any) -> bool:
    """Returns whether a loader requests all samples of a batch in one call; a subset passes the call on."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def _sample_place(dataset: Any, makes: str, where: str, sites: CallSites) -> str:
    """Returns the place that makes samples; `where` for a library's file, except torch's own data sets."""
    for name in ("__iter__", makes) if isinstance(dataset, IterableDataset) else (makes, "__iter__"):
        code = getattr(inspect.unwrap(getattr(type(dataset), name, None) or (lambda: None)), "__code__", None)
        if code is not None and code.co_name == name:
            library = "" if code.co_filename == _TORCH_DATASETS else where
            return library if is_library(code.co_filename) else sites.place(code.co_filename, code.co_firstlineno)
    return ""


def _own_place(function: Any, sites: CallSites) -> str:
    function = function.func if isinstance(function, partial) else function
    for one in (function, type(function).__call__):
        code = getattr(inspect.unwrap(one) if callable(one) else None, "__code__", None)
        if code is not None:
            return "" if is_library(code.co_filename) else sites.place(code.co_filename, code.co_firstlineno)
    return ""


def _batch_size(sampler: Any) -> int | None:
    """A user's own sampler may use the attribute for anything."""
    size = getattr(sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _rows(batch: Any) -> int | None:
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((rows for rows in map(_rows, parts) if rows is not None), None)
