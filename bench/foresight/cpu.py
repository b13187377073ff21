"""Steps of W1 to W9 at five batch sizes on this CPU: predicted from probes of single operators, and measured.

The steps are those of the baseline plan: forward, backward and update of the workloads' networks with Adam, one thread.
Probes and steps alternate, so that a slower minute slows both.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from bench.foresight.memory_networks import image_batch, text_batch
from bench.speed.data import ALPHABET
from bench.speed.models import build, loss_module
from bench.speed.workloads import WORKLOADS
from hotloop.advisor.rates import CPU_INTERVAL, cpu_step_time
from hotloop.core.records.step_costs import CpuRates
from hotloop.profiler.step_costs.cpu_probe import measure_cpu_rates
from hotloop.profiler.step_costs.trace import trace_step

BATCH_SIZES = {
    "W1": (2, 8, 32, 128, 512),
    "W2": (16, 64, 128, 256, 1024),
    "W3": (8, 32, 64, 128, 256),
    "W4": (4, 16, 64, 256, 1024),
    "W5": (8, 32, 128, 256, 512),
    "W6": (4, 8, 16, 32, 64),
    "W7": (1, 2, 4, 8, 12),
    "W8": (8, 16, 32, 64, 128),
    "W9": (1, 2, 3, 4, 5),
}
"""W2, which has W1's network, has other sizes than W1."""

MOST_SECONDS = 1.5
"""Of the measurement of one step at one batch size."""


def cpu_rows(rates: CpuRates | None = None) -> list[tuple[str, float, float, float, float]]:
    """Returns (name, predicted, low, high, measured) ms of each workload at each batch size, one thread."""
    torch.set_num_threads(1)
    rates = rates or measure_cpu_rates()
    rows = []
    for name, sizes in BATCH_SIZES.items():
        for size in sizes:
            predicted = 1000 * cpu_step_time(workload_costs(name, size), rates).seconds
            measured = 1000 * measured_step_s(name, size)
            rows.append(
                (f"{name}, batch {size}", predicted, CPU_INTERVAL[0] * predicted, CPU_INTERVAL[1] * predicted, measured)
            )
    return rows


def workload_batch(name: str, rows: int) -> tuple[Any, ...]:
    data = WORKLOADS[name].data
    if data.startswith("text"):
        return text_batch(rows, int(data.removeprefix("text-")), len(ALPHABET))()
    side, channels = {"fashion": (28, 1), "images-32": (32, 3), "images-224": (224, 3)}[data]
    return image_batch(rows, channels, side, side)()


def workload_costs(name: str, rows: int) -> Any:
    return trace_step(lambda: build(name), workload_batch(name, rows), loss=loss_module(name)())


def measured_step_s(name: str, rows: int, most_s: float = MOST_SECONDS) -> float:
    """Returns the seconds of the fastest step after two that warm up."""
    torch.manual_seed(0)
    model, batch, loss = build(name), workload_batch(name, rows), loss_module(name)()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return _fastest(step, most_s)


def _fastest(step: Callable[[], None], most_s: float) -> float:
    step()
    step()
    best, start = float("inf"), perf_counter()
    while best == float("inf") or perf_counter() - start < most_s:
        before = perf_counter()
        step()
        best = min(best, perf_counter() - before)
    return best
