"""Which rank holds which part of a model; what it doesn't hold takes no memory there, and comes together for a State."""

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
    """The parameters and buffers of a model, of which each rank has those of its stages on its device.

    Those of other ranks keep their shapes, over the memory of a single number.

    Args:
        holders: for each parameter and buffer, by any of its names, the ranks that use it; the first of them speaks for
            it. What none uses is the first rank's.
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
        kept = {id(value) for value in own.values()}
        others = {id(value): value for value in self._tensors.values() if id(value) not in kept}
        self.elsewhere = list(others.values())
        self.own = frozenset(own)
        self._spoken_by_id = {id(value) for name, value in self._tensors.items() if self.owns_module(name)}

    def owns_module(self, name: str) -> bool:
        """Whether a parameter or buffer counts as this rank's."""
        return self.holders[name][0] == self.world.rank

    def owns_tensor(self, value: Tensor) -> bool:
        return id(value) in self._spoken_by_id

    def shared_tensors(self) -> list[tuple[Tensor, dist.ProcessGroup]]:
        """Parameters that this rank and others use, each with these ranks; all ranks must ask."""
        found, seen = [], set()
        for name, value in self._tensors.items():
            if value.requires_grad and len(self.holders[name]) > 1 and id(value) not in seen:
                seen.add(id(value))
                group = dist.new_group(self.holders[name])
                found += [(value, group)] if name in self.own else []
        return found

    def move_to_owners(self, device: torch.device, loss: nn.Module | None) -> None:
        """Moves this rank's part to its device, with the buffers of a loss, and gives up the memory of all else."""
        for value in [*(self._tensors[name] for name in self.own), *(loss.buffers() if loss is not None else ())]:
            value.data = value.data.to(device)
        for value in self.elsewhere:
            free_storage(value)

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """All tensors with memory of their own; in that of other ranks' is nothing, and what is written there is lost."""
        for value in self.elsewhere:
            value.data = torch.empty(value.shape, dtype=value.dtype)
        try:
            yield
        finally:
            for value in self.elsewhere:
                free_storage(value)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """All tensors on the CPU, to be looked at but for their content."""
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
        """The State of all ranks, out of what each has of it; the last rank's loss is the one that has run."""
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
        return {name: value for name, value in values.items() if self.owns_module(name)}


def free_storage(value: Tensor) -> None:
    """Takes a tensor's memory; shape and dtype stay."""
    value.data = torch.zeros((), dtype=value.dtype).expand(value.shape)


@dataclass(frozen=True)
class _TensorSlot:
    """A tensor that is sent by itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def exchange_values(world: World, own: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What all ranks have, together, on each; tensors on the CPU travel one by one, so that none is copied twice."""
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
