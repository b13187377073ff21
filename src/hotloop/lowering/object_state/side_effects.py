"""Detection of changes in Python's state during a trace, beside in-place changes of tensors.

A trace runs once: a change, such as of a counter, would happen once and become a constant of the compiled step.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotloop.errors import PlanError
from hotloop.lowering.object_state.owners import (
    class_entry,
    class_members,
    function_references,
    module_members,
    object_attributes,
    package_name,
)

StatePlace = tuple[str, ...]
"""The owner, and the names that lead to the value."""


def capture_error(
    why: str, expected: str, fix: str = "correct that line, or choose compile=none and graphs=none"
) -> PlanError:
    """Returns the error for a step that can't be captured."""
    return PlanError(f"the step can't be captured as one graph: {why}", expected=expected, fix=fix)


@contextmanager
def refuse_side_effects(model: nn.Module, objective: Mapping[str, Any]) -> Iterator[None]:
    """Rejects changes by the forward pass and the loss other than in-place changes of tensors.

    Args:
        objective: the loss or step function, by its name in messages.

    Raises:
        PlanError: an attribute changes, a buffer or parameter is replaced or gets other memory, or a function changes a
            value outside of itself.
    """
    roots = {"model": model, **objective}
    before = snapshot_python_state(roots)
    yield
    after = snapshot_python_state(roots)
    if (place := first_difference(before, after)) is not None:
        raise _model_error(place, before.get(place), after.get(place), roots[place[0]])


@contextmanager
def refuse_update_side_effects(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[None]:
    """Rejects changes by an update other than in-place changes of tensors.

    Args:
        names: of the updated parameters, by `id`.

    Raises:
        PlanError: numbers of the optimizer's groups, state or attributes change, its state gets other tensors, or a
            parameter other memory.
    """
    before = snapshot_python_state(_optimizer_values(optimizer, names), strict=True)
    yield
    after = snapshot_python_state(_optimizer_values(optimizer, names), strict=True)
    if (place := first_difference(before, after)) is not None:
        raise _update_error(place, before.get(place), after.get(place))


def _optimizer_values(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    attributes = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups")}
    state: dict[str, Any] = {}
    for holder, value in optimizer.state.items():  # a key may be no parameter, such as a name for a count of steps
        state[names.get(id(holder), "another") if isinstance(holder, Tensor) else str(holder)] = value
    return {"groups": optimizer.param_groups, "state": state, "attributes": attributes}


def _update_error(place: StatePlace, before: Any, after: Any) -> PlanError:
    owner, *names = place
    name = names[0] if owner == "attributes" else "state" if len(names) < 2 else names[1]
    where = f" of {names[0]!r}" if owner == "state" else ""
    fix = "choose compile=forward, which leaves the update out, or compile=none; and graphs=none"
    if owner == "attributes":  # State has no attributes of the optimizer, so that trial steps can't be undone
        fix = "choose compile=none and graphs=none"
    if not isinstance(after, _TensorState):
        why = f"the optimizer changes its own {name!r}{where}, which would happen once"
        return capture_error(why, "an optimizer that counts in tensors of its state", fix)
    why = f"the optimizer replaces its {name!r}{where}"
    if isinstance(before, _TensorState) and before.value is after.value:
        what = "a parameter" if owner == "groups" else f"its {name!r}{where}"
        why = f"the optimizer gives {what} other memory (`.data = ...`), which would be lost"
    return capture_error(why, "an optimizer that updates in place", fix)


def _model_error(place: StatePlace, before: Any, after: Any, root: Any) -> PlanError:
    owner, name = place[0], ".".join(place[1:]).replace("class ", "")
    if isinstance(after, _TensorState) and isinstance(before, _TensorState | None):
        same = before is not None and before.value is after.value
        why = f"it replaces the {after.kind} {name!r} by another tensor"
        if same:
            why = f"it gives the {after.kind} {name!r} other memory (`.data = ...`), which would be lost"
        return capture_error(why, f"a {after.kind} that is changed in place")
    inside = isinstance(root, nn.Module) and not any(part.endswith("()") for part in place)
    what = f"the attribute {name!r} of the {owner}" if inside else f"{name!r}, outside of the {owner}"
    return capture_error(f"it changes {what}, which would happen once", "a buffer of the model for it")


# --- snapshots


class _TensorState:
    """A tensor, its kind (such as parameter), and its memory."""

    def __init__(self, value: Tensor, kind: str) -> None:
        self.value, self.kind = value, kind
        self.memory = value.untyped_storage() if value.layout == torch.strided else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _TensorState) or self.value is not other.value:
            return False
        return self.memory is None or other.memory is None or self.memory._cdata == other.memory._cdata

    __hash__ = None  # type: ignore[assignment]


_PLAIN_TYPES = bool | int | float | complex | str | bytes | None
_SYMBOL_TYPES = torch.SymInt | torch.SymFloat | torch.SymBool
_OF_ANY_MODULE = vars(nn.Module()).keys() - {"training"}
_MAX_ITEMS = 10_000
"""Containers with more items count as data and aren't compared."""
_HOOKS = ("_forward", "_backward")


def snapshot_python_state(roots: Mapping[str, Any], strict: bool = False) -> dict[StatePlace, Any]:
    """Returns plain values, types of objects, and states of generators, by place, as far as they can be reached.

    Args:
        strict: whether the identity of every tensor counts; else only of a module's parameters and buffers, since a
            module may store its last results.
    """
    found: dict[StatePlace, Any] = {}
    seen: dict[int, Any] = {}
    own = {package_name(root) for root in roots.values() if not isinstance(root, nn.Module)}
    left: deque[tuple[StatePlace, Any, str]] = deque(
        ((name,), root, "tensor" if strict else "") for name, root in roots.items()
    )
    while left:
        place, value, kind = left.popleft()
        if isinstance(value, Tensor):
            found[place] = _TensorState(value, kind) if kind else "a tensor"
        elif isinstance(value, _PLAIN_TYPES | _SYMBOL_TYPES) or id(value) in seen:
            found[place] = value if isinstance(value, _PLAIN_TYPES | _SYMBOL_TYPES) else type(value).__name__
        else:
            seen[id(value)] = value
            found[place], inside = _open_object(value, kind, own)
            left.extend(((*place, name), item, of) for name, item, of in inside)
    return found


def first_difference(before: Mapping[StatePlace, Any], after: Mapping[StatePlace, Any]) -> StatePlace | None:
    """Returns the first place with another value afterwards; None without a change."""
    for place in {**before, **after}:
        if place not in before or place not in after or not _is_same(before[place], after[place]):
            return place
    return None


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return not isinstance(one, _SYMBOL_TYPES) and type(one) is type(other) and bool(one == other)


_InnerValues = Iterable[tuple[str, Any, str]]
"""(name, value, kind); `kind` is that of a tensor owner identity counts, else empty."""


def _open_object(value: Any, kind: str, own: Set[str]) -> tuple[Any, _InnerValues]:
    """Returns an object's comparable content, and its inner values."""
    name = type(value).__name__
    if isinstance(value, nn.Module):
        return name, _module_items(value, kind)
    if isinstance(value, np.ndarray | np.generic):
        small = value.size <= _MAX_ITEMS and not value.dtype.hasobject
        return (name, value.shape, hashlib.sha256(value.tobytes()).digest() if small else None), ()
    if isinstance(value, random.Random):
        return (name, value.getstate()), ()
    if isinstance(value, np.random.Generator):
        return name, [("state", value.bit_generator.state, kind)]
    if isinstance(value, np.random.RandomState):
        return name, [("state", value.get_state(legacy=False), kind)]
    if isinstance(value, np.random.BitGenerator):
        return name, [("state", value.state, kind)]
    if isinstance(value, dict | list | tuple | set | frozenset | deque):
        return _container_items(value, kind)
    if isinstance(value, itertools.count):
        return repr(value), ()
    return name, ((key, item, kind) for key, item in _reachable_values(value, own))


def _reachable_values(value: Any, own: Set[str]) -> Iterable[tuple[str, Any]]:
    if isinstance(value, type):
        return class_members(value, own)
    if inspect.ismodule(value):
        return module_members(value, own)
    if inspect.isroutine(value) or isinstance(value, partial):
        return function_references(value, own)
    return object_attributes(value, own)


def _container_items(value: Any, kind: str) -> tuple[Any, _InnerValues]:
    name = type(value).__name__
    if len(value) > _MAX_ITEMS:
        return (name, len(value)), ()
    if isinstance(value, set | frozenset):
        return (name, len(value), frozenset(item for item in value if isinstance(item, _PLAIN_TYPES))), ()
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return name, [
        (str(key) if isinstance(key, _PLAIN_TYPES) else f"[{number}]", item, kind)
        for number, (key, item) in enumerate(items)
    ]


def _module_items(module: nn.Module, kind: str) -> _InnerValues:
    own = vars(module)
    yield from ((name, value, "parameter") for name, value in own["_parameters"].items())
    yield from ((name, value, "buffer") for name, value in own["_buffers"].items())
    yield from ((name, value, kind) for name, value in own["_modules"].items())
    for name, value in own.items():
        if name not in _OF_ANY_MODULE or (name.startswith(_HOOKS) and value):
            yield name, value, kind
    yield (*class_entry(module), kind)
