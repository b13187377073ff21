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
from typing import Any

import numpy as np
import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    """The SplitMix64 finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@cache
def word_of(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def seed_for(seed: int, *stream: int | str) -> int:
    """A 63-bit seed for one stream of `seed`; equal arguments give equal seeds on every machine."""
    state = _root(seed, stream[0]) if stream else mix(seed & _MASK)
    for part in stream[1:]:
        state = mix(state ^ (word_of(part) if isinstance(part, str) else part & _MASK))
    return state >> 1


@lru_cache(maxsize=1024)
def _root(seed: int, part: int | str) -> int:
    """Where the streams whose path begins with `part` branch off: the same at each step, so it is kept."""
    return mix(mix(seed & _MASK) ^ (word_of(part) if isinstance(part, str) else part & _MASK))


def generator_for(seed: int, *stream: int | str) -> torch.Generator:
    """A CPU generator at the beginning of one stream."""
    return torch.Generator().manual_seed(seed_for(seed, *stream))


class Streams:
    """The global generators (Python, NumPy, torch's CPU and devices), reseeded stream by stream.

    Of several devices the second and later ones get seeds of their own: equal GPUs draw equal numbers from one seed.

    `torch.manual_seed` does the same for all devices but takes 0.2 ms, which is too long for each step.
    """

    def __init__(self, seed: int, *devices: torch.device) -> None:
        self.seed = seed
        self._seeders: list[Callable[[int], object]] = [torch.default_generator.manual_seed]
        self._seeders += [_device_seeder(device) for device in devices[:1] if device.type != "cpu"]
        self._others = [(str(device), _device_seeder(device)) for device in devices[1:] if device.type != "cpu"]

    def reseed(self, *stream: int | str) -> int:
        """Sets all of them; returns the seed, from which further generators can be set."""
        seed = seed_for(self.seed, *stream)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        self._seed_torch(seed)
        return seed

    def reseed_torch(self, *stream: int | str) -> int:
        """Torch's generators alone; returns the seed."""
        seed = seed_for(self.seed, *stream)
        self._seed_torch(seed)
        return seed

    def _seed_torch(self, seed: int) -> None:
        for manual_seed in self._seeders:
            manual_seed(seed)
        for name, manual_seed in self._others:
            manual_seed(seed_for(seed, name))

    def drawn(self, *stream: int | str) -> bool:
        """Whether anybody drew from Python's or NumPy's generator since `reseed(*stream)`."""
        seed = seed_for(self.seed, *stream)
        (_, key, *rest), (_, seeded, *at_first) = (
            generator.get_state() for generator in (np.random, np.random.RandomState(seed & 0xFFFFFFFF))
        )
        return (
            random.getstate() != random.Random(seed).getstate() or rest != at_first or not np.array_equal(key, seeded)
        )


class LateDraw(Exception):
    """A step drew from Python's or NumPy's generator, after steps that did not had made one spare their seeding."""


class StepDraws:
    """Reseeds the global generators step by step, and spares those of Python and NumPy while no step draws from them.

    Seeding the two costs a step of a millisecond 2 % of its time, and hardly any step needs them. So they are seeded at
    the first step of a span alone, once a step was seen to leave them as they were. Whether the whole span did is
    looked up at its end; if not, its draws did not follow from (seed, step), and it must be done again with all seeded.

    Attributes:
        spare: False to seed all at each step, come what may.
        rank: of the process whose draws they are, where ranks are to draw different numbers.
        further: sets further generators from the seed of a step.
    """

    def __init__(
        self,
        seed: int,
        *devices: torch.device,
        spare: bool = True,
        rank: int = 0,
        further: Callable[[int], Any] = lambda seed: None,
    ) -> None:
        self.spare = spare
        self._rank = rank
        self._further = further
        self._streams = Streams(seed, *devices)
        self._sparing = False
        self._last: int | None = None

    def begin_span(self) -> None:
        """The next step seeds all."""
        self._last = None

    def seed(self, step: int) -> None:
        """What step number `step` draws follows from it alone."""
        if self._sparing and self._last is not None:
            seed = self._streams.reseed_torch("step", step, self._rank)
        else:
            seed = self._streams.reseed("step", step, self._rank)
            self._last = step
        self._further(seed)

    def seed_of(self, step: int) -> int:
        """What `seed` seeds the generators with."""
        return seed_for(self._streams.seed, "step", step, self._rank)

    def end_span(self) -> None:
        """Raises LateDraw if a step drew from what was not seeded for it."""
        if not self.spare or self._last is None:
            return
        drawn = self._streams.drawn("step", self._last, self._rank)
        if drawn and self._sparing:
            raise LateDraw
        self._sparing = not drawn


def _device_seeder(device: torch.device) -> Callable[[int], object]:
    module = torch.get_device_module(device)
    generators = getattr(module, "default_generators", None)
    if generators:
        return generators[device.index or 0].manual_seed
    return module.manual_seed


def generator_states() -> dict[str, Any]:
    """States of the global CPU generators, by whose they are, to be compared with ==."""
    _, key, *rest = np.random.get_state()
    return {
        "Python's": random.getstate(),
        "NumPy's": (np.asarray(key).tobytes(), rest),
        "torch's": torch.get_rng_state().numpy().tobytes(),
    }


@contextmanager
def preserved(*devices: torch.device) -> Iterator[None]:
    """Leaves the caller's global generators as they were found: Python's, NumPy's, torch's CPU's and the devices'."""
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    modules = [(torch.get_device_module(device), device) for device in devices if device.type != "cpu"]
    states = [module.get_rng_state(device) for module, device in modules]
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        for (module, device), state in zip(modules, states, strict=True):
            module.set_rng_state(state, device)
