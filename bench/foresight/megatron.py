"""GPT on A100s by vTrain: tensor, data and pipeline parallel runs of Megatron-DeepSpeed."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from bench.foresight.mosaic import spread_of
from bench.foresight.transformers import fused
from hotloop.advisor.chips import find_chip
from hotloop.advisor.coefficients import Coefficients
from hotloop.advisor.rates import operator_time

VOCABULARY = 51200


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


CHIP = find_chip("A100 SXM4 80GB")

NAMES = (
    "linear/tensor",
    "batched_product/tensor",
    "cast",
    "launch_s",
    "link",
    "all_reduce_s",
    "gradients",
    "node",
    "constant_ms",
    "update",
)
"""Fitted factors: products, bytes of other operators, seconds of the host per kernel, share of the link's bandwidth, seconds
of the host per all-reduce, bytes of gradients over 2 per parameter, share of 100 GB/s between nodes, and the update's bytes."""

START = (0.6, 0.5, 1.5, 1e-5, 0.6, 4e-5, 1, 1, 5, 1)
BOUNDS = ((0.2, 0.05, 0.5, 1e-6, 0.1, 1e-6, 0.5, 0.5, 0.1, 0.2), (1.2, 2, 5, 1e-4, 1, 1e-3, 2, 2, 60, 10))


def features(found: Sequence[Row], coefficients: Coefficients) -> dict[str, np.ndarray]:
    """Returns arrays over the runs: seconds of products, batched products and others, and launches, of a layer and of the head."""

    @cache
    def times(hidden: int, heads: int, batch: int, sequence: int, shards: int) -> tuple[np.ndarray, np.ndarray]:
        def of(layers: int) -> np.ndarray:
            sums = np.zeros(4)
            for one in fused(hidden, layers, heads, VOCABULARY, batch, sequence, shards=shards, flash=False).operators:
                if one.phase != "update":
                    is_product = one.kind in ("linear", "batched_product")
                    index = (0 if one.shape[0] == 1 else 1) if is_product else 2
                    sums[index] += operator_time(one, CHIP, "bf16", coefficients).seconds
                    sums[3] += one.count * one.launches
            return sums

        one, two = of(1), of(2)
        return two - one, 2 * one - two

    both = [times(row.hidden, row.heads, row.micro_batch, row.sequence, row.tensor) for row in found]
    columns = {name: np.array([getattr(row, name) for row in found], float) for name in Row.__annotations__}
    return columns | {"layer": np.array([layer for layer, _ in both]), "head": np.array([head for _, head in both])}


def predicted(values: np.ndarray, table: dict[str, np.ndarray]) -> np.ndarray:
    """Returns seconds of an iteration: stages of layers with their all-reduces, the bubble, gradients and the update."""
    linear, batched, cast, launch_s, link, all_reduce_s, gradients, node, constant_ms, update = values

    def seconds(parts: np.ndarray) -> np.ndarray:
        device = parts[:, 0] / linear + parts[:, 1] / batched + parts[:, 2] * cast
        return (device**3 + (parts[:, 3] * launch_s) ** 3) ** (1 / 3)

    t, stages, copies = table["tensor"], table["stages"], table["data"]
    size = 2 * table["micro_batch"] * table["sequence"] * table["hidden"]
    bandwidth = CHIP.link_bytes_per_s * link
    between = np.where(t > 8, 2 * size / (node * 100e9), 0)
    reduce = np.where(t > 1, 2 * (t - 1) / t * size / bandwidth + all_reduce_s * (1 + t / 8) + between, 0)
    send = np.where(stages > 1, 2 * size / bandwidth + 2 * all_reduce_s, 0)
    stage = table["layers"] / stages * (seconds(table["layer"]) + 4 * reduce) + send
    pieces = table["batch"] / copies / table["micro_batch"]
    own = (12 * table["layers"] * table["hidden"] ** 2 + VOCABULARY * table["hidden"]) / t / stages
    outer = np.where(table["gpus"] > 8, node * 100e9 / 8, bandwidth)
    sums = np.where(copies > 1, 2 * (copies - 1) / copies * own * 2 * gradients / outer, 0)
    return (
        (pieces + stages - 1) * stage
        + pieces * seconds(table["head"])
        + sums
        + own * update * 26e-12
        + constant_ms * 1e-3
    )


def fit(table: dict[str, np.ndarray]) -> np.ndarray:
    low, high = np.log(BOUNDS)

    def residuals(logs: np.ndarray) -> np.ndarray:
        return np.log(predicted(np.exp(logs), table) / table["seconds"])

    return np.exp(least_squares(residuals, np.log(START), bounds=(low, high), loss="soft_l1", f_scale=0.1).x)


def judge(data: Path, coefficients: Coefficients) -> list[tuple[str, float, float, float]]:
    """Returns (name, predicted, measured, spread) of each run; each number of GPUs is left out of its own fit."""
    found = np.array(rows(data), dtype=object)
    table = features(found, coefficients)
    judged = []
    for gpus in sorted(set(table["gpus"])):
        inside = table["gpus"] == gpus
        fitted = {name: values[~inside] for name, values in table.items()}
        values = fit(fitted)
        spread = spread_of(np.log(predicted(values, fitted) / fitted["seconds"]))
        seconds = predicted(values, {name: column[inside] for name, column in table.items()})
        for row, one in zip(found[inside], seconds, strict=True):
            name = f"{row.gpus} GPUs, {row.tensor}x{row.data}x{row.stages}, hidden {row.hidden}, {row.layers} layers, batch {row.micro_batch}"
            judged.append((name, float(one), row.seconds, spread))
    return judged
