"""Random generators in a user's objects, which hotloop seeds like the global generators.

A generator's name is its path, such as `data.transform.rng`. Each path has a stream of its own, so a generator draws
the same numbers in every process with a copy of the object.
"""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from hotloop.core.random.entropy import entropy_calls
from hotloop.core.random.reachable_objects import MAX_ITEMS, MAX_OBJECTS, ObjectWalk, ReachedObject, walk_objects
from hotloop.core.random.rng import mix_bits, seed_word

_PYTHON_RANDOM = random.Random.__mro__[1]  # `_random.Random`, implemented in C
_GENERATOR_TYPES = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator, _PYTHON_RANDOM)
_ITERATORS = frozenset({"builtins", "itertools", "numpy"})
"""Modules whose iterators can't be restarted."""

_UNSUPPORTED_NAMES = frozenset(
    ("RNG", "Generator", "RandomState", "RandomGenerator", "BitGenerator", "ExtendedGenerator")
)
_SEQUENCE_NAMES = frozenset({"SobolEngine", "Sobol", "Halton", "SystemRandom"})
"""Names of classes with random state; objects of `_SEQUENCE_NAMES` have more state than the generator in them."""

_MAX_GENERATORS = 256
"""Largest number of seeded generators, whose seeding takes about 0.7 ms."""

_NEAREST_OBJECTS = 32
"""Number of objects nearest to the owner whose attribute types are compared per sample (0.3 us each)."""

_MAX_EMPTY_WALKS = 8
"""Walks without a new generator after which changed attribute types start no further walk."""

_WALK_SHARE = 0.01
"""Largest share of time for walks without a detected change."""

_REASON = "its numbers can't be repeated, so a resumed run may differ"

_Set = Callable[[int], Any]


class OwnedGenerators:
    """The random generators in the owners' objects. A generator of several owners is seeded once.

    Args:
        owners: by their names in messages; `None` has no generators.
        near: number of objects whose attributes `has_changed` compares.
        left_out: generators that are seeded elsewhere.
    """

    def __init__(self, owners: Mapping[str, Any], near: int = _NEAREST_OBJECTS, left_out: Sequence[Any] = ()) -> None:
        self._owners = {name: owner for name, owner in owners.items() if owner is not None}
        self._near, self._left_out = near, left_out
        self._walked_at = self._walk_s = 0.0
        self._paths: frozenset[str] | None = None
        self._found: list[ReachedObject] = []
        self._places: list[tuple[Callable[[Any, Any], Any], Any, Any, Any]] = []
        self._types: list[tuple[dict[str, Any], list[type]]] = []
        self._setters: list[tuple[_Set, int]] = []
        self._empty_walks = 0

    def find(self) -> list[str]:
        """Walks the owners' objects; returns the paths of generators that the previous walk didn't find."""
        began = time.monotonic()
        found = walk_objects(self._owners, is_random_class)
        self._found = found.matches
        self._places = [(*match.place, match.value) for match in found.matches if match.place is not None]
        self._types = [(own, list(map(type, own.values()))) for own in found.attributes[: self._near]]
        named = _settable_generators(found, self._left_out)
        self._setters = [(_make_setter(named[path], path), seed_word(path)) for path in list(named)[:_MAX_GENERATORS]]
        before, self._paths = self._paths, frozenset(named)
        self._walked_at = time.monotonic()
        self._walk_s = self._walked_at - began
        return [] if before is None else sorted(self._paths - before)

    def refresh(self) -> None:
        """Walks again after a change, or if walks take at most 1 % of the time."""
        idle_s = time.monotonic() - self._walked_at
        if self._paths is None or self.has_changed() or self._walk_s < _WALK_SHARE * idle_s:
            self.find()

    def has_changed(self) -> bool:
        """Returns whether a generator or an attribute's type has changed since the last walk."""
        try:
            for get, holder, key, generator in self._places:
                if get(holder, key) is not generator:
                    return True
        except (LookupError, AttributeError):
            return True
        return any(list(map(type, own.values())) != types for own, types in self._types)

    def late_finds(self, *, thorough: bool = False) -> list[str]:
        """Returns the paths of generators that were created since the last walk.

        Args:
            thorough: walk even without a detected change.
        """
        if not (thorough or self.has_changed()):
            return []
        late = self.find()
        self._empty_walks = 0 if late else self._empty_walks + 1
        if self._empty_walks > _MAX_EMPTY_WALKS:  # some attributes change their types at each sample
            self._near, self._types = 0, []
        return late

    def seed(self, seed: int) -> None:
        for set_state, own in self._setters:
            set_state(mix_bits(seed ^ own))

    @property
    def paths(self) -> list[str]:
        return sorted(self._paths or ())

    def find_path(self, generator: torch.Generator) -> str:
        """Returns the generator's path, also for another Python object of the same generator; empty if unknown."""
        handle = generator._cdata  # type: ignore[attr-defined]
        return next((match.path for match in self._found if getattr(match.value, "_cdata", None) == handle), "")

    def states(self) -> dict[str, bytes]:
        """Returns the generators' states by path, for comparison with ==."""
        return {match.path: _state_bytes(match.value) for match in self._found if not _why_not_settable(match)}


@cache
def is_random_class(kind: type) -> bool:
    """Returns whether objects of a class are random generators, or iterators that may use one."""
    return issubclass(kind, _GENERATOR_TYPES) or (hasattr(kind, "__next__") and kind.__module__ in _ITERATORS)


def unset_generators(owners: Mapping[str, Any]) -> list[str]:
    """Returns a line for each generator that can't be seeded, and for each call that draws from the operating system.

    Args:
        owners: by their names in messages.
    """
    found = walk_objects(
        {name: owner for name, owner in owners.items() if owner is not None},
        is_random_class,
        _UNSUPPORTED_NAMES | _SEQUENCE_NAMES,
    )
    lines = [f"{match.path} {why}: {_REASON}" for match in found.matches if (why := _why_not_settable(match))]
    paths = [match.path for match in found.matches]
    for owner in found.named:
        has_generator = any(path.startswith(f"{owner.path}.") for path in paths)
        if type(owner.value).__name__ in _SEQUENCE_NAMES or not has_generator:
            lines.append(f"{owner.path} is a {_generator_kind(owner.value)}: {_REASON}")
    for container in found.is_cut_short:
        inside = [path for path in paths if path.startswith(f"{container}[")]
        if inside := [path for path in inside if not path.endswith("]") or path.rfind("[") > len(container)]:
            lines.append(
                f"{container} has more than {MAX_ITEMS} items, and {inside[0]} draws random numbers: "
                "hotloop doesn't set the generators of all items, so a resumed run may differ"
            )
    if len(settable := _settable_generators(found)) > _MAX_GENERATORS:
        path = list(settable)[_MAX_GENERATORS]
        lines.append(f"{path} is one of more than {_MAX_GENERATORS} random generators: {_REASON}")
    lines += entropy_calls(found.functions)
    if not found.is_complete:
        lines.append(
            f"{' and '.join(owners)} lead to more than {MAX_OBJECTS:,} objects: hotloop doesn't search more of "
            "them for random generators, so a resumed run may differ if there are any"
        )
    return lines


def _settable_generators(found: ObjectWalk, left_out: Sequence[Any] = ()) -> dict[str, Any]:
    sources = set(map(id, left_out))
    paths: dict[str, Any] = {}
    for match in found.matches:
        source = _state_holder(match.value)
        if id(source) in sources or _is_global(source) or _why_not_settable(match):
            continue
        path = match.path if match.path not in paths else f"{match.path}#{len(paths)}"
        sources.add(id(source))
        paths[path] = match.value
    return paths


def _why_not_settable(match: ReachedObject) -> str:
    value = match.value
    if not isinstance(value, _GENERATOR_TYPES):
        return f"is an iterator ({_generator_kind(value)}), whose position can't be set"
    if _is_global(_state_holder(value)):
        return ""
    if "{}" in match.path:
        return f"is a {_generator_kind(value)} in a set, whose items have no order"
    if isinstance(value, _PYTHON_RANDOM) and not _is_plain(type(value)):
        return f"is a {_generator_kind(value)}, whose way of drawing is unknown"
    source = _state_holder(value)
    if isinstance(source, np.random.BitGenerator) and type(source) not in (np.random.MT19937, *_FILLS):
        return f"is a {_generator_kind(value)} that draws from a {_generator_kind(source)}"
    return ""


def _generator_kind(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _is_plain(kind: type) -> bool:
    """Returns whether a subclass of Python's generator inherits the methods for drawing and seeding."""
    names = ("seed", "random", "getrandbits", "getstate", "setstate")
    return all(getattr(kind, name) in (getattr(_PYTHON_RANDOM, name), getattr(random.Random, name)) for name in names)


def _state_holder(value: Any) -> Any:
    """Returns the object with the state: several NumPy generators may share a bit generator."""
    if isinstance(value, np.random.Generator):
        return value.bit_generator
    return value._bit_generator if isinstance(value, np.random.RandomState) else value


def _is_global(source: Any) -> bool:
    numpy = _state_holder(np.random.mtrand._rand)
    shared = (numpy, random._inst, torch.default_generator, *torch.cuda.default_generators)
    return any(source is generator for generator in shared)


def _state_bytes(value: Any) -> bytes:
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.RandomState):
        return pickle.dumps(value.get_state(legacy=False))
    source = _state_holder(value)
    if isinstance(source, np.random.BitGenerator):
        return pickle.dumps(source.state)
    return pickle.dumps(value.getstate()) if isinstance(value, random.Random) else b""


# --- seeding of each kind


def _make_setter(value: Any, path: str) -> _Set:
    if isinstance(value, torch.Generator):
        return value.manual_seed
    if isinstance(value, _PYTHON_RANDOM):
        return value.seed  # type: ignore[attr-defined]
    source = _state_holder(value)
    if isinstance(source, np.random.MT19937):
        legacy = value if isinstance(value, np.random.RandomState) else np.random.RandomState(source)
        return lambda bits: legacy.seed(bits & 0xFFFFFFFF)
    fill, stream = _FILLS[type(source)], seed_word(path)
    state: dict[str, Any] = dict(source.state) | _FRESH_STATE
    inner = state["state"]
    put = value.set_state if isinstance(value, np.random.RandomState) else partial(setattr, source, "state")

    def set_state(bits: int) -> None:
        fill(inner, bits, stream)
        put(state)

    return set_state


_FRESH_STATE = {"has_uint32": 0, "uinteger": 0, "has_gauss": 0, "gauss": 0.0, "buffer_pos": 4}
"""State without buffered numbers; 4 is the end of Philox's buffer. NumPy ignores keys that a bit generator lacks."""

_ODD, _WIDE = 0xDA942042E4DD58B5D1342543DE82EF95, (1 << 128) - 1


def _fill_congruential(inner: dict[str, Any], bits: int, stream: int) -> None:
    inner["state"] = bits * _ODD & _WIDE
    inner["inc"] = stream << 1 | 1  # each odd increment selects another stream


def _fill_chaotic(inner: dict[str, Any], bits: int, stream: int) -> None:
    inner["state"][:] = bits, mix_bits(bits), mix_bits(bits ^ stream), 1


def _fill_counter(inner: dict[str, Any], bits: int, stream: int) -> None:
    inner["counter"][:], inner["key"][:] = 0, (bits, stream)


_FILLS: dict[type, Callable[[dict[str, Any], int, int], None]] = {
    np.random.PCG64: _fill_congruential,
    np.random.PCG64DXSM: _fill_congruential,
    np.random.SFC64: _fill_chaotic,
    np.random.Philox: _fill_counter,
}
