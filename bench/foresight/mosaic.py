"""MPT on A100s by llm-foundry: costs from the published sizes."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from bench.foresight.transformers import fused
from hotloop.advisor.chips import find_chip
from hotloop.advisor.coefficients import Coefficients
from hotloop.advisor.rates import operator_time
from hotloop.core.records.step_costs import StepCosts

SIZES = {
    "125m": (768, 12, 12), "350m": (1024, 24, 16), "760m": (1536, 24, 12), "1b": (2048, 24, 16), "3b": (2560, 32, 20),
    "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 48, 56), "70b": (8192, 80, 64),
}  # fmt: skip
"""Hidden size, layers and heads of the scripts in llm-foundry."""

VOCABULARY = 50368


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
    recomputes: bool
    costs: StepCosts


@cache
def rows(data: Path) -> tuple[Row, ...]:
    found = []
    with (data / "llm-foundry" / "mpt_training_throughput.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            hidden, layers, heads = SIZES[row["Model"]]
            sequence, micro = int(row["SeqLen (T)"]), int(row["MicroBatchSize"])
            recomputes = row["Activation Checkpointing"] == "True"
            costs = fused(hidden, layers, heads, VOCABULARY, micro, sequence, recomputes=recomputes)
            found.append(
                Row(
                    row["Model"], "A100 SXM4 " + row["GPU"][5:].upper(), int(row["# GPUs"]), sequence, micro, int(row["GradAccum"]),
                    int(row["GlobalBatchSize (T)"]) / float(row["Throughput (T/s)"]), recomputes, costs,
                )
            )  # fmt: skip
    return tuple(found)


NAMES = ("linear/tensor", "attention/tensor", "cast", "hidden", "within", "between")
"""Fitted factors: of products and attention kernels, of the bytes of other operators, the share of communication that isn't
hidden, and of the bandwidth within and between nodes."""

START = (0.75, 0.4, 1.3, 0.2, 0.5, 1.0)
BOUNDS = ((0.3, 0.1, 0.5, 0.01, 0.1, 0.2), (1.2, 2, 4, 0.9, 2, 4))

NODE_BYTES_PER_S = 200e9
"""1600 Gbit/s, as the table states."""


def features(found: Sequence[Row], coefficients: Coefficients) -> np.ndarray:
    """Returns a row per run: measured seconds, those of products, attention, others and update, bytes moved, GPUs, link bytes/s."""
    table = []
    for row in found:
        chip = find_chip(row.chip)
        parts = dict.fromkeys(("product", "attention", "other", "update"), 0.0)
        for one in row.costs.operators:
            kind = (
                one.kind
                if one.kind in ("attention", "update")
                else "product"
                if "product" in one.kind or one.kind == "linear"
                else "other"
            )
            parts[kind] += operator_time(one, chip, "bf16", coefficients).seconds
        moved = 3 * 2 * row.costs.parameters * (row.gpus - 1) / row.gpus
        parts["update"] /= row.gpus * row.accumulation
        table.append((row.seconds / row.accumulation, *parts.values(), moved, row.gpus, chip.link_bytes_per_s or 0))
    return np.array(table)


def predicted(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Returns seconds of a micro batch: the part of communication that arithmetic hides costs a share of itself."""
    linear, attention, cast, hidden, within, between = values
    _, product_s, attention_s, other_s, update_s, moved, gpus, link = table.T
    compute = product_s / linear + attention_s / attention + other_s * cast
    communication = moved / np.where(gpus > 8, between * NODE_BYTES_PER_S / 8, within * link)
    return compute + update_s + np.maximum(0, communication - compute) + hidden * np.minimum(communication, compute)


def fit(table: np.ndarray) -> np.ndarray:
    low, high = np.log(BOUNDS)

    def residuals(logs: np.ndarray) -> np.ndarray:
        return np.log(predicted(np.exp(logs), table) / table[:, 0])

    return np.exp(least_squares(residuals, np.log(START), bounds=(low, high), loss="soft_l1", f_scale=0.1).x)


def judge(data: Path, coefficients: Coefficients) -> list[tuple[str, float, float, float]]:
    """Returns (name, predicted, measured, spread) of each run; each model size is left out of its own fit."""
    found = rows(data)
    table = features(found, coefficients)
    models = np.array([row.model for row in found])
    judged = []
    for model in SIZES:
        others = models != model
        values = fit(table[others])
        spread = spread_of(np.log(predicted(values, table[others]) / table[others, 0]))
        for row, seconds in zip(np.array(found, dtype=object)[~others], predicted(values, table[~others]), strict=True):
            name = f"{row.model} {row.chip} {row.gpus} GPUs, sequence {row.sequence}"
            judged.append((name, float(seconds), row.seconds / row.accumulation, spread))
    return judged


def spread_of(errors: np.ndarray, least: float = 0.03) -> float:
    """Returns the standard deviation that gives a 90 % interval over these logarithmic errors, of runs of the fit itself."""
    return max(least, 1.15 * float(np.quantile(np.abs(errors), 0.9)) / 1.645)
