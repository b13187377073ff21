"""Tensors in what modules are given and give: which there are, and what they are known by when they come again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_SAMPLED_NUMBERS = 64
"""Of a tensor, by which it is told from others."""


def tensor_fingerprints(*values: Any) -> frozenset[tuple]:
    """By what the tensors in these are known when they come again, be it in a copy: shapes, sums and some numbers."""
    return frozenset(_fingerprint(one) for value in values for one in tensors_in(value))


def _fingerprint(value: Tensor) -> tuple:
    if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # its numbers may lie elsewhere
        return value.shape, id(value)
    try:
        with torch._C._DisableTorchDispatch():  # the script's modes hear nothing
            return value.shape, value.detach().sum().item(), *sample_numbers(value)
    except RuntimeError:  # there are no numbers to look at, as under torch.func
        return value.shape, id(value)


def sample_numbers(value: Tensor) -> list[Any]:
    """From all over a tensor."""
    few: list[Any] = value.detach().reshape(-1)[:: max(1, value.numel() // _SAMPLED_NUMBERS)].tolist()
    return few


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
        held = (part for part in _attributes(value) if isinstance(part, Tensor | list | tuple | Mapping))
        for part in held:  # not objects in objects, which may lead anywhere
            yield from tensors_in(part, depth - 1)


def _attributes(value: Any) -> Iterable[Any]:
    """What an object holds, as a batch that is one; nothing is called for it. Modules and classes hold no batch."""
    if isinstance(value, nn.Module | type | ModuleType):
        return ()
    with suppress(AttributeError):  # it may have slots alone
        return object.__getattribute__(value, "__dict__").values()
    slots = getattr(type(value), "__slots__", ())
    return [getattr(value, name, None) for name in ([slots] if isinstance(slots, str) else slots)]


def has_gradient(result: Any) -> bool | None:
    """Whether a backward can come back to what made a result; None where there are no tensors to be seen in it."""
    found = [value.requires_grad for value in tensors_in(result)]
    return any(found) if found else None
