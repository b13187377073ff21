"""Peak memory of a training step on the CPU: predicted without memory, and as torch's allocator reports a real step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from bench.foresight.memory_networks import NETWORKS, Network
from hotloop.profiler.step_costs.trace import trace_step

INTERVAL = (0.93, 1.10)
"""Of the prediction: 90 % of steps."""


def memory_rows() -> list[tuple[str, float, float, float, float]]:
    """Returns (name, predicted, low, high, measured) bytes of each network."""
    rows = []
    for network in NETWORKS:
        predicted = trace_step(
            network.model, network.batch(), loss=network.loss, optimizer=network.optimizer
        ).peak_bytes
        rows.append((network.name, predicted, INTERVAL[0] * predicted, INTERVAL[1] * predicted, measured_peak(network)))
    return rows


def measured_peak(network: Network) -> int:
    """Returns the peak bytes of tensors in the third step: those before the step, and the allocator's record in it."""
    torch.manual_seed(0)
    model, batch = network.model(), network.batch()
    optimizer = network.optimizer(model.parameters())
    for _ in range(2):
        _step(model, optimizer, batch, network)
    optimizer.zero_grad()
    state = [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    before = [*model.parameters(), *model.buffers(), *state, *batch]
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in before}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        _step(model, optimizer, batch, network)
    return sum(storages.values()) + _allocated_peak(profiler)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Any, ...], network: Network) -> None:
    optimizer.zero_grad()
    network.loss(model(*batch[:-1]), batch[-1]).backward()
    optimizer.step()


def _allocated_peak(profiler: Any) -> int:
    events = profiler.profiler.kineto_results.experimental_event_tree()
    changes = sorted(_allocations(events))
    total = peak = 0
    for _, change in changes:
        total += change
        peak = max(peak, total)
    return peak


def _allocations(events: Any) -> Iterator[tuple[int, int]]:
    for event in events:
        if hasattr(event.extra_fields, "alloc_size"):
            yield event.start_time_ns, event.extra_fields.alloc_size
        yield from _allocations(event.children)
