"""Tensors in the inputs and outputs of modules: finding them, and fingerprints to recognize them later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from hotloop.core.torch_private import DisableTorchDispatch

_SAMPLED_NUMBERS = 64
"""Numbers per tensor that its fingerprint contains."""


def tensor_fingerprints(*values: Any) -> frozenset[tuple]:
    """Returns fingerprints (shape, sum, some numbers) that recognize the tensors in values, and their copies."""
    return frozenset(_fingerprint(tensor) for value in values for tensor in tensors_in(value))


def _fingerprint(value: Tensor) -> tuple:
    if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # may store its numbers elsewhere
        return value.shape, id(value)
    try:
        with DisableTorchDispatch():  # the script's dispatch modes see no operations of the profiler
            return value.shape, value.detach().sum().item(), *sample_numbers(value)
    except RuntimeError:  # no numbers, as under torch.func
        return value.shape, id(value)


def sample_numbers(value: Tensor) -> list[Any]:
    numbers: list[Any] = value.detach().reshape(-1)[:: max(1, value.numel() // _SAMPLED_NUMBERS)].tolist()
    return numbers


def tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part, depth - 1)
    elif depth and isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part, depth - 1)
    elif depth:
        parts = (part for part in _attributes(value) if isinstance(part, Tensor | list | tuple | Mapping))
        for part in parts:  # no objects inside objects: the search would be unbounded
            yield from tensors_in(part, depth - 1)


def _attributes(value: Any) -> Iterable[Any]:
    """Attribute values of an object such as a batch; runs no code of the object. Modules and classes hold no batch."""
    if isinstance(value, nn.Module | type | ModuleType):
        return ()
    with suppress(AttributeError):  # a class with __slots__ has no __dict__
        return object.__getattribute__(value, "__dict__").values()
    slots = getattr(type(value), "__slots__", ())
    return [getattr(value, name, None) for name in ([slots] if isinstance(slots, str) else slots)]


def has_gradient(result: Any) -> bool | None:
    """Returns whether a backward can reach the result's source; None if the result contains no tensors."""
    flags = [value.requires_grad for value in tensors_in(result)]
    return any(flags) if flags else None
