"""A second device for tests, on a machine that has none: its tensors report `meta` and have their numbers in CPU memory.

As between real devices, operations on tensors of both fail, and copies go from one to the other; they are counted.
A plan calls that device `far`. tests/support/fake_cuda.py has the same device as `cuda:0`.
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
    def __new__(cls, held: Tensor, device: torch.device = FAR) -> Any:
        shape, like = held.shape, dict(dtype=held.dtype, strides=held.stride(), storage_offset=held.storage_offset())
        far = Tensor._make_wrapper_subclass(cls, shape, device=device, **like)  # type: ignore[attr-defined]
        far.held = held.detach()
        return far

    @property
    def data(self) -> Far:
        return Far(self.held, self.device)

    @data.setter
    def data(self, value: Far) -> None:
        self.held = value.held

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{function} of a far tensor outside of `second_device`")


_ACROSS_DEVICES = {"copy_", "index", "index_put", "index_put_", "_index_put_impl_"}
"""Operations whose tensors may be on two devices. torch computes with lists of two devices one by one."""

_LIKE_CUDA: dict[str, Any] = {"_fused_sdp_choice": lambda *args, **kwargs: 0}
"""Operations that only a GPU has, or in which a CPU chooses kernels of its own."""


class SecondDevice(TorchDispatchMode):
    """Runs operations on far tensors, with the numbers that they hold.

    Args:
        device: what far tensors report.

    Attributes:
        copies: shapes of what was copied from one device to the other, and which way: `far` or `near`.
        seeds: what the device's generator was seeded with.
    """

    def __init__(self, device: torch.device = FAR) -> None:
        super().__init__()
        self.device = device
        self.copies: list[tuple[tuple[int, ...], str]] = []
        self.seeds: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name, device = function.overloadpacket.__name__, kwargs.pop("device", None)
        if kwargs.pop("pin_memory", None) and self._is_far(device):
            raise RuntimeError("Only dense CPU tensors can be pinned")
        if device is not None and not self._is_far(device):
            kwargs["device"] = device
        if name == "_to_copy":
            return self._copied(function, args[0], device, {**kwargs, "device": None})
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        far = self._is_far(device) or any(isinstance(leaf, Far) for leaf in given)
        if far and name not in _ACROSS_DEVICES and not name.startswith("_foreach"):
            self._check(function, args, given)
        known = {id(leaf.held): leaf for leaf in given if isinstance(leaf, Far)}
        args, kwargs = (tree_map_only(Far, _held, value) for value in (args, kwargs))
        result = _LIKE_CUDA.get(name, function)(*args, **kwargs)
        if not far or (name == "copy_" and id(args[0]) not in known):
            return result
        return tree_map_only(
            Tensor, lambda value: known[id(value)] if id(value) in known else Far(value, self.device), result
        )

    def _is_far(self, device: torch.device | None) -> bool:
        return device is not None and device.type == self.device.type

    def _copied(self, function: Any, tensor: Tensor, device: torch.device | None, kwargs: dict[str, Any]) -> Tensor:
        was_far = isinstance(tensor, Far)
        is_far = was_far if device is None else self._is_far(device)
        result = function(tensor.held if isinstance(tensor, Far) else tensor, **kwargs)
        if was_far != is_far:
            self.copies.append((tuple(tensor.shape), "far" if is_far else "near"))
        return Far(result, self.device) if is_far else result

    def _check(self, function: Any, args: Any, given: list[Tensor]) -> None:
        """Raises torch's error for tensors of two devices; single numbers may be near, unless an operation sets them."""
        near = [tensor for tensor in given if not isinstance(tensor, Far)]
        is_fused = function.overloadpacket.__name__.startswith("_fused")
        if any(tensor.ndim or is_fused for tensor in near) or (
            function._schema.is_mutable and near and near[0] is args[0]
        ):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found two devices, {self.device} and cpu! ({function})"
            )

    def manual_seed(self, seed: int) -> None:
        self.seeds.append(seed)


def _held(tensor: Far) -> Tensor:
    return tensor.held


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
