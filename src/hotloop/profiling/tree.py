"""Own times of modules, put together as the tree that their names make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hotloop.profiles import ModuleTime
from hotloop.profiling.naming import Name


class Own(NamedTuple):
    """Of one module per step, without the modules inside it."""

    forward_ms: float
    backward_ms: float
    calls: float

    def __add__(self, other: Own) -> Own:  # type: ignore[override]
        return Own(*(a + b for a, b in zip(self, other, strict=True)))


def tree(own: Mapping[Name, Own], kinds: Mapping[Name, str], step_ms: float | None) -> list[ModuleTime]:
    """Modules with everything inside them, each before those inside it; parts in parentheses stand last.

    Args:
        own: by name.
        kinds: class by name, in the order in which the models define them.
        step_ms: that `share` is of; None for the sum of all modules.
    """
    nothing = Own(0.0, 0.0, 0.0)
    total: dict[Name, Own] = {}
    for name, times in own.items():
        for above in upwards(name):
            total[above] = total.get(above, nothing) + times
    models = dict.fromkeys(name.model for name in total if not name.is_part)
    whole_ms = step_ms or sum(times.forward_ms + times.backward_ms for times in own.values())
    return [
        ModuleTime(
            name=spelled(name, alone=len(models) == 1),
            kind=kinds.get(name, ""),
            calls=own.get(name, nothing).calls,
            forward_ms=total[name].forward_ms,
            backward_ms=total[name].backward_ms,
            own_forward_ms=own.get(name, nothing).forward_ms,
            own_backward_ms=own.get(name, nothing).backward_ms,
            share=(total[name].forward_ms + total[name].backward_ms) / whole_ms if whole_ms else 0.0,
        )
        for name in _ordered(total, kinds)
    ]


def spelled(name: Name, *, alone: bool) -> str:
    """As a record gives it: the model's name stands before only where there are several models."""
    return name.path if alone or name.is_part else f"{name.model}.{name.path}".removesuffix(".")


def upwards(name: Name) -> Iterator[Name]:
    """A name and those of all modules around it."""
    yield name
    path = name.path
    while path and not name.is_part:
        path = path.rpartition(".")[0]
        yield Name(name.model, path)


def _ordered(names: Mapping[Name, Own], kinds: Mapping[Name, str]) -> list[Name]:
    """Models first, each with its modules as it defines them; a module stands before those inside it."""
    place = {name: at for at, name in enumerate(kinds)}
    models = list(dict.fromkeys(name.model for name in kinds))

    def key(name: Name) -> tuple:
        around = [place.get(above, len(place)) for above in reversed(list(upwards(name)))]
        return name.is_part, models.index(name.model) if name.model in models else len(models), around, name

    return sorted(names, key=key)
