"""Random numbers as functions of the Task's seed and a named stream.

A stream is a path such as `("order", epoch)`, `("sample", epoch, index)` or `("step", step, rank)`. Streams are
independent of each other and of earlier draws, so runs are resumable, comparable, and independent of the number of
workers.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_int, c_uint64
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

_MASK = (1 << 64) - 1
_GOLDEN_RATIO = 0x9E3779B97F4A7C15


def mix_bits(x: int) -> int:
    """Returns SplitMix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    x = (x + _GOLDEN_RATIO) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@cache
def seed_word(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def seed_for(seed: int, *stream: int | str) -> int:
    """Returns the 63-bit seed of a stream, equal on all machines."""
    state = _root_word(seed, stream[0]) if stream else mix_bits(seed & _MASK)
    for part in stream[1:]:
        state = mix_bits(state ^ (seed_word(part) if isinstance(part, str) else part & _MASK))
    return state >> 1


@lru_cache(maxsize=1024)
def _root_word(seed: int, part: int | str) -> int:
    """Caches the state after the first part, which is the same at each step."""
    return mix_bits(mix_bits(seed & _MASK) ^ (seed_word(part) if isinstance(part, str) else part & _MASK))


def generator_for(seed: int, *stream: int | str) -> torch.Generator:
    """Returns a CPU generator at the beginning of a stream."""
    return torch.Generator().manual_seed(seed_for(seed, *stream))


class RandomStreams:
    """The global generators of Python, NumPy, torch's CPU and the devices, with one seed per stream.

    The second and later devices get other seeds, because equal GPUs draw equal numbers from equal seeds.
    `torch.manual_seed` seeds all devices too, but its 0.2 ms are too long for each step.
    """

    def __init__(self, seed: int, *devices: torch.device) -> None:
        self.seed = seed
        self._seeders: list[Callable[[int], object]] = [torch.default_generator.manual_seed]
        self._seeders += [_device_seeder(device) for device in devices[:1] if device.type != "cpu"]
        self._others = [(str(device), _device_seeder(device)) for device in devices[1:] if device.type != "cpu"]

    def reseed(self, *stream: int | str) -> int:
        self.reseed_python(*stream)
        return self.reseed_torch(*stream)

    def reseed_python(self, *stream: int | str) -> None:
        seed = seed_for(self.seed, *stream)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)

    def reseed_torch(self, *stream: int | str) -> int:
        """Seeds torch's generators; returns the seed."""
        seed = seed_for(self.seed, *stream)
        for manual_seed in self._seeders:
            manual_seed(seed)
        for name, manual_seed in self._others:
            manual_seed(seed_for(seed, name))
        return seed

    def has_drawn(self, *stream: int | str) -> bool:
        """Returns whether code drew from Python's or NumPy's generator since `reseed(*stream)`."""
        seed = seed_for(self.seed, *stream)
        (_, key, *rest), (_, seeded, *at_first) = (
            generator.get_state() for generator in (np.random, np.random.RandomState(seed & 0xFFFFFFFF))
        )
        return (
            random.getstate() != random.Random(seed).getstate() or rest != at_first or not np.array_equal(key, seeded)
        )


class StepSeeds:
    """Seeds the global generators step by step.

    torch's generators are seeded from (seed, step) at each step. Seeding Python's and NumPy's would take 2 % of a step
    of 1 ms, and few steps draw from them. So these two are seeded for step 0 at the beginning of each span, until a
    step draws from them; that step draws step 0's numbers. From the next step on, they are seeded from (seed, step)
    too. `drawn` is part of State, so a resumed run draws the same numbers.

    Attributes:
        spare: False if other code seeds both generators between steps, so that each step must seed them.
        always: whether both are seeded from (seed, step) from the first step on, as on ranks, which may draw at
            different steps.
        drawn: whether a step has drawn from Python's or NumPy's generator.
        rank: included in the stream, for ranks with different numbers.
        further: seeds further generators from the step's seed.
    """

    def __init__(
        self,
        seed: int,
        *devices: torch.device,
        spare: bool = True,
        rank: int = 0,
        further: Callable[[int], Any] = lambda seed: None,
    ) -> None:
        self.spare, self.drawn = spare, False
        self.marks = GeneratorPositions.generators()
        self.always = self.marks is None
        self._rank = rank
        self._further = further
        self._streams = RandomStreams(seed, *devices)
        self._is_seeded = False
        self._before: tuple[int, ...] = ()

    def begin_span(self) -> None:
        """Makes the next step seed all generators."""
        self._is_seeded = False

    def seed(self, step: int) -> None:
        if not self._is_seeded or not self.spare or self.drawn or self.always:
            self._seed_python(step)
        self._further(self._streams.reseed_torch("step", step, self._rank))

    def _seed_python(self, step: int) -> None:
        if self.marks is not None and not self.marks.are_current():  # the program replaced NumPy's global generator
            self.marks, self.always = None, True
        self._streams.reseed_python("step", step if self.drawn or self.always else 0, self._rank)
        self._is_seeded = True
        self._before = self.marks.read() if self.marks is not None else ()

    def note(self) -> None:
        """Records, right after a step, whether the step drew from Python's or NumPy's generator."""
        if not self.drawn and self._is_seeded and self.marks is not None and self.marks.read() != self._before:
            self.drawn = True

    def seed_of(self, step: int) -> int:
        """Returns the seed of torch's generators at a step."""
        return seed_for(self._streams.seed, "step", step, self._rank)


class GeneratorPositions:
    """Reads the positions of the global Mersenne Twisters of Python and NumPy in 0.2 us.

    Both libraries only return copies of the 2.5 KB state, which takes as long as seeding. So this class reads the few
    bytes that each draw and each seeding changes from the memory of CPython's and NumPy's structs.
    """

    def __init__(self, python: Any, numpy: Any) -> None:
        self._owners = python, numpy
        place = id(python) + object.__basicsize__  # C's RandomObject: int index; uint32_t state[624]
        words = numpy.ctypes.state_address  # C's mt19937_state: uint32_t key[624]; int pos
        places = (place, place + 2 * 4), (words + 624 * 4, words + 622 * 4)
        self._read = [
            kind.from_address(at) for both in places for kind, at in zip((c_int, c_uint64), both, strict=True)
        ]

    @classmethod
    def generators(cls) -> GeneratorPositions | None:
        """Returns the positions of the global generators; None for unknown memory layouts."""
        try:
            return cls(random.random.__self__, _numpy_generator()) if _layouts_are_known() else None  # type: ignore[attr-defined]
        except AttributeError:
            return None

    def are_current(self) -> bool:
        """Returns whether NumPy's global generator is still the observed one."""
        return _numpy_generator() is self._owners[1]

    def read(self) -> tuple[int, ...]:
        return tuple([word.value for word in self._read])


def _numpy_generator() -> Any:
    return np.random.get_bit_generator()  # type: ignore[attr-defined]


@cache
def _layouts_are_known() -> bool:
    """Returns whether reads of new generators of both kinds give the expected values."""
    python, numpy = random.Random(1), np.random.MT19937(1)
    if type(_numpy_generator()) is not type(numpy) or sys.implementation.name != "cpython":
        return False
    marks = GeneratorPositions(python, numpy)
    for _ in range(2):
        (_, words, _), at = python.getstate(), numpy.state["state"]
        known = (words[-1], words[1] | words[2] << 32, at["pos"], int(at["key"][622]) | int(at["key"][623]) << 32)
        if marks.read() != known:
            return False
        python.random()
        numpy.random_raw()
    return True


def _device_seeder(device: torch.device) -> Callable[[int], object]:
    module = torch.get_device_module(device)
    generators = getattr(module, "default_generators", None)
    return generators[device.index or 0].manual_seed if generators else module.manual_seed


def generator_states() -> dict[str, Any]:
    """Returns the global CPU generators' states by owner, for comparison with ==."""
    _, key, *rest = np.random.get_state()
    return {
        "Python's": random.getstate(),
        "NumPy's": (np.asarray(key).tobytes(), rest),
        "torch's": torch.get_rng_state().numpy().tobytes(),
    }


def generator_restorer(*devices: torch.device) -> Callable[[], None]:
    """Returns a function that restores the present states of the global generators: Python, NumPy, torch's CPU and the devices."""
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    modules = [(torch.get_device_module(device), device) for device in devices if device.type != "cpu"]
    states = [module.get_rng_state(device) for module, device in modules]

    def restore() -> None:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        for (module, device), state in zip(modules, states, strict=True):
            module.set_rng_state(state, device)

    return restore


@contextmanager
def preserve_generators(*devices: torch.device) -> Iterator[None]:
    """Restores the global generators after the context."""
    restore = generator_restorer(*devices)
    try:
        yield
    finally:
        restore()
