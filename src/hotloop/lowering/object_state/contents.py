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

from hotloop.core.state import bits
from hotloop.lowering.object_state.owners import Put

SCALARS = (bool, int, float, str, type(None))  # isinstance takes a tenth of the time with a tuple than with a union
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_MAX_ITEMS, _MAX_BYTES, _SAMPLED_NUMBERS = 10_000, 1 << 20, 1 << 12
"""Limits: compared items of a container, saved bytes of a tensor, and compared numbers of a larger tensor."""


class Value(NamedTuple):
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
    put: Put | None = None
    owner: Any = None
    is_complete: bool = False
    is_alias: bool = False
    is_random: bool = False
    compiled_by: str = ""


def content_of(value: Any, put: Put | None) -> Value | None:
    """Returns a value that is compared as a whole; None if its parts must be compared."""
    if isinstance(value, enum.Enum):
        kind = type(value)
        return Value(value.name, _then(put, lambda name: kind[name]))
    if isinstance(value, SCALARS):
        return Value(value, put, is_complete=True)
    if isinstance(value, (bytes, complex)):
        return Value(value)
    if isinstance(value, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        return Value("TorchScript", compiled_by="TorchScript")
    if type(value).__name__ == "OptimizedModule":  # a class of torch._dynamo, whose import takes a second
        return Value("torch.compile", compiled_by="torch.compile")
    if isinstance(value, Tensor):
        return _tensor_value(value, put)
    if isinstance(value, np.ndarray | np.generic):
        return _array_value(value, put)
    if isinstance(value, CONTAINERS):
        return _container_value(value, put)
    return _generator_value(value)


def _then(put: Put | None, convert: Callable[[Any], Any]) -> Put | None:
    return None if put is None else lambda content: put(convert(content))


def _container_value(value: Any, put: Put | None) -> Value | None:
    if len(value) > _MAX_ITEMS:
        return Value(len(value))
    try:
        content = _plain(value)
    except TypeError:
        return None
    kind = type(value)
    if isinstance(value, tuple):
        return Value(content, _then(put, getattr(kind, "_make", kind)))
    if isinstance(value, frozenset):
        return Value(content, _then(put, kind))
    return Value(content, lambda content: _refill(value, content), is_complete=kind in (list, dict))


def _plain(value: Any) -> Any:
    """Returns a copy of a container of plain values.

    Raises:
        TypeError: the container has other values.
    """
    if isinstance(value, SCALARS):
        return value
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value), key=repr)
    if type(value) in (list, tuple, deque):
        items = [_plain(item) for item in value]
        return tuple(items) if type(value) is tuple else items
    if isinstance(value, dict) and all(isinstance(key, SCALARS) for key in value):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return tuple(map(_plain, value))
    raise TypeError


def _refill(container: Any, content: Any) -> None:
    """Replaces a container's items in place."""
    container.clear()
    (container.update if isinstance(container, dict | set) else container.extend)(content)


def _tensor_value(value: Tensor, put: Put | None) -> Value:
    if value.grad_fn is not None or value.layout != torch.strided or value.is_meta or value.is_quantized:
        return Value((type(value).__name__, tuple(value.shape)))  # each step creates a new graph
    if value.nbytes > _MAX_BYTES:
        return Value((str(value.dtype), tuple(value.shape), _sample(value)))
    content = value.detach().to("cpu", copy=True).contiguous()
    return Value(content, lambda content: _put_tensor(value, put, content), is_complete=type(value) is Tensor)


@torch.no_grad()
def _put_tensor(live: Tensor, put: Put | None, content: Tensor) -> None:
    if live.shape == content.shape and live.dtype == content.dtype:
        live.copy_(content)
    elif put is not None:
        put(content.to(live.device))


def _sample(value: Tensor) -> bytes:
    """Returns a hash of sampled numbers of a tensor."""
    if value.device.type == "meta" or not value.numel():
        return b""
    step = math.ceil(value.numel() / _SAMPLED_NUMBERS)
    flat = value.detach().reshape(-1) if value.is_contiguous() else value.detach().flatten()
    return hashlib.sha256(bits(flat[::step]).numpy().tobytes()).digest()


def _array_value(value: Any, put: Put | None) -> Value:
    if value.dtype.hasobject or value.dtype.kind not in "biuf" or value.dtype.byteorder == ">":
        return Value((str(value.dtype), value.shape))
    if isinstance(value, np.generic):
        return Value(value, put)
    if isinstance(value, np.memmap):
        return Value((str(value.dtype), value.shape))
    if value.nbytes > _MAX_BYTES:
        step = math.ceil(value.size / _SAMPLED_NUMBERS)
        return Value((str(value.dtype), value.shape, hashlib.sha256(value.ravel()[::step].tobytes()).digest()))
    return Value(torch.from_numpy(value.copy()), lambda content: _put_array(value, put, content.numpy()))


def _put_array(live: Any, put: Put | None, content: Any) -> None:
    if live.shape == content.shape and live.dtype == content.dtype and live.flags.writeable:
        live[...] = content
    elif put is not None:
        put(content)


def _generator_value(value: Any) -> Value | None:
    """Returns the state of one of the user's random generators."""
    if isinstance(value, random.SystemRandom):  # it has no state
        return None
    if isinstance(value, random.Random):
        return Value(value.getstate(), value.setstate, is_random=True)
    if isinstance(value, torch.Generator):
        return Value(value.get_state(), lambda state: _set_state(value, state), is_random=True)
    if isinstance(value, np.random.RandomState):
        return Value(
            _as_plain(value.get_state(legacy=False)), lambda state: value.set_state(_as_arrays(state)), is_random=True
        )
    if isinstance(value, np.random.Generator):
        inner = value.bit_generator
        return Value(_as_plain(inner.state), lambda state: setattr(inner, "state", _as_arrays(state)), is_random=True)
    return None


def _set_state(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _as_plain(state: Any) -> Any:
    if isinstance(state, np.ndarray):
        return torch.from_numpy(state.astype(np.int64))
    return {key: _as_plain(item) for key, item in state.items()} if isinstance(state, dict) else state


def _as_arrays(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.numpy().astype(np.uint64)
    return {key: _as_arrays(item) for key, item in state.items()} if isinstance(state, dict) else state


def is_same(one: Value | None, other: Value | None) -> bool:
    return one is not None and other is not None and are_equal(one.content, other.content)


def are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bits(one).equal(bits(other))
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one)
    return one is other or repr(one) == repr(other)
