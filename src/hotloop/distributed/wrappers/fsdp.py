"""Shards parameters, gradients and optimizer state over the ranks by torch's fully_shard (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from hotloop.distributed.wrappers.ddp import ModelWithLoss
from hotloop.errors import PlanError, describe_error, is_out_of_memory


class FsdpModel:
    """Runs a module with sharded parameters, whose gradients are sums over the ranks.

    The members of each `nn.ModuleList`, the blocks of most large models, are gathered one by one; all other parameters
    for the whole step.

    Raises:
        PlanError: torch's engine refuses this model.
    """

    counts: Tensor | bool = True
    """Unused: no hook runs between backward and the sum, so gradients that don't count must be 0 already."""

    def __init__(self, module: ModelWithLoss, device: torch.device) -> None:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        try:
            for part in (*_shardable_blocks(module), module):
                fully_shard(part, mesh=mesh)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise PlanError(
                f"parallel=sharded can't shard this model: {describe_error(error)}", fix="use parallel=data"
            ) from error
        self.module = module
        for unit in self._units():
            unit.set_gradient_divide_factor(1.0)  # the loss is scaled already
            unit.set_force_sum_reduction_for_comms(True)  # gloo can't divide

    def __call__(self, batch: Any) -> Any:
        return self.module(batch)

    @contextmanager
    def full_model(self) -> Iterator[None]:
        """Gathers all parameters on each rank. Batches then need no communication: their numbers may differ by rank."""
        for unit in self._units():
            unit.unshard()
        try:
            with _disable_hooks(self._units()):
                yield
        finally:
            for unit in self._units():
                unit.reshard()

    def _units(self) -> list[FSDPModule]:
        """Returns all sharded modules, the root first."""
        return [module for module in self.module.modules() if isinstance(module, FSDPModule)]


@contextmanager
def _disable_hooks(units: list[FSDPModule]) -> Iterator[None]:
    """Disables the engine's hooks of the forward pass within the context.

    torch 2.11 to 2.13 expects a backward pass after each forward pass. The first step after an evaluation would
    prefetch parameters in the order of the evaluation, which differs by rank: the ranks would wait for ever.
    """
    replaced = []
    for unit in units:
        for hooks in (unit._forward_pre_hooks, unit._forward_hooks):  # type: ignore[attr-defined]
            for key, hook in hooks.items():
                if type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp."):
                    replaced.append((hooks, key, hook))
    for hooks, key, _ in replaced:
        hooks[key] = _no_hook  # keeps the order of the other hooks
    try:
        yield
    finally:
        for hooks, key, hook in replaced:
            hooks[key] = hook


def _no_hook(*_: Any) -> None: ...


def _shardable_blocks(root: nn.Module) -> list[nn.Module]:
    """Returns the members of module lists that can be sharded separately, inner members first.

    A member that shares a parameter with other modules can't: torch handles sharing within one call alone.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, value in root.named_parameters(remove_duplicate=False):
        names.setdefault(value, []).append(name)
    places: dict[nn.Module, list[str]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        places.setdefault(module, []).append(f"{name}.")
    lists = [module for module in places if isinstance(module, nn.ModuleList)]
    members = {member for container in lists for member in _callable_modules(container)}

    def is_separate(member: nn.Module) -> bool:
        inside = tuple(places[member])
        values = list(member.parameters())
        return bool(values) and all(name.startswith(inside) for value in values for name in names[value])

    return [module for module in reversed(places) if module in members and is_separate(module)]


def _callable_modules(container: nn.Module) -> Iterator[nn.Module]:
    """Yields the members with a forward; those of inner lists take the list's place."""
    for member in container.children():
        if type(member).forward is nn.Module.forward:
            yield from _callable_modules(member)
        else:
            yield member
