"""Detects user functions that take random numbers from the operating system, independent of any seed."""

from __future__ import annotations

import dis
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

from hotloop.core.random.reachable_objects import names_of

_SOURCES: dict[str, frozenset[str]] = {
    "os": frozenset({"urandom", "getrandom"}),
    "uuid": frozenset({"uuid1", "uuid4"}),
    "secrets": frozenset({"choice", "randbelow", "randbits", "token_bytes", "token_hex", "token_urlsafe"}),
    "cv2": frozenset({"randn", "randu", "randShuffle"}),  # OpenCV has a separate global generator
}
_UNSEEDED = frozenset({"default_rng", "RandomState", "Random", "SystemRandom", "SeedSequence", "seed"})
"""Functions that, without arguments, create or seed a generator from the operating system."""

_LOAD_INSTRUCTIONS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD", "LOAD_DEREF")
_SKIPPED_INSTRUCTIONS = ("PUSH_NULL", "PRECALL", "CACHE", "NOP")


def entropy_calls(functions: Iterable[tuple[str, FunctionType]]) -> Iterator[str]:
    """Yields one line for each such call.

    Args:
        functions: (path, function) of the user's functions except constructors, whose generators are seeded later.
    """
    for path, function in functions:
        for name in dict.fromkeys([*_called_functions(function), *_unseeded_generators(function.__code__)]):
            yield f"{path} calls {name}, whose numbers don't follow from the seed, so a resumed run may differ"


def _called_functions(function: FunctionType) -> Iterator[str]:
    names = names_of(function.__code__)
    for name in names:
        value = function.__globals__.get(name, sys.modules.get(name))  # the function may contain the import
        if isinstance(value, ModuleType):
            yield from (f"{name}.{inner}()" for inner in names if inner in _SOURCES.get(value.__name__, ()))
        elif value is not None and any(value is source for source in _entropy_functions()):
            yield f"{name}()"


def _entropy_functions() -> Iterator[Any]:
    for module, names in _SOURCES.items():
        yield from (vars(sys.modules[module])[name] for name in names if name in vars(sys.modules.get(module, object)))


def _unseeded_generators(code: CodeType) -> Iterator[str]:
    """Yields calls without arguments that seed a global generator, or create a generator that no object stores."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in _SKIPPED_INSTRUCTIONS]
    for number, (before, call) in enumerate(itertools.pairwise(steps), 2):
        name = str(before.argval).removeprefix("NULL + ")
        called = call.opname.startswith("CALL") and call.arg == 0 and before.opname in _LOAD_INSTRUCTIONS
        if called and name in _UNSEEDED and not _is_stored(steps[number:]):
            yield f"{name}()"
    yield from (name for item in code.co_consts if isinstance(item, CodeType) for name in _unseeded_generators(item))


def _is_stored(steps: Sequence[dis.Instruction]) -> bool:
    """Returns whether the code stores the new generator in an attribute; hotloop seeds generators in attributes."""
    if not steps or not steps[0].opname.startswith("STORE_FAST"):
        return any(step.opname == "STORE_ATTR" for step in steps[:3])
    variable = str(steps[0].argval)
    stores = [place for place, step in enumerate(steps) if step.opname == "STORE_ATTR"]
    return any(variable in step.argrepr for place in stores for step in steps[max(1, place - 2) : place])
