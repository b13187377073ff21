"""Every random number of a run follows from the Task's seed and a named stream.

A stream is a path such as `("order", epoch)`, `("sample", epoch, index)` or `("step", step, rank)`. Two streams of one
seed share nothing, and a stream doesn't depend on what was drawn before it: that is what makes runs resumable,
comparable, and independent of the number of workers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache

import numpy as np
import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    """The SplitMix64 finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@cache
def _word(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def seed_for(seed: int, *stream: int | str) -> int:
    """A 63-bit seed for one stream of `seed`; equal arguments give equal seeds on every machine."""
    state = _root(seed, stream[0]) if stream else _mix(seed & _MASK)
    for part in stream[1:]:
        state = _mix(state ^ (_word(part) if isinstance(part, str) else part & _MASK))
    return state >> 1


@lru_cache(maxsize=1024)
def _root(seed: int, part: int | str) -> int:
    """Where the streams whose path begins with `part` branch off: the same at each step, so it is kept."""
    return _mix(_mix(seed & _MASK) ^ (_word(part) if isinstance(part, str) else part & _MASK))


def generator_for(seed: int, *stream: int | str) -> torch.Generator:
    """A CPU generator at the beginning of one stream."""
    return torch.Generator().manual_seed(seed_for(seed, *stream))


class Streams:
    """The global generators (Python, NumPy, torch's CPU and one device), reseeded stream by stream.

    `torch.manual_seed` does the same for all devices but takes 0.2 ms, which is too long for each step.
    """

    def __init__(self, seed: int, device: torch.device | None = None) -> None:
        self.seed = seed
        self._seeders: list[Callable[[int], object]] = [torch.default_generator.manual_seed]
        if device is not None and device.type != "cpu":
            self._seeders.append(_device_seeder(device))

    def reseed(self, *stream: int | str) -> None:
        seed = seed_for(self.seed, *stream)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        for manual_seed in self._seeders:
            manual_seed(seed)


def _device_seeder(device: torch.device) -> Callable[[int], object]:
    module = torch.get_device_module(device)
    generators = getattr(module, "default_generators", None)
    if generators:
        return generators[device.index or 0].manual_seed
    return module.manual_seed


@contextmanager
def preserved(device: torch.device | None = None) -> Iterator[None]:
    """Leaves the caller's global generators as they were found."""
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    module = None if device is None or device.type == "cpu" else torch.get_device_module(device)
    device_state = module.get_rng_state() if module else None
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if module:
            module.set_rng_state(device_state)
