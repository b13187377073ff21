"""Names of recorded modules: their path in the model, and the variable that holds the model."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.loss import _Loss

from hotloop.core.records.profile import ModuleTime
from hotloop.core.torch_private import DisableTorchFunction
from hotloop.profiler.base.transparency import frame_variables, hide_from_compiler

_MAX_SCANS = 4
"""Limit of scans of all objects of the process for the models of modules."""

_WRAPPERS = ("_orig_mod", "module")
"""Attributes by which torch's wrappers (torch.compile, data parallel) hold the model."""

_MAX_FRAMES = 40


class ModuleName(NamedTuple):
    """A model and the path of a module in it; `model` is empty for parts in parentheses, which belong to no model."""

    model: str
    path: str

    @property
    def is_part(self) -> bool:
        return not self.model


LOSS_NAME = ModuleName("", "(loss)")


@hide_from_compiler
class ModulePlace:
    """The naming data of a module; holds only a weak reference to the module.

    Attributes:
        name: None until `ModuleNames` finds the name.
        kind: the module's class.
        inside: the module in whose forward this one was first called; None for an outermost module.
        variable: that held an outermost module at its call; empty if not found.
    """

    __slots__ = ("_ref", "inside", "kind", "name", "variable")

    def __init__(
        self, module: nn.Module | None, kind: str, inside: ModulePlace | None = None, variable: str = ""
    ) -> None:
        self._ref = None if module is None else weakref.ref(module)
        self.kind, self.inside, self.variable = kind, inside, variable
        self.name: ModuleName | None = None

    @classmethod
    def part(cls, name: str) -> ModulePlace:
        place = cls(None, "")
        place.name = ModuleName("", name)
        return place

    @classmethod
    def from_call(cls, module: nn.Module, inside: ModulePlace | None, caller: FrameType) -> ModulePlace:
        return cls(module, type(module).__name__, inside, "" if inside else find_variable_name(module, caller))

    @property
    def module(self) -> nn.Module | None:
        return None if self._ref is None else self._ref()

    @property
    def is_alive(self) -> bool:
        return self._ref is None or self._ref() is not None


class ModuleNames:
    """Names places.

    Attributes:
        kinds: class of each module of the known models, by name, parents first.
    """

    def __init__(self) -> None:
        self.kinds: dict[ModuleName, str] = {}
        self._models: dict[str, weakref.ref[nn.Module]] = {}
        self._scans = 0
        self._by_id: dict[int, ModuleName] = {}

    def name(self, places: Sequence[ModulePlace]) -> None:
        """Names unnamed places; a deleted module is named by its class, inside the module that called it."""
        unnamed = [place for place in places if place.name is None]
        if not unnamed:
            return
        known = self._known()
        if any(id(place.module) not in known for place in unnamed if place.is_alive) and self._scans < _MAX_SCANS:
            self._scans += 1
            self._find_models(unnamed, known)
            known = self._known()
        for place in unnamed:
            place.name = known.get(id(place.module)) if place.is_alive else None
        for place in unnamed:
            place.name = place.name or self._fallback(place)
            self.kinds.setdefault(place.name, place.kind)

    def add_model(self, model: nn.Module) -> None:
        """Adds a model that may never be called itself."""
        self._models[self._label(model, [])] = weakref.ref(model)
        self._known()

    def name_of(self, module: int) -> ModuleName | None:
        return self._by_id.get(module)

    def _known(self) -> dict[int, ModuleName]:
        found: dict[int, ModuleName] = {}
        for label, ref in self._models.items():
            model = ref()
            if model is None:
                continue
            for path, module in model.named_modules():
                name = module_name(label, model, path)
                found.setdefault(id(module), name)
                if not isinstance(module, _wrapper_types()):
                    self.kinds[name] = type(module).__name__
        self._by_id = found
        return found

    def _find_models(self, places: Sequence[ModulePlace], known: dict[int, ModuleName]) -> None:
        """Adds the models of unnamed modules: the outermost modules that contain them."""
        holders = _holders()
        for place in places:
            module = place.module
            if module is None or id(module) in known or is_generated(place):
                continue
            model, seen = module, {id(module)}
            while (holder := holders.get(id(model))) is not None and id(holder) not in seen:
                model = holder
                seen.add(id(model))
            if all(ref() is not model for ref in self._models.values()):
                self._models[self._label(model, places)] = weakref.ref(model)

    def _label(self, model: nn.Module, places: Sequence[ModulePlace]) -> str:
        variable = next((place.variable for place in places if place.module is model and place.variable), "")
        label = variable or type(model).__name__.lower()
        taken = sum(1 for other in self._models if other.rstrip("0123456789") == label)
        return f"{label}{taken + 1}" if taken else label

    def _fallback(self, place: ModulePlace) -> ModuleName:
        if is_generated(place):
            return self._name_or_fallback(place.inside) if place.inside else ModuleName("", "(compiled)")
        if place.inside is None:
            return ModuleName("", f"({place.variable or place.kind})")
        inside = self._name_or_fallback(place.inside)
        return ModuleName(inside.model, f"{inside.path}.({place.kind})".removeprefix("."))

    def _name_or_fallback(self, place: ModulePlace) -> ModuleName:
        return place.name or self._fallback(place)


def module_name(label: str, model: nn.Module, path: str) -> ModuleName:
    """Returns the name of a model's module; a model without parameters, such as a loss, is a part."""
    if next(model.parameters(), None) is None:
        is_loss = isinstance(model, _Loss) or type(model).__name__.lower().endswith("loss")
        return LOSS_NAME if is_loss else ModuleName("", f"({label})")
    steps = path.split(".")
    while steps and steps[0] in _WRAPPERS and isinstance(model, _wrapper_types()):
        model = getattr(model, steps.pop(0))
    return ModuleName(label, ".".join(step for step in steps if step != "_orig_mod"))


@hide_from_compiler
def find_variable_name(value: Any, frame: FrameType | None) -> str:
    """Returns the variable, or attribute of `self`, that holds a value, in the nearest frame that has one."""
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        for names in _visible_names(frame):
            found = next((name for name, other in names.items() if other is value and name != "self"), "")
            if found:
                return found
        frame = frame.f_back
    return ""


@hide_from_compiler
def _visible_names(frame: FrameType) -> Iterator[dict[str, Any]]:
    """Yields the names that a frame's code sees: local variables, attributes of `self`, globals."""
    names = frame_variables(frame)
    if names is not None:
        yield names
        yield getattr(names.get("self"), "__dict__", {})
    yield frame.f_globals


def _holders() -> dict[int, nn.Module]:
    """Maps the id of each module to the module that contains it, among all objects of the process."""
    found: dict[int, nn.Module] = {}
    for value in gc.get_objects():
        # isinstance would make lazy proxies load their objects.
        if issubclass(type(value), nn.Module) and "_modules" in vars(value):
            for child in value._modules.values():
                if child is not None:
                    found.setdefault(id(child), value)
    return found


def is_generated(place: ModulePlace) -> bool:
    return place.kind in ("GraphModule", "InterpreterModule") and not place.variable


def _wrapper_types() -> tuple[type, ...]:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # importing it takes seconds
    compiled = (dynamo.OptimizedModule,) if dynamo is not None else ()
    return (*compiled, nn.DataParallel, nn.parallel.DistributedDataParallel)


class OwnTime(NamedTuple):
    """Times of one module per step, without the modules inside it."""

    forward_ms: float
    backward_ms: float
    calls: float

    def __add__(self, other: OwnTime) -> OwnTime:  # type: ignore[override]
        return OwnTime(*(a + b for a, b in zip(self, other, strict=True)))


def module_times(
    own: Mapping[ModuleName, OwnTime], kinds: Mapping[ModuleName, str], step_ms: float | None
) -> list[ModuleTime]:
    """Returns modules with the times of all modules inside them, parents first; parts in parentheses last.

    Args:
        own: by name.
        kinds: class by name, in the order of definition.
        step_ms: denominator of `share`; None for the sum of all modules.
    """
    nothing = OwnTime(0.0, 0.0, 0.0)
    total: dict[ModuleName, OwnTime] = {}
    for name, times in own.items():
        for above in enclosing_names(name):
            total[above] = total.get(above, nothing) + times
    models = dict.fromkeys(name.model for name in total if not name.is_part)
    whole_ms = step_ms or sum(times.forward_ms + times.backward_ms for times in own.values())
    return [
        ModuleTime(
            name=format_name(name, alone=len(models) == 1),
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


def format_name(name: ModuleName, *, alone: bool) -> str:
    """Formats a name for records: with the model's name only if there are several models."""
    return name.path if alone or name.is_part else f"{name.model}.{name.path}".removesuffix(".")


def enclosing_names(name: ModuleName) -> Iterator[ModuleName]:
    """Yields a name and the names of all modules around it."""
    yield name
    path = name.path
    while path and not name.is_part:
        path = path.rpartition(".")[0]
        yield ModuleName(name.model, path)


def _ordered(names: Mapping[ModuleName, OwnTime], kinds: Mapping[ModuleName, str]) -> list[ModuleName]:
    place = {name: at for at, name in enumerate(kinds)}
    models = list(dict.fromkeys(name.model for name in kinds))

    def key(name: ModuleName) -> tuple:
        around = [place.get(above, len(place)) for above in reversed(list(enclosing_names(name)))]
        return name.is_part, models.index(name.model) if name.model in models else len(models), around, name

    return sorted(names, key=key)


@hide_from_compiler
class StepInputs:
    """The inputs of the modules of one step; keeps no input alive."""

    def __init__(self) -> None:
        self._inputs: defaultdict[tuple, dict[int, ModulePlace]] = defaultdict(dict)

    def note(self, place: ModulePlace, inside: ModulePlace | None, args: tuple) -> None:
        first = args[0] if args else None
        if inside is None or not isinstance(first, Tensor):
            return
        # Tensors of torch.func have no storage; the script's modes see no operation.
        with suppress(RuntimeError, NotImplementedError), DisableTorchFunction():
            memory = StorageWeakRef(first.untyped_storage())  # the reference prevents reuse of the address
            # In-place writes make another input, as in a stack of layers that add to one tensor.
            self._inputs[id(inside), place.kind, memory, first._version][id(place)] = place

    def alike(self) -> Iterator[tuple[ModulePlace, int]]:
        """Yields modules of a class that share an input's memory, and how many share it."""
        for places in self._inputs.values():
            if len(places) > 1:
                yield from ((place, len(places)) for place in places.values())
