"""The placement axis: modules of the model on devices of their own, with the copies made on the way there and back.

A placed module takes what it is called with to its device, and what it puts out back to that of the code around it: of
the innermost placed module that it is in, else the plan's. So whatever a forward does between its modules, such as
adding a skip or joining branches, finds everything in one place, and so do loss and targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.core.hardware.devices import check_device
from hotloop.data.batch_tree import map_tensors
from hotloop.errors import PlanError
from hotloop.lowering.context import LoweringContext, count_parameters, move_to_device

_SHOWN = 8
"""Modules named in an error, which is one line."""


def apply_placement(parts: LoweringContext, device: torch.device) -> LoweringContext:
    """The model's placed modules on their devices, and all else on `device`.

    Raises:
        PlanError: there is no such module or device, or what is one tensor would be in two places.
    """
    asked = {name: check_device(where) for name, where in (parts.plan.placement or {}).items()}
    places = ModulePlaces.from_model(parts.model, asked, device)
    names = _placed_names(parts.model, places)
    _check_shared(parts.model, names, places)
    parts = move_to_device(parts, device, places.move)
    for name, module in {id(module): (name, module) for name, module in names}.values():
        there, home = places.at(name), places.run_across_devices(name)
        if there != home:
            DeviceTrip(name, there, home).is_on(module)
    elsewhere = tuple(sorted({*asked.values()} - {device}, key=str))
    return replace(parts, elsewhere=elsewhere, notes=(*parts.notes, _describe_placement(parts.model, asked, device)))


def _describe_placement(model: nn.Module, asked: Mapping[str, torch.device], device: torch.device) -> str:
    sizes = {name: count_parameters(model.get_submodule(name))[0] for name in asked}
    found = [f"{name} on {where} ({sizes[name]:,} parameters)" for name, where in asked.items()]
    return f"placed: {', '.join(found[:_SHOWN])}{', ...' * (len(found) > _SHOWN)}; the rest on {device}"


@dataclass(frozen=True)
class ModulePlaces:
    """Where each part of a model is.

    Attributes:
        named: devices by the names of modules that are called; all else is where what surrounds it is. The model
            itself, with the empty name, is on the plan's device.
    """

    named_modules: Mapping[str, torch.device]

    @classmethod
    def from_model(cls, model: nn.Module, asked: Mapping[str, torch.device], device: torch.device) -> ModulePlaces:
        """Raises PlanError for a name that no module has, and one of a module that nobody calls."""
        known = dict(model.named_modules(remove_duplicate=False))
        named = {"": device}
        for name in sorted(asked, key=_depth):  # what is named within a list of modules counts more than the list
            if name not in known:
                raise _unknown_module(name, [other for other in known if other])
            named |= dict.fromkeys(_called_modules(known[name], name), asked[name])
        return cls(named)

    def at(self, name: str) -> torch.device:
        """Where the module, parameter or buffer of that name is."""
        while name not in self.named_modules:
            name = name.rpartition(".")[0]
        return self.named_modules[name]

    def run_across_devices(self, name: str) -> torch.device:
        """Where the code is that calls the module of that name."""
        return self.at(name.rpartition(".")[0])

    def move(self, model: nn.Module) -> nn.Module:
        """Moves each part straight to its device, so that none needs room for all: inner ones first, and then left out."""
        modules = {name: model.get_submodule(name) for name in self.named_modules}
        holders = {name: model.get_submodule(name.rpartition(".")[0])._modules for name in self.named_modules if name}
        for name in sorted(modules, key=_depth, reverse=True):
            modules[name].to(self.named_modules[name])
            if name:
                holders[name][name.rpartition(".")[2]] = None
        for name, members in holders.items():
            members[name.rpartition(".")[2]] = modules[name]
        return model


def _depth(name: str) -> int:
    return len(name.split(".")) if name else 0


def _unknown_module(name: str, known: list[str]) -> PlanError:
    near = get_close_matches(name, known, n=3) or known[:_SHOWN]
    return PlanError(
        f"placement names {name!r}, and the model has no such module",
        expected=f"its modules, such as {', '.join(near)}" if near else "a model that is made of modules",
        fix="check the spelling" if near else "leave placement out",
    )


def _called_modules(module: nn.Module, name: str) -> Iterator[str]:
    """The modules that are called where a module is: itself, or the members of a list or dict of modules.

    Raises:
        PlanError: nobody would bring it what it computes with.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise PlanError(f"placement names {name!r}, which is TorchScript: it takes no hooks", fix="leave it out")
    members = {own: member for own, member in module._modules.items() if member is not None}
    holds = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if type(module).forward is not nn.Module.forward or "forward" in vars(module):
        yield name
    elif holds or not members:
        raise PlanError(
            f"placement names {name!r} ({type(module).__name__}), which has no forward",
            expected="a module that is called, so that what it is called with can be brought to it",
            fix="place the module around it instead",
        )
    else:
        for own, member in members.items():
            yield from _called_modules(member, f"{name}.{own}")


def _placed_names(model: nn.Module, places: ModulePlaces) -> list[tuple[str, nn.Module]]:
    """The placed modules, each by all of its names."""
    every = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if name]
    own = {id(module) for name, module in every if name in places.named_modules}
    return [(name, module) for name, module in every if id(module) in own]


def _check_shared(model: nn.Module, names: list[tuple[str, nn.Module]], places: ModulePlaces) -> None:
    """Refuses what has several names, and by them several places."""
    values = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    _check_alike("tensor", [(name, value, f"on {places.at(name)}") for name, value in values])
    ways = [
        (name, module, f"on {places.at(name)}, called from {places.run_across_devices(name)}") for name, module in names
    ]
    _check_alike("module", ways)


def _check_alike(what: str, found: Sequence[tuple[str, object, str]]) -> None:
    first: dict[int, tuple[str, str]] = {}
    for name, thing, where in found:
        before, there = first.setdefault(id(thing), (name, where))
        if there != where:
            raise PlanError(
                f"{before!r} and {name!r} are one {what}, and would be apart: {there}, and {where}",
                expected="one place for what is shared",
                fix="place the modules that share it alike, or what surrounds all of them",
            )


@dataclass(eq=False)
class DeviceTrip:
    """What the module of that name is called with goes `there`, and what it puts out comes `home`."""

    name: str
    there: torch.device
    home: torch.device
    _under_way: list[DeviceCopies] = field(default_factory=list)

    def is_on(self, module: nn.Module) -> None:
        """Has each call of the module make the trip."""
        module.register_forward_pre_hook(self.move_inputs, with_kwargs=True)
        module.register_forward_hook(self.move_outputs, always_call=True)

    def move_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The arguments of a call, there."""
        self._under_way.append(copies := DeviceCopies(self.there))
        return copies.copy_of((args, kwargs))

    def move_outputs(self, module: nn.Module, args: Any, output: Any) -> Any:
        """What a call put out, at home.

        Raises:
            PlanError: it also changed a list or dict that it was given, which is another one at home.
        """
        copies = self._under_way.pop()
        copies.write_back()
        if copies.has_new_layout:
            raise PlanError(
                f"{self.name!r} changes a list or dict that it is called with, which is a copy on {self.there}",
                expected="a module that returns what it computes",
                fix="place the module around it instead",
            )
        return DeviceCopies(self.home).copy_of(output)


class DeviceCopies:
    """Copies of tensors on a device: what is one tensor has one copy, and what is there already is its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._tree: Any = ()
        self._items: list[Any] = []

    def copy_of(self, tree: Any) -> Any:
        """A tree of tensors and other things, there."""
        self._tree = map_tensors(self._copy, tree, self._other)
        self._items = _container_items(self._tree)
        return self._tree

    def write_back(self) -> None:
        """Changes what was copied as the copies were changed in place since."""
        for tensor, copy, version in self._made.values():
            if copy is not tensor and _version(copy) != version:
                tensor.copy_(copy)

    @property
    def has_new_layout(self) -> bool:
        """Whether a list or dict of the copies holds something else than at first."""
        return list(map(id, _container_items(self._tree))) != list(map(id, self._items))

    def _copy(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._made:
            copy = tensor.to(self._device)
            self._made[id(tensor)] = tensor, copy, _version(copy)
        return self._made[id(tensor)][1]

    def _other(self, leaf: Any) -> Any:
        """A leaf of another kind, by its own `to` if it has one, such as a packed sequence; modules stay as they are."""
        return leaf.to(self._device) if hasattr(leaf, "to") and not isinstance(leaf, nn.Module) else leaf


def _container_items(tree: Any) -> list[Any]:
    """All that lists and dicts hold."""
    inside = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, tuple | list) else ()
    return [item for one in inside for item in (one, *_container_items(one))]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
