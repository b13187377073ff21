"""GPT on A100s by vTrain: tensor, data and pipeline parallel runs of Megatron-DeepSpeed, predicted by the advisor's `estimate`."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from bench.foresight.mosaic import fit_values, spread_of, with_values
from bench.foresight.transformers import fused
from hotloop.advisor.estimate import Host, estimate
from hotloop.advisor.parallel_ways import Interconnect, Split
from hotloop.advisor.rates import Coefficients
from hotloop.core.records.step_costs import StepCosts

VOCABULARY = 51200
CHIP = "A100 SXM4 80GB"
NETWORK = Interconnect(gpus_per_node=8, node_bytes_per_s=100e9)
EVERY = 25
"""As for MPT."""


@dataclass(frozen=True)
class Row:
    gpus: int
    batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    sequence: int
    tensor: int
    data: int
    stages: int
    seconds: float

    @property
    def split(self) -> Split:
        return Split(self.tensor, self.data, self.stages, pieces=self.batch // self.data // self.micro_batch)


@cache
def rows(data: Path) -> tuple[Row, ...]:
    """Returns all runs whose GPUs are the product of the three ways."""
    found = []
    for name in ("ground_truth_single", "ground_truth_multi"):
        with (data / "vtrain" / f"{name}.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                values = list(row.values())
                if len(values) == 12:
                    values = values[1:]
                *sizes, milliseconds = values
                found.append(Row(*(int(value) for value in sizes), float(milliseconds) / 1e3))
    return tuple(found)


@cache
def costs_of(hidden: int, heads: int, layers: int, batch: int, sequence: int) -> StepCosts:
    """Returns the costs of a step; Megatron sums gradients in fp16."""
    costs = fused(hidden, layers, heads, VOCABULARY, batch, sequence, flash=False)
    return replace(costs, gradient_bytes=2 * costs.parameters)


NAMES = (
    *("tensor", "batched_product/tensor", "cast_bytes", "host_speed", "link_efficiency", "latency_s", "overlap"),
    *("node_efficiency", "update", "step_s"),
)
"""Fitted coefficients: of products on the chip, of batched products, of the bytes of other operators, the host's speed, of
links, an all-reduce's latency, the share of the backward pass that hides the sum of gradients, of the network between nodes,
of the update's bandwidth, and the host's seconds of a round."""

START = (0.7, 1.5, 1.5, 0.2, 0.5, 7e-5, 0.05, 0.5, 0.6, 3e-3)
BOUNDS = (
    (0.2, 0.05, 0.3, 0.05, 0.1, 1e-6, 0.001, 0.1, 0.1, 1e-6),
    (1.2, 5, 5, 20, 1, 1e-3, 1, 2, 4, 1e-2),
)


def predicted_s(row: Row, coefficients: Coefficients, values: dict[str, float]) -> float:
    """Returns the seconds of an iteration."""
    fitted = with_values(coefficients, values)
    fitted = replace(
        fitted,
        classes=fitted.classes | {"update": values["update"]},
        host=fitted.host | {"step_s": values["step_s"] * values["host_speed"]},
    )
    costs = costs_of(row.hidden, row.heads, row.layers, row.batch, row.sequence)
    found = estimate(
        costs,
        CHIP,
        "fp16",
        host=Host(speed=values["host_speed"]),
        split=row.split,
        network=NETWORK,
        coefficients=fitted,
    )
    return found.step_ms / 1e3


def fit(found: Sequence[Row], coefficients: Coefficients) -> dict[str, float]:
    return fit_values(NAMES, START, BOUNDS, found[::EVERY], lambda row, values: predicted_s(row, coefficients, values))


def judge(data: Path, coefficients: Coefficients) -> list[tuple[str, float, float, float]]:
    """Returns (name, predicted, measured, spread) of each run; each number of GPUs is left out of its own fit."""
    judged = []
    for gpus in sorted({row.gpus for row in rows(data)}):
        others = [row for row in rows(data) if row.gpus != gpus]
        values = fit(others, coefficients)
        spread = spread_of(np.log([predicted_s(row, coefficients, values) / row.seconds for row in others[::4]]))
        for row in rows(data):
            if row.gpus == gpus:
                name = f"{row.gpus} GPUs, {row.tensor}x{row.data}x{row.stages}, hidden {row.hidden}, {row.layers} layers, batch {row.micro_batch}"
                judged.append((name, predicted_s(row, coefficients, values), row.seconds, spread))
    return judged
