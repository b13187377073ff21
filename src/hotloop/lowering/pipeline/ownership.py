"""Ownership of a model's tensors by ranks: others' tensors take no memory, and a State gathers all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hotloop.core.state import State
from hotloop.distributed.world import World


class StageOwnership:
    """The parameters and buffers of a model, of which each rank has those of its stage on its device.

    Tensors of other ranks have their shape on the memory of a single number.

    Args:
        holders: the ranks that use each parameter and buffer, by any of its names; the first rank owns it. Rank 0 owns
            unused ones.
    """

    def __init__(self, model: nn.Module, holders: Mapping[str, Iterable[int]], world: World) -> None:
        self.world = world
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self._tensors: dict[str, Tensor] = {}
        ranks: dict[int, set[int]] = {}
        for name, value in named:
            self._tensors.setdefault(name, value)
            ranks.setdefault(id(value), set()).update(holders.get(name, ()))
        self.holders = {name: sorted(ranks[id(value)]) or [0] for name, value in self._tensors.items()}
        own = {name: value for name, value in self._tensors.items() if world.rank in self.holders[name]}
        own_ids = {id(value) for value in own.values()}
        others = {id(value): value for value in self._tensors.values() if id(value) not in own_ids}
        self.elsewhere = list(others.values())
        self.own = frozenset(own)
        self._owned_ids = {id(value) for name, value in self._tensors.items() if self.owns_name(name)}

    def owns_name(self, name: str) -> bool:
        """Checks whether this rank owns a parameter or buffer."""
        return self.holders[name][0] == self.world.rank

    def owns_tensor(self, value: Tensor) -> bool:
        return id(value) in self._owned_ids

    def shared_tensors(self) -> list[tuple[Tensor, dist.ProcessGroup]]:
        """Returns the parameters of this rank that others use too, each with its process group; a collective call."""
        found, seen = [], set()
        for name, value in self._tensors.items():
            if value.requires_grad and len(self.holders[name]) > 1 and id(value) not in seen:
                seen.add(id(value))
                group = dist.new_group(self.holders[name])
                found += [(value, group)] if name in self.own else []
        return found

    def move_to_owners(self, device: torch.device, loss: nn.Module | None) -> None:
        """Moves this rank's tensors and the loss's buffers to its device, and frees the memory of all others."""
        for value in [*(self._tensors[name] for name in self.own), *(loss.buffers() if loss is not None else ())]:
            value.data = value.data.to(device)
        for value in self.elsewhere:
            free_storage(value)

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """Gives other ranks' tensors memory, with undefined content; writes to it are lost."""
        for value in self.elsewhere:
            value.data = torch.empty(value.shape, dtype=value.dtype)
        try:
            yield
        finally:
            for value in self.elsewhere:
                free_storage(value)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Gives all tensors memory on the CPU, with undefined content."""
        away = {name: value.data for name in self.own if (value := self._tensors[name]).device.type != "cpu"}
        with self.full_parameters():
            for name, data in away.items():
                self._tensors[name].data = torch.empty(data.shape, dtype=data.dtype)
            try:
                yield
            finally:
                for name, data in away.items():
                    self._tensors[name].data = data

    def gather_state(self, state: State) -> State:
        """Returns the State of all ranks from their parts; only the last rank has run the loss."""
        parts: dict[str, dict[str, Any]] = {
            "parameters": self._owned_tensors(state.parameters),
            "buffers": self._owned_tensors(state.buffers),
            "average": self._owned_tensors(state.average),
            "optimizer": self._owned_tensors(state.optimizer.get("state", {})),
            "loss": dict(state.loss) if self.world.rank == self.world.ranks - 1 else {},
        }
        found = exchange_values(self.world, parts)
        whole: dict[str, Any] = {
            name: {key: found[name][key] for key in getattr(state, name)} for name in ("parameters", "buffers", "loss")
        }
        average = {name: found["average"][name] for name in state.parameters if name in found["average"]}
        optimizer = dict(state.optimizer)
        if optimizer:
            order = [name for group in optimizer["groups"] for name in group["params"]]
            optimizer["state"] = {name: found["optimizer"][name] for name in order if name in found["optimizer"]}
        return replace(state, optimizer=optimizer, average=average, **whole)

    def _owned_tensors(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if self.owns_name(name)}


def free_storage(value: Tensor) -> None:
    """Frees a tensor's memory; shape and dtype stay."""
    value.data = torch.zeros((), dtype=value.dtype).expand(value.shape)


@dataclass(frozen=True)
class _TensorSlot:
    shape: tuple[int, ...]
    dtype: torch.dtype


def exchange_values(world: World, own: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns all ranks' values on each rank; CPU tensors are sent one by one, so that none is copied twice."""
    sent: list[Tensor] = []
    outlines = world.all_gather(_describe_values(own, sent))
    found: dict[str, dict[str, Any]] = {}
    for rank, outline in enumerate(outlines):
        following = iter(sent) if rank == world.rank else None
        for name, values in _fill_values(outline, following, rank).items():
            found.setdefault(name, {}).update(values)
    return found


def _describe_values(tree: Any, sent: list[Tensor]) -> Any:
    if isinstance(tree, Tensor):
        sent.append(tree)
        return _TensorSlot(tuple(tree.shape), tree.dtype)
    if isinstance(tree, dict):
        return {key: _describe_values(value, sent) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_describe_values(value, sent) for value in tree)
    return tree


def _fill_values(outline: Any, own: Iterator[Tensor] | None, rank: int) -> Any:
    if isinstance(outline, _TensorSlot):
        value = torch.empty(outline.shape, dtype=outline.dtype) if own is None else next(own).contiguous()
        if value.numel():
            dist.broadcast(value, src=rank)
        return value
    if isinstance(outline, dict):
        return {key: _fill_values(value, own, rank) for key, value in outline.items()}
    if isinstance(outline, list | tuple):
        return type(outline)(_fill_values(value, own, rank) for value in outline)
    return outline
