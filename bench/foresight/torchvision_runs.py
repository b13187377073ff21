"""Training of torchvision networks, fp32 and fp16, on older NVIDIA chips; each chip is left out of its own fit."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from scipy.optimize import least_squares

from hotloop.advisor.chips import Chip, find_chip
from hotloop.advisor.rates import PRODUCTS, Coefficients, conv_form, operator_time, product_class
from hotloop.core.records.step_costs import StepCosts

FORMS = ("point", "winograd", "direct", "grouped")

PRIORS = {
    "point/fp32": (0.75, 0.3), "winograd/fp32": (1.5, 0.3), "direct/fp32": (0.6, 0.3), "grouped/fp32": (0.5, 0.3),
    "point/tensor": (0.4, 0.4), "winograd/tensor": (0.5, 0.4), "direct/tensor": (0.3, 0.4), "grouped/tensor": (0.5, 0.3),
    "linear/fp32": (0.8, 0.2), "linear/tensor": (0.5, 0.3), "normalization": (0.5, 0.3), "memory": (0.7, 0.06),
    "half": (0.8, 0.4), "conversion": (0.5, 1.0), "forward_s": (5e-5, 0.7), "backward_s": (3e-5, 0.7), "power": (3.0, 0.3),
}  # fmt: skip
"""Factors, and the standard deviation of their logarithm before any run was seen: rates of convolutions and linear layers, share
of bandwidth of normalization and others, the rate of fp16 on chips that compute it as fp32, bytes of a change of layout for
tensor cores, the host's seconds per kernel, and how host and device add."""

NAMES = tuple(PRIORS)

RUN_SPREAD = 0.12
CHIP_SPREAD = 0.2
"""Standard deviations of the logarithms of runs, and of machines with the same chip."""


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


@dataclass(frozen=True)
class Table:
    """Arrays over the runs.

    Attributes:
        seconds: measured.
        convolutions: seconds at the published rate by form, then of linear layers, normalization, others, and the bytes
            of convolutions.
        launches: kernels of forward and backward.
        is_tensor, is_half: fp16 on tensor cores; fp16 computed as fp32.
        chips, precisions: names.
    """

    seconds: np.ndarray
    device: np.ndarray
    launches: np.ndarray
    is_tensor: np.ndarray
    is_half: np.ndarray
    chips: np.ndarray
    precisions: np.ndarray

    def only(self, inside: np.ndarray) -> Table:
        return Table(*(values[inside] for values in vars(self).values()))


def features(found: Sequence[Row], costs: dict[str, StepCosts], coefficients: Coefficients) -> Table:
    """Returns the runs' seconds at the published rates of `coefficients`, whose factors are 1."""
    device, launches = [], []
    columns = (*FORMS, "linear", "normalization", "memory", "bytes")
    for row in found:
        sums, issued = dict.fromkeys(columns, 0.0), dict.fromkeys(("forward", "backward"), 0)
        width = 0.5 if row.precision == "fp16" else 1.0
        for one in costs[row.network].operators:
            if one.phase == "update":
                continue
            issued[one.phase] += one.launches * one.count
            seconds = operator_time(one, row.chip, row.precision, coefficients, width).seconds
            if one.kind == "convolution":
                sums[conv_form(one)] += seconds
                sums["bytes"] += one.bytes * one.count * width / row.chip.bandwidth_bytes_per_s
            elif one.kind in PRODUCTS:
                sums["linear"] += seconds
            else:
                sums["normalization" if one.kind == "normalization" else "memory"] += seconds
        device.append(list(sums.values()))
        launches.append(list(issued.values()))
    is_tensor = np.array([product_class(row.chip, row.precision) == "tensor" for row in found])
    precisions = np.array([row.precision for row in found])
    return Table(
        np.array([row.seconds for row in found]), np.array(device), np.array(launches, float), is_tensor,
        (precisions == "fp16") & ~is_tensor, np.array([row.chip.name for row in found]), precisions,
    )  # fmt: skip


def predicted(values: dict[str, float], table: Table) -> np.ndarray:
    """Returns the seconds of each run."""
    rates = [np.where(table.is_tensor, values[f"{name}/tensor"], values[f"{name}/fp32"]) for name in (*FORMS, "linear")]
    shares = [np.full(len(table.seconds), values[name]) for name in ("normalization", "memory")]
    device = (table.device[:, :7] / np.array([*rates, *shares]).T).sum(axis=1)
    device += table.device[:, 7] * table.is_tensor * values["conversion"]
    device /= np.where(table.is_half, values["half"], 1)
    host = table.launches @ np.array([values["forward_s"], values["backward_s"]])
    return (device ** values["power"] + host ** values["power"]) ** (1 / values["power"])


def fit(table: Table) -> tuple[dict[str, float], float]:
    """Returns the factors, and the spread of a run on a chip that the fit hasn't seen.

    Each machine has an offset of its own for each precision, which a new machine doesn't share.
    """
    machines = sorted(set(zip(table.chips, table.precisions, strict=True)))
    names = sorted(set(table.chips))
    chip = np.array([names.index(name) for name in table.chips])
    is_fp16 = table.precisions == "fp16"
    start = np.log([value for value, _ in PRIORS.values()])
    spreads = np.array([spread for _, spread in PRIORS.values()])
    count = len(names)

    def factors(logs: np.ndarray) -> dict[str, float]:
        return dict(zip(NAMES, np.exp(logs[: len(NAMES)]).tolist(), strict=True))

    def errors(logs: np.ndarray) -> np.ndarray:
        offsets = logs[len(NAMES) :]
        return (
            np.log(predicted(factors(logs), table) / table.seconds)
            + offsets[:count][chip]
            + offsets[count:][chip] * is_fp16
        )

    def residuals(logs: np.ndarray) -> np.ndarray:
        prior = (logs[: len(NAMES)] - start) / spreads
        return np.concatenate([errors(logs) / RUN_SPREAD, prior, logs[len(NAMES) :] / CHIP_SPREAD])

    found = least_squares(residuals, np.r_[start, np.zeros(2 * count)], loss="soft_l1").x
    offsets = found[len(NAMES) :]
    by_machine = [
        offsets[names.index(name)] + offsets[count + names.index(name)] * (kind == "fp16") for name, kind in machines
    ]
    return factors(found), float(np.hypot(1.2 * np.std(by_machine), np.std(errors(found))))


def judge(data: Path, coefficients: Coefficients, costs: dict[str, StepCosts]) -> list[tuple[str, float, float, float]]:
    """Returns (name, predicted, measured, spread) of each run; each chip is left out of its own fit."""
    found = [row for row in rows(data) if row.network in costs]
    table = features(found, costs, coefficients)
    judged = []
    for chip in sorted(set(table.chips)):
        inside = table.chips == chip
        values, spread = fit(table.only(~inside))
        seconds = predicted(values, table.only(inside))
        for row, one in zip([row for row in found if row.chip.name == chip], seconds, strict=True):
            judged.append((f"{chip} {row.network} {row.precision}", float(one), row.seconds, spread))
    return judged
