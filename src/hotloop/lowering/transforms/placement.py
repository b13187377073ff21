"""The placement axis: places modules of the model on devices of their own.

A placed module's inputs are copied to its device, and its outputs to the device of the code around it: that of the
innermost placed module around it, else the plan's. So the code between the modules of a forward, such as a skip
connection, has all tensors on one device, and so do loss and targets.
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
"""Number of modules named in a message."""


def apply_placement(parts: LoweringContext, device: torch.device) -> LoweringContext:
    """Moves the placed modules to their devices, and the rest of the model to `device`.

    Raises:
        PlanError: no such module or device, or a shared tensor would need two devices.
    """
    devices = {name: check_device(where) for name, where in (parts.plan.placement or {}).items()}
    places = ModulePlaces.from_model(parts.model, devices, device)
    names = _placed_names(parts.model, places)
    _check_shared(parts.model, names, places)
    parts = move_to_device(parts, device, places.move)
    for name, module in {id(module): (name, module) for name, module in names}.values():
        there, home = places.at(name), places.run_across_devices(name)
        if there != home:
            DeviceTrip(name, there, home).attach(module)
    elsewhere = tuple(sorted({*devices.values()} - {device}, key=str))
    return replace(parts, elsewhere=elsewhere, notes=(*parts.notes, _describe_placement(parts.model, devices, device)))


def _describe_placement(model: nn.Module, devices: Mapping[str, torch.device], device: torch.device) -> str:
    sizes = {name: count_parameters(model.get_submodule(name))[0] for name in devices}
    places = [f"{name} on {where} ({sizes[name]:,} parameters)" for name, where in devices.items()]
    return f"placed: {', '.join(places[:_SHOWN])}{', ...' * (len(places) > _SHOWN)}; the rest on {device}"


@dataclass(frozen=True)
class ModulePlaces:
    """The device of each part of a model.

    Attributes:
        named_modules: devices by the names of called modules; other parts are on the device of the module around them.
            The model itself, with the empty name, is on the plan's device.
    """

    named_modules: Mapping[str, torch.device]

    @classmethod
    def from_model(cls, model: nn.Module, devices: Mapping[str, torch.device], device: torch.device) -> ModulePlaces:
        """Raises PlanError for unknown names, and for modules that are never called."""
        known = dict(model.named_modules(remove_duplicate=False))
        named = {"": device}
        for name in sorted(devices, key=_depth):  # a member's place overrides that of its list
            if name not in known:
                raise _unknown_module(name, [other for other in known if other])
            named |= dict.fromkeys(_called_modules(known[name], name), devices[name])
        return cls(named)

    def at(self, name: str) -> torch.device:
        """Returns the device of the module, parameter or buffer of that name."""
        while name not in self.named_modules:
            name = name.rpartition(".")[0]
        return self.named_modules[name]

    def run_across_devices(self, name: str) -> torch.device:
        """Returns the device of the code that calls the module of that name."""
        return self.at(name.rpartition(".")[0])

    def move(self, model: nn.Module) -> nn.Module:
        """Moves each part directly to its device, inner parts first: no device needs memory for the whole model."""
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
    """Yields the called modules of a placed module: itself, or the members of a list or dict of modules.

    Raises:
        PlanError: the module has no forward whose inputs could be moved.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise PlanError(f"placement names {name!r}, which is TorchScript and takes no hooks", fix="leave it out")
    members = {key: member for key, member in module._modules.items() if member is not None}
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if type(module).forward is not nn.Module.forward or "forward" in vars(module):
        yield name
    elif tensors or not members:
        raise PlanError(
            f"placement names {name!r} ({type(module).__name__}), which has no forward",
            expected="a module that is called, so that its arguments can be copied to its device",
            fix="place the module around it instead",
        )
    else:
        for key, member in members.items():
            yield from _called_modules(member, f"{name}.{key}")


def _placed_names(model: nn.Module, places: ModulePlaces) -> list[tuple[str, nn.Module]]:
    """Returns the placed modules, each by all of its names."""
    named = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if name]
    placed = {id(module) for name, module in named if name in places.named_modules}
    return [(name, module) for name, module in named if id(module) in placed]


def _check_shared(model: nn.Module, names: list[tuple[str, nn.Module]], places: ModulePlaces) -> None:
    """Refuses shared modules and tensors whose names have different places."""
    values = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    _check_alike("tensor", [(name, value, f"on {places.at(name)}") for name, value in values])
    calls = [f"on {places.at(name)}, called from {places.run_across_devices(name)}" for name, _ in names]
    _check_alike("module", [(name, module, call) for (name, module), call in zip(names, calls, strict=True)])


def _check_alike(what: str, found: Sequence[tuple[str, object, str]]) -> None:
    first: dict[int, tuple[str, str]] = {}
    for name, thing, where in found:
        before, there = first.setdefault(id(thing), (name, where))
        if there != where:
            raise PlanError(
                f"{before!r} and {name!r} share one {what}, and would be on different devices: {there}, and {where}",
                expected="one device for shared tensors",
                fix="place the modules that share it alike, or what surrounds all of them",
            )


@dataclass(eq=False)
class DeviceTrip:
    """Hooks of the module `name` that move inputs to the device `there`, and outputs to the device `home`."""

    name: str
    there: torch.device
    home: torch.device
    _open_calls: list[DeviceCopies] = field(default_factory=list)

    def attach(self, module: nn.Module) -> None:
        """Registers the hooks."""
        module.register_forward_pre_hook(self.move_inputs, with_kwargs=True)
        module.register_forward_hook(self.move_outputs, always_call=True)

    def move_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._open_calls.append(copies := DeviceCopies(self.there))
        return copies.copy_of((args, kwargs))

    def move_outputs(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Copies the outputs of a call back.

        Raises:
            PlanError: the module changed a list or dict among its inputs, which is a copy.
        """
        copies = self._open_calls.pop()
        copies.write_back()
        if copies.has_new_layout:
            raise PlanError(
                f"{self.name!r} changes a list or dict that it is called with, which is a copy on {self.there}",
                expected="a module that returns what it computes",
                fix="place the module around it instead",
            )
        return DeviceCopies(self.home).copy_of(output)


class DeviceCopies:
    """Copies of tensors on a device: one copy for each tensor, and none for tensors that are on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._tree: Any = ()
        self._items: list[Any] = []

    def copy_of(self, tree: Any) -> Any:
        """Returns the tree with copied tensors."""
        self._tree = map_tensors(self._copy, tree, self._other)
        self._items = _container_items(self._tree)
        return self._tree

    def write_back(self) -> None:
        """Writes in-place changes of the copies back to the originals."""
        for tensor, copy, version in self._made.values():
            if copy is not tensor and _version(copy) != version:
                tensor.copy_(copy)

    @property
    def has_new_layout(self) -> bool:
        """Whether the items of a list or dict of the copies were replaced."""
        return list(map(id, _container_items(self._tree))) != list(map(id, self._items))

    def _copy(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._made:
            copy = tensor.to(self._device)
            self._made[id(tensor)] = tensor, copy, _version(copy)
        return self._made[id(tensor)][1]

    def _other(self, leaf: Any) -> Any:
        """Moves a leaf of another kind, such as a packed sequence, by its own `to`; modules stay."""
        return leaf.to(self._device) if hasattr(leaf, "to") and not isinstance(leaf, nn.Module) else leaf


def _container_items(tree: Any) -> list[Any]:
    """Returns all items of nested lists and dicts."""
    items = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, tuple | list) else ()
    return [leaf for item in items for leaf in (item, *_container_items(item))]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
