"""A data set whose random numbers depend on (seed, epoch, sample) alone, not on the loading process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from hotloop.core.random.generators import OwnedGenerators
from hotloop.core.random.rng import RandomStreams, preserve_generators, seed_for
from hotloop.core.state import digest_of, tree_leaves
from hotloop.data.sources import Samples, Source, Stream

SAMPLE_NOTE = "in sample "
"""Start of an error's note that names the sample."""


def get_sample(dataset: Any, sample: int) -> Any:
    """Returns one sample; an error's note names the sample."""
    try:
        return dataset[sample]
    except Exception as error:
        error.add_note(f"{SAMPLE_NOTE}{sample}")  # a worker sends the note as the last line of its traceback
        raise


def generator_owners(source: Source | None, name: str = "data") -> dict[str, Any]:
    """Returns the objects of a source that may contain random generators, by name in messages."""
    if isinstance(source, Samples):
        return {name: source.dataset, "collate": source.collate}
    return {name: source.loader} if isinstance(source, Stream) else {}


class SeededDataset(torch.utils.data.Dataset):
    """The user's data set with keys `(epoch, sample)`; seeds all random generators for each sample.

    These are the global generators and those of the data set and of `collate`, of which each process has copies.
    """

    def __init__(self, samples: Samples, seed: int) -> None:
        self.dataset, self.seed = samples.dataset, seed
        self._owners = generator_owners(samples)
        self._epoch: int | None = None

    @cached_property
    def owned_generators(self) -> OwnedGenerators:
        return OwnedGenerators(self._owners)

    @cached_property
    def _streams(self) -> RandomStreams:
        return RandomStreams(self.seed)

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:
        return [self._sample(epoch, sample) for epoch, sample in keys]

    def __getitem__(self, key: tuple[int, int]) -> Any:
        return self._sample(*key)

    def _sample(self, epoch: int, sample: int) -> Any:
        self.begin("sample", epoch, sample)
        item = get_sample(self.dataset, sample)
        if self.owned_generators.late_finds():  # the first request may create generators, as in MONAI
            self.begin("sample", epoch, sample)
            item = get_sample(self.dataset, sample)
        return item

    def begin(self, name: str, epoch: int, sample: int) -> None:
        if epoch != self._epoch:
            self.owned_generators.refresh()
            self._epoch = epoch
        self.owned_generators.seed(self._streams.reseed(name, epoch, sample))


class SampleWatch:
    """Reads a few samples of a data set anew, with the same seeds: they differ if the data set was changed.

    A summary of the data set's objects misses values in objects of other kinds, such as a shared `ctypes` number.
    A data set whose samples can't be repeated, or can't be read, is never reported.
    """

    def __init__(self, samples: Samples, seed: int) -> None:
        self._dataset, self._count = SeededDataset(samples, seed), len(samples)
        first = self._read()
        self._before = first if first == self._read() else None

    def has_changed(self) -> bool:
        """Returns whether samples differ from those of the last call."""
        if self._before is None:
            return False
        before, self._before = self._before, self._read()
        return self._before is not None and before != self._before

    def _read(self) -> list[bytes] | None:
        with preserve_generators(), suppress(Exception):  # the training reports errors of samples
            items = [self._dataset[0, place] for place in sorted({0, self._count // 2, self._count - 1})]
            return [_content(leaf) for _, leaf in tree_leaves(items)]
        return None


def _content(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return digest_of(value)


def show_dataset() -> None:
    """In a worker, makes `torch.utils.data.get_worker_info()` return the user's data set instead of its wrapper."""
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, SeededDataset):
        object.__setattr__(info, "dataset", info.dataset.dataset)  # torch declares it read-only


def iterate_loader(loader: Any, seed: int) -> Iterator[Any]:
    """Returns `iter(loader)`; each started torch worker seeds the generators of its copy of the data set."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return iter(loader)
    before = loader.worker_init_fn
    loader.worker_init_fn = _SeededWorker(seed, loader.collate_fn, before)
    try:
        return iter(loader)
    finally:
        loader.worker_init_fn = before


@dataclass(frozen=True)
class _SeededWorker:
    seed: int
    collate: Any
    then: Callable[[int], Any] | None

    def __call__(self, worker: int) -> None:
        if self.then is not None:
            self.then(worker)
        info = get_worker_info()
        owned = OwnedGenerators({"data": info and info.dataset, "collate": self.collate})
        owned.refresh()
        owned.seed(seed_for(self.seed, "worker", worker))
