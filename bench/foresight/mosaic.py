"""MPT on A100s by llm-foundry, predicted by the advisor's own `estimate` with sharded parameters: costs from the published sizes."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from bench.foresight.transformers import fused
from hotloop.advisor.estimate import estimate
from hotloop.advisor.parallel_ways import Interconnect, Split
from hotloop.advisor.rates import Coefficients
from hotloop.core.records.step_costs import StepCosts

SIZES = {
    "125m": (768, 12, 12), "350m": (1024, 24, 16), "760m": (1536, 24, 12), "1b": (2048, 24, 16), "3b": (2560, 32, 20),
    "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 48, 56), "70b": (8192, 80, 64),
}  # fmt: skip
"""Hidden size, layers and heads of the scripts in llm-foundry."""

VOCABULARY = 50368

NETWORK = Interconnect(gpus_per_node=8, node_bytes_per_s=200e9)
"""1600 Gbit/s, as the table states."""


@dataclass(frozen=True)
class Row:
    """One measured run; `seconds` are those of a step of the global batch."""

    model: str
    chip: str
    gpus: int
    sequence: int
    micro_batch: int
    accumulation: int
    seconds: float
    costs: StepCosts


@cache
def rows(data: Path) -> tuple[Row, ...]:
    found = []
    with (data / "llm-foundry" / "mpt_training_throughput.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            hidden, layers, heads = SIZES[row["Model"]]
            sequence, micro = int(row["SeqLen (T)"]), int(row["MicroBatchSize"])
            gpus, accumulation = int(row["# GPUs"]), int(row["GradAccum"])
            recomputes = row["Activation Checkpointing"] == "True"
            batch = micro * accumulation * gpus
            costs = fused(hidden, layers, heads, VOCABULARY, batch, sequence, recomputes=recomputes)
            costs = replace(costs, parameter_bytes=2 * costs.parameters)  # llm-foundry gathers them in bf16
            found.append(
                Row(
                    row["Model"], "A100 SXM4 " + row["GPU"][5:].upper(), gpus, sequence, micro, accumulation,
                    int(row["GlobalBatchSize (T)"]) / float(row["Throughput (T/s)"]), costs,
                )
            )  # fmt: skip
    return tuple(found)


EVERY = 6
"""One of so many runs is fitted to: each evaluation calls the advisor once for each run."""

NAMES = ("tensor", "attention/tensor", "cast_bytes", "unhidden", "gather_share")
"""Fitted coefficients: of products on the chip, of attention kernels, of the bytes of other operators, the share of communication
that computation doesn't hide, and the share of an all-reduce's rate that gathers reach."""

START = (0.8, 0.4, 1.5, 0.3, 0.25)
BOUNDS = ((0.3, 0.1, 0.3, 0.01, 0.05), (1.2, 2, 4, 0.9, 1.2))


def with_values(coefficients: Coefficients, values: dict[str, float]) -> Coefficients:
    """Returns coefficients with fitted values in place of their own; `tensor` is that of all chips."""
    communication = {name: value for name, value in values.items() if name in coefficients.communication}
    return replace(
        coefficients,
        kinds=coefficients.kinds | {"any/tensor": (values["tensor"], 0.1)},
        classes=coefficients.classes | {name: value for name, value in values.items() if name.endswith("/tensor")},
        host=coefficients.host | {"cast_bytes": values["cast_bytes"]},
        communication=coefficients.communication | communication,
    )


def predicted_s(row: Row, coefficients: Coefficients) -> float:
    """Returns the seconds of a step of the global batch, as `hotloop advise` predicts sharded parameters."""
    split = Split(data=row.gpus, is_sharded=True, pieces=row.accumulation)
    found = estimate(row.costs, row.chip, "bf16", split=split, network=NETWORK, coefficients=coefficients)
    return found.step_ms / 1e3


def fit(found: Sequence[Row], coefficients: Coefficients) -> dict[str, float]:
    return fit_values(
        NAMES, START, BOUNDS, found[::EVERY], lambda row, values: predicted_s(row, with_values(coefficients, values))
    )


def fit_values(
    names: Sequence[str],
    start: Sequence[float],
    bounds: tuple[Sequence[float], Sequence[float]],
    found: Sequence[Any],
    predict: Callable[[Any, dict[str, float]], float],
) -> dict[str, float]:
    """Returns the values with the least relative errors over runs, each of which has `seconds`."""
    low, high = np.log(bounds)

    def named(logs: np.ndarray) -> dict[str, float]:
        return dict(zip(names, np.exp(logs).tolist(), strict=True))

    def residuals(logs: np.ndarray) -> np.ndarray:
        values = named(logs)
        return np.log([predict(row, values) / row.seconds for row in found])

    solved = least_squares(
        residuals, np.log(start), bounds=(low, high), loss="soft_l1", f_scale=0.1, diff_step=1e-3, ftol=1e-3, xtol=1e-3
    )
    return named(solved.x)


def judge(data: Path, coefficients: Coefficients) -> list[tuple[str, float, float, float]]:
    """Returns (name, predicted, measured, spread) of each run; each model size is left out of its own fit."""
    judged = []
    for model in SIZES:
        others = [row for row in rows(data) if row.model != model]
        fitted = with_values(coefficients, fit(others, coefficients))
        spread = spread_of(np.log([predicted_s(row, fitted) / row.seconds for row in others]))
        judged += [
            (
                f"{row.model} {row.chip} {row.gpus} GPUs, sequence {row.sequence}",
                predicted_s(row, fitted),
                row.seconds,
                spread,
            )
            for row in rows(data)
            if row.model == model
        ]
    return judged


def spread_of(errors: np.ndarray, least: float = 0.03) -> float:
    """Returns the standard deviation that gives a 90 % interval over these logarithmic errors, of runs of the fit itself."""
    return max(least, 1.15 * float(np.quantile(np.abs(errors), 0.9)) / 1.645)
