"""Training of torchvision networks, fp32 and fp16, on older NVIDIA chips; each chip is left out of its own fit."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from scipy.optimize import least_squares

from bench.foresight.mosaic import spread_of
from hotloop.advisor.chips import Chip, find_chip
from hotloop.advisor.coefficients import Coefficients
from hotloop.advisor.rates import PRODUCTS, conv_form, operator_time, product_class
from hotloop.core.records.step_costs import StepCosts

FORMS = ("point", "winograd", "direct", "grouped")

NAMES = (*(f"{form}/{kind}" for kind in ("fp32", "tensor") for form in FORMS), "linear/fp32", "linear/tensor", "normalization", "memory",
         "forward_s", "backward_s", "half")  # fmt: skip
"""Fitted factors: rates of convolutions and linear layers, share of bandwidth of batch normalization and others, the host's
seconds per operator, and the rate of fp16 on chips that compute it as fp32."""

START = (*[0.8] * 4, *[0.4] * 4, 0.8, 0.4, 0.6, 0.8, 1e-5, 1e-5, 0.8)
LOW = (*[0.1] * 8, 0.3, 0.1, 0.2, 0.3, 1e-6, 1e-6, 0.3)
HIGH = (*[3.0] * 8, 1.2, 1.2, 1.5, 1.5, 2e-4, 2e-4, 1.5)


@dataclass(frozen=True)
class Row:
    chip: Chip
    network: str
    precision: str
    seconds: float


def rows(data: Path) -> list[Row]:
    """Returns the runs on one GPU; the median of the runs of a chip, network and precision."""
    found = defaultdict(list)
    with (data / "pytorch-gpu-benchmark" / "train_ms_per_batch_median.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            name = row["file(gpu_ngpus_precision)"].rpartition("/")[2]
            match = re.match(r"(.*?)_(?:1_gpus__)?(float|single|half)_model", name)
            if match and "gpus" not in match[1]:
                precision = "fp16" if match[2] == "half" else "fp32"
                found[match[1], row["model"], precision].append(float(row["median_ms"]) / 1e3)
    return [
        Row(find_chip(chip), network, precision, median(times)) for (chip, network, precision), times in found.items()
    ]


def features(found: list[Row], costs: dict[str, StepCosts], coefficients: Coefficients) -> np.ndarray:
    """Returns a row per run: seconds at the factors of all chips by class, and operators of forward and backward."""
    table = []
    for row in found:
        sums = dict.fromkeys(NAMES, 0.0)
        width = 0.5 if row.precision == "fp16" else 1.0
        kind = product_class(row.chip, row.precision)
        for one in costs[row.network].operators:
            if one.phase == "update":
                continue
            sums[f"{one.phase}_s"] += one.count
            seconds = operator_time(one, row.chip, row.precision, coefficients, width).seconds
            if one.kind == "convolution":
                sums[f"{conv_form(one)}/{kind}"] += seconds
            elif one.kind in PRODUCTS:
                sums[f"linear/{kind}"] += seconds
            else:
                sums["normalization" if one.kind == "normalization" else "memory"] += seconds
        sums["half"] = float(row.precision == "fp16" and kind == "fp32")
        table.append((row.seconds, *sums.values()))
    return np.array(table)


def predicted(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    device = table[:, 1:13] @ (1 / values[:12]) / np.where(table[:, 15] > 0, values[14], 1)
    host = table[:, 13:15] @ values[12:14]
    return (device**3 + host**3) ** (1 / 3)


def fit(table: np.ndarray) -> np.ndarray:
    def residuals(logs: np.ndarray) -> np.ndarray:
        return np.concatenate([np.log(predicted(np.exp(logs), table) / table[:, 0]), 0.3 * (logs - np.log(START))[:12]])

    return np.exp(
        least_squares(residuals, np.log(START), bounds=(np.log(LOW), np.log(HIGH)), loss="soft_l1", f_scale=0.2).x
    )


def judge(data: Path, coefficients: Coefficients, costs: dict[str, StepCosts]) -> list[tuple[str, float, float, float]]:
    """Returns (name, predicted, measured, spread) of each run; each chip is left out of its own fit."""
    found = [row for row in rows(data) if row.network in costs]
    table = features(found, costs, coefficients)
    names = np.array([row.chip.name for row in found])
    judged = []
    for chip in sorted(set(names)):
        inside = names == chip
        values = fit(table[~inside])
        spread = spread_of(np.log(predicted(values, table[~inside]) / table[~inside, 0]))
        for row, seconds in zip(
            [row for row in found if row.chip.name == chip], predicted(values, table[inside]), strict=True
        ):
            judged.append((f"{chip} {row.network} {row.precision}", float(seconds), row.seconds, spread))
    return judged
