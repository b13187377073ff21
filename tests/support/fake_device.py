"""A second device for tests, on a machine that has none: its tensors say that they are on `meta`, and hold numbers.

As between real devices, operations on tensors of both fail, and copies go from one to the other; they are counted.
What a plan calls `far` is that device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hotloop.core.hardware.devices import check_device
from hotloop.core.hardware.probe import probe_hardware
from hotloop.core.records.hardware import Device, Hardware

FAR = torch.device("meta")


class Far(Tensor):
    """A tensor on the second device; its numbers are `held` on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Any:
        shape, like = held.shape, dict(dtype=held.dtype, strides=held.stride(), storage_offset=held.storage_offset())
        far = Tensor._make_wrapper_subclass(cls, shape, device=FAR, **like)  # type: ignore[attr-defined]
        far.held = held.detach()
        return far

    @property
    def data(self) -> Far:
        return Far(self.held)

    @data.setter
    def data(self, value: Far) -> None:
        self.held = value.held

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{function} of a far tensor outside of `second_device`")


class SecondDevice(TorchDispatchMode):
    """Runs operations on far tensors, with the numbers that they hold.

    Attributes:
        copies: shapes of what was copied from one device to the other, and which way: `far` or `near`.
        seeds: what the device's generator was seeded with.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[tuple[int, ...], str]] = []
        self.seeds: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name, device = function.overloadpacket.__name__, kwargs.pop("device", None)
        if device is not None and device != FAR:
            kwargs["device"] = device
        if name == "_to_copy":
            return self._copied(function, args[0], device, {**kwargs, "device": None})
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        far = device == FAR or any(isinstance(leaf, Far) for leaf in given)
        # Of several devices torch copies, and computes with lists one by one.
        if far and name != "copy_" and not name.startswith("_foreach"):
            _check(function, args, given)
        known = {id(leaf.held): leaf for leaf in given if isinstance(leaf, Far)}
        result = function(*tree_map_only(Far, _held, args), **tree_map_only(Far, _held, kwargs))
        if not far or (name == "copy_" and not isinstance(args[0], Far)):
            return result
        return tree_map_only(Tensor, lambda value: known.get(id(value)) if id(value) in known else Far(value), result)

    def _copied(self, function: Any, tensor: Tensor, device: torch.device | None, kwargs: dict[str, Any]) -> Tensor:
        was_far, is_far = isinstance(tensor, Far), isinstance(tensor, Far) if device is None else device == FAR
        result = function(tensor.held if isinstance(tensor, Far) else tensor, **kwargs)
        if was_far != is_far:
            self.copies.append((tuple(tensor.shape), "far" if is_far else "near"))
        return Far(result) if is_far else result

    def manual_seed(self, seed: int) -> None:
        self.seeds.append(seed)


def _held(tensor: Far) -> Tensor:
    return tensor.held


def _check(function: Any, args: Any, given: list[Tensor]) -> None:
    """Near and far tensors together fail as they do on real devices; single numbers may be near, unless they change."""
    near = [tensor for tensor in given if not isinstance(tensor, Far)]
    if any(tensor.ndim for tensor in near) or (function._schema.is_mutable and near and near[0] is args[0]):
        raise RuntimeError("Expected all tensors to be on the same device, but found two devices, meta and cpu!")


def _with_far(hardware: Hardware) -> Hardware:
    return replace(hardware, devices=(*hardware.devices, Device("far", "far")))


@contextmanager
def second_device() -> Iterator[SecondDevice]:
    """Within it there is a device `far`."""
    machine = SecondDevice()
    states = dict(get_rng_state=lambda device: None, set_rng_state=lambda state, device: None)
    module = SimpleNamespace(default_generators=[machine], empty_cache=lambda: None, **states)
    of, swap = torch.get_device_module, torch.__future__.get_swap_module_params_on_conversion()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_device_module", lambda device: module if device == FAR else of(device))
        patch.setattr("hotloop.lowering.build.probe_hardware", lambda device: _with_far(probe_hardware(device)))
        patch.setattr(
            "hotloop.lowering.transforms.placement.check_device",
            lambda name: FAR if name == "far" else check_device(name),
        )
        torch.__future__.set_swap_module_params_on_conversion(True)  # a wrapper can't be changed in place
        try:
            with machine:
                yield machine
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swap)
