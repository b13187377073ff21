"""Parameters, gradients and optimizer state spread over the ranks by torch's fully_shard (FSDP2)."""

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
    """Runs a module whose parameters come together for as long as they are needed, and whose gradients are sums.

    The members of each `nn.ModuleList`, which is where large models have their blocks, come together one by one; all
    else does for the whole step.

    Raises:
        PlanError: torch's engine doesn't take this model.
    """

    counts: Tensor | bool = True
    """Not looked at: nothing stands between backward and the sum, so what counts nothing must have gradients of 0."""

    def __init__(self, module: ModelWithLoss, device: torch.device) -> None:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        try:
            for part in (*_shardable_blocks(module), module):
                fully_shard(part, mesh=mesh)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise PlanError(
                f"parallel=sharded can't spread this model: {describe_error(error)}", fix="use parallel=data"
            ) from error
        self.module = module
        for one in self._units():
            one.set_gradient_divide_factor(1.0)  # the loss has its share already
            one.set_force_sum_reduction_for_comms(True)  # gloo can't divide on the way

    def __call__(self, batch: Any) -> Any:
        return self.module(batch)

    @contextmanager
    def full_model(self) -> Iterator[None]:
        """All parameters whole on each rank. Ranks may compute different numbers of batches: none of them communicates."""
        for unit in self._units():
            unit.unshard()
        try:
            with _disable_hooks(self._units()):
                yield
        finally:
            for unit in self._units():
                unit.reshard()

    def _units(self) -> list[FSDPModule]:
        """The root first."""
        return [one for one in self.module.modules() if isinstance(one, FSDPModule)]


@contextmanager
def _disable_hooks(units: list[FSDPModule]) -> Iterator[None]:
    """No forward pass within calls the engine.

    The engine (torch 2.11 to 2.13) records each forward pass as one whose backward follows. The first step after an
    evaluation then prefetches parameters in the order of these records, which differs between ranks: they wait for ever.
    """
    replaced = []
    for unit in units:
        for hooks in (unit._forward_pre_hooks, unit._forward_hooks):  # type: ignore[attr-defined]
            for key, hook in hooks.items():
                if type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp."):
                    replaced.append((hooks, key, hook))
    for hooks, key, _ in replaced:
        hooks[key] = _no_hook  # in its place, so that the order of other hooks stays
    try:
        yield
    finally:
        for hooks, key, hook in replaced:
            hooks[key] = hook


def _no_hook(*_: Any) -> None:
    """Leaves arguments and outputs as they are."""


def _shardable_blocks(root: nn.Module) -> list[nn.Module]:
    """The members of lists that can be spread by themselves, each once, those within others first.

    One that shares a parameter with what is outside of it can't: torch knows of sharing within one call alone.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, value in root.named_parameters(remove_duplicate=False):
        names.setdefault(value, []).append(name)
    places: dict[nn.Module, list[str]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        places.setdefault(module, []).append(f"{name}.")
    lists = [one for one in places if isinstance(one, nn.ModuleList)]
    members = dict.fromkeys(member for one in lists for member in _callable_modules(one))

    def by_itself(member: nn.Module) -> bool:
        inside = tuple(places[member])
        values = list(member.parameters())
        return bool(values) and all(name.startswith(inside) for value in values for name in names[value])

    return [one for one in reversed(places) if one in members and by_itself(one)]


def _callable_modules(container: nn.Module) -> Iterator[nn.Module]:
    """What is called in a list; what has no forward, such as a list within it, is looked into."""
    for member in container.children():
        if type(member).forward is nn.Module.forward:
            yield from _callable_modules(member)
        else:
            yield member
