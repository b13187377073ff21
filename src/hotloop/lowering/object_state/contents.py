"""Contents of attributes: values that can be compared, saved in a checkpoint and, if possible, restored."""

from __future__ import annotations

import enum
import hashlib
import math
import random
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hotloop.core.state import bytes_of
from hotloop.lowering.object_state.owners import PutValue

SCALARS = (bool, int, float, str, type(None))  # isinstance takes a tenth of the time with a tuple than with a union
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_MAX_ITEMS, _MAX_BYTES, _SAMPLED_NUMBERS = 10_000, 1 << 20, 1 << 12
"""Limits: compared items of a container, saved bytes of a tensor, and compared numbers of a larger tensor."""


class StoredValue(NamedTuple):
    """The value at a place.

    Attributes:
        content: the compared content; it is saved if `put` isn't None.
        put: restores a saved content; None if the value can't be restored.
        owner: the object if it can get new attributes; None otherwise.
        is_complete: whether the value can be created from its content alone.
        is_alias: whether another place has the same object and its content; `content` is the name of that place.
        is_random: whether the value is a random generator.
        compiled_by: the compiler of a module or function whose first calls may compute other last bits; empty if none.
    """

    content: Any
    put: PutValue | None = None
    owner: Any = None
    is_complete: bool = False
    is_alias: bool = False
    is_random: bool = False
    compiled_by: str = ""


def read_content(value: Any, put: PutValue | None) -> StoredValue | None:
    """Returns a value that is compared as a whole; None if its parts must be compared."""
    if isinstance(value, enum.Enum):
        kind = type(value)
        return StoredValue(value.name, _put_each(put, lambda name: kind[name]))
    if isinstance(value, SCALARS):
        return StoredValue(value, put, is_complete=True)
    if isinstance(value, (bytes, complex)):
        return StoredValue(value)
    if isinstance(value, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        return StoredValue("TorchScript", compiled_by="TorchScript")
    if type(value).__name__ == "OptimizedModule":  # a class of torch._dynamo, whose import takes a second
        return StoredValue("torch.compile", compiled_by="torch.compile")
    if isinstance(value, Tensor):
        return _tensor_value(value, put)
    if isinstance(value, np.ndarray | np.generic):
        return _array_value(value, put)
    if isinstance(value, CONTAINERS):
        return _read_container(value, put)
    return _generator_value(value)


def _put_each(put: PutValue | None, convert: Callable[[Any], Any]) -> PutValue | None:
    return None if put is None else lambda content: put(convert(content))


def _read_container(value: Any, put: PutValue | None) -> StoredValue | None:
    if len(value) > _MAX_ITEMS:
        return StoredValue(len(value))
    try:
        content = _copy_plain(value)
    except TypeError:
        return None
    kind = type(value)
    if isinstance(value, tuple):
        return StoredValue(content, _put_each(put, getattr(kind, "_make", kind)))
    if isinstance(value, frozenset):
        return StoredValue(content, _put_each(put, kind))
    return StoredValue(content, lambda content: _replace_items(value, content), is_complete=kind in (list, dict))


def _copy_plain(value: Any, is_inner: bool = False) -> Any:
    """Returns a copy of a container of plain values.

    Args:
        is_inner: whether another container has the value. A restored container has lists, tuples and dicts alone, so a
            set in a list is a place of its own.

    Raises:
        TypeError: the container has other values.
    """
    if isinstance(value, SCALARS):
        return value
    kind = type(value)
    if kind in (list, tuple) or (kind is deque and not is_inner):
        items = [_copy_plain(item, is_inner=True) for item in value]
        return tuple(items) if kind is tuple else items
    if isinstance(value, dict) and all(isinstance(key, SCALARS) for key in value) and (kind is dict or not is_inner):
        return {key: _copy_plain(item, is_inner=True) for key, item in value.items()}
    if is_inner:
        raise TypeError
    if isinstance(value, set | frozenset):
        return sorted((_copy_plain(item, is_inner=True) for item in value), key=repr)
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return tuple(_copy_plain(item, is_inner=True) for item in value)
    raise TypeError


def _replace_items(container: Any, content: Any) -> None:
    container.clear()
    (container.update if isinstance(container, dict | set) else container.extend)(content)


def _tensor_value(value: Tensor, put: PutValue | None) -> StoredValue:
    if value.grad_fn is not None or value.layout != torch.strided or value.is_meta or value.is_quantized:
        return StoredValue((type(value).__name__, tuple(value.shape)))  # each step creates a new graph
    if value.nbytes > _MAX_BYTES:
        return StoredValue((str(value.dtype), tuple(value.shape), _hash_samples(value)))
    content = value.detach().to("cpu", copy=True).contiguous()
    return StoredValue(content, lambda content: _put_tensor(value, put, content), is_complete=type(value) is Tensor)


@torch.no_grad()
def _put_tensor(live: Tensor, put: PutValue | None, content: Tensor) -> None:
    if live.shape == content.shape and live.dtype == content.dtype:
        live.copy_(content)
    elif put is not None:
        put(content.to(live.device))


def _hash_samples(value: Tensor) -> bytes:
    if value.device.type == "meta" or not value.numel():
        return b""
    step = math.ceil(value.numel() / _SAMPLED_NUMBERS)
    flat = value.detach().reshape(-1) if value.is_contiguous() else value.detach().flatten()
    return hashlib.sha256(bytes_of(flat[::step]).numpy().tobytes()).digest()


def _array_value(value: Any, put: PutValue | None) -> StoredValue:
    if value.dtype.hasobject or value.dtype.kind not in "biuf" or value.dtype.byteorder == ">":
        return StoredValue((str(value.dtype), value.shape))
    if isinstance(value, np.generic):
        return StoredValue(value, put)
    if isinstance(value, np.memmap):
        return StoredValue((str(value.dtype), value.shape))
    if value.nbytes > _MAX_BYTES:
        step = math.ceil(value.size / _SAMPLED_NUMBERS)
        return StoredValue((str(value.dtype), value.shape, hashlib.sha256(value.ravel()[::step].tobytes()).digest()))
    return StoredValue(torch.from_numpy(value.copy()), lambda content: _put_array(value, put, content.numpy()))


def _put_array(live: Any, put: PutValue | None, content: Any) -> None:
    if live.shape == content.shape and live.dtype == content.dtype and live.flags.writeable:
        live[...] = content
    elif put is not None:
        put(content)


def _generator_value(value: Any) -> StoredValue | None:
    if isinstance(value, random.SystemRandom):  # it has no state
        return None
    if isinstance(value, random.Random):
        return StoredValue(value.getstate(), value.setstate, is_random=True)
    if isinstance(value, torch.Generator):
        return StoredValue(value.get_state(), lambda state: _set_state(value, state), is_random=True)
    if isinstance(value, np.random.RandomState):
        return StoredValue(
            _to_plain(value.get_state(legacy=False)), lambda state: value.set_state(_to_arrays(state)), is_random=True
        )
    if isinstance(value, np.random.Generator):
        inner = value.bit_generator
        return StoredValue(
            _to_plain(inner.state), lambda state: setattr(inner, "state", _to_arrays(state)), is_random=True
        )
    return None


def _set_state(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _to_plain(state: Any) -> Any:
    if isinstance(state, np.ndarray):
        return torch.from_numpy(state.astype(np.int64))
    return {key: _to_plain(item) for key, item in state.items()} if isinstance(state, dict) else state


def _to_arrays(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.numpy().astype(np.uint64)
    return {key: _to_arrays(item) for key, item in state.items()} if isinstance(state, dict) else state


def is_same(one: StoredValue | None, other: StoredValue | None) -> bool:
    return one is not None and other is not None and are_equal(one.content, other.content)


def are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bytes_of(one).equal(bytes_of(other))
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one)
    return one is other or repr(one) == repr(other)
