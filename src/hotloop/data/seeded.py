"""A data set whose random draws follow from (seed, epoch, sample), whichever process loads the sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from hotloop.data.source import Samples, Source, Stream
from hotloop.generators import OwnedGenerators
from hotloop.rng import Streams, seed_for

NOTE = "in sample "
"""How the note of an error begins that says which sample raised it."""


def sample_of(dataset: Any, sample: int) -> Any:
    """One sample; an error says which."""
    try:
        return dataset[sample]
    except Exception as error:
        error.add_note(f"{NOTE}{sample}")  # crosses from a worker as the last line of its traceback
        raise


def owners_of(source: Source | None, name: str = "data") -> dict[str, Any]:
    """The objects of a source that may hold random generators, by what to call them."""
    if isinstance(source, Samples):
        return {name: source.dataset, "collate": source.collate}
    return {name: source.loader} if isinstance(source, Stream) else {}


class Seeded(torch.utils.data.Dataset):
    """The user's data set, asked for `(epoch, sample)` with all random generators set for just that sample.

    These are the global generators and those that the data set and `collate` hold, as each process has copies of them.
    """

    def __init__(self, samples: Samples, seed: int) -> None:
        self.dataset, self.seed = samples.dataset, seed
        self._owners = owners_of(samples)
        self._epoch: int | None = None

    @cached_property
    def owned(self) -> OwnedGenerators:
        return OwnedGenerators(self._owners)

    @cached_property
    def _streams(self) -> Streams:
        return Streams(self.seed)

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:
        return [self._drawn(epoch, sample) for epoch, sample in keys]

    def __getitem__(self, key: tuple[int, int]) -> Any:
        return self._drawn(*key)

    def _drawn(self, epoch: int, sample: int) -> Any:
        self.begin("sample", epoch, sample)
        item = sample_of(self.dataset, sample)
        if self.owned.found_late():  # the data set makes its generators when a sample is asked for, as MONAI's may
            self.begin("sample", epoch, sample)
            item = sample_of(self.dataset, sample)
        return item

    def begin(self, name: str, epoch: int, sample: int) -> None:
        """Sets all generators for one sample."""
        if epoch != self._epoch:
            self.owned.refresh()
            self._epoch = epoch
        self.owned.seed(self._streams.reseed(name, epoch, sample))


def show_dataset() -> None:
    """In a worker process, has `torch.utils.data.get_worker_info()` give the user's data set, and not its wrapper."""
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, Seeded):
        object.__setattr__(info, "dataset", info.dataset.dataset)  # torch declares it read-only


def iterated(loader: Any, seed: int) -> Iterator[Any]:
    """`iter(loader)`; if that starts workers of torch's, each sets the generators that its copy of the data set holds."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return iter(loader)
    own = loader.worker_init_fn
    loader.worker_init_fn = _SeededWorker(seed, loader.collate_fn, own)
    try:
        return iter(loader)
    finally:
        loader.worker_init_fn = own


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
