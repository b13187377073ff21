"""Fits factors of operator classes to measured kernels: NeuSight's tables of products and memory-bound operators."""

from __future__ import annotations

import csv
import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median, stdev

import numpy as np
from scipy.optimize import least_squares

from hotloop.advisor.chips import Chip, find_chip
from hotloop.advisor.rates import Coefficients, group, operator_time
from hotloop.core.records.step_costs import OperatorCost

STREAMS = {"add": 3, "mul": 3, "pow": 3, "div": 3}
"""Tensors read and written by elementwise operators with two inputs; others have 2."""

MIN_SPREAD = 0.06
"""Least standard deviation of a chip's logarithmic factor: torch versions and boards of a name differ by so much."""

SAMPLES = 40
"""Kernels per chip and table in a fit."""

EVENTS_S = 20e-6
"""Seconds that the events around a measured kernel add."""

START = Coefficients(
    shapes={"relative": [1.0, 1.0, 0.34], "inner": {"fp32": 43.0, "tensor": 90.0}, "power": 1.55, "wave": 20},
    classes={"vector": 0.5, "random": 0.75, "gather": 0.6, "reduction": 0.8, "update": 0.9, "linear/fp32": 1.0},
    kinds={},
    chips={},
    watts={"flop_per_j_2016": 43e9, "doubling_years": 5.0},
    host={},
    whole={},
)


def kernel_rows(data: Path, names: list[str]) -> list[dict[str, str]]:
    rows = []
    for name in names:
        with (data / "neusight" / f"{name}.csv").open(newline="") as file:
            rows += list(csv.DictReader(file))
    return rows


def product_operator(row: dict[str, str]) -> OperatorCost:
    batch, m, n, k = (int(float(row[name])) for name in ("B", "M", "N", "K"))
    kind = "linear" if row["OPName"] == "linear" else "batched_product"
    read, written = 4 * batch * (m * k + k * n), 4 * batch * m * n
    return OperatorCost(f"aten.{kind}", kind, "forward", 2 * batch * m * n * k, read, written, (batch, m, n, k))


def product_kernels(data: Path, excluded: set[str]) -> dict[str, list[tuple[OperatorCost, float]]]:
    """Returns a fixed sample of product kernels with their seconds by chip."""
    by_chip: dict[str, list] = defaultdict(list)
    for table in ("ops_test_linear", "ops_test_bmm"):
        groups = defaultdict(list)
        for row in kernel_rows(data, [table]):
            groups[find_chip(row["Device"]).name].append((product_operator(row), float(row["Latency"]) / 1e3))
        for chip, rows in groups.items():
            if chip not in excluded:
                by_chip[chip] += random.Random(0).sample(rows, min(SAMPLES, len(rows)))
    return dict(by_chip)


def memory_shares(data: Path) -> dict[str, dict[str, float]]:
    """Returns the share of published bandwidth by chip and class: the median of large kernels."""
    shares: dict[tuple[str, str], list[float]] = defaultdict(list)
    tables = {"memory": "elem", "normalization": "ln", "softmax": "softmax"}
    for kind, table in tables.items():
        for row in kernel_rows(data, [f"ops_train_{table}", f"ops_test_{table}", f"ops_amd_train_{table}"]):
            if row["OPName"].startswith("pow"):
                continue
            chip = find_chip(row["Device"])
            size = 4 * int(row["B"]) * int(row["H"]) * STREAMS.get(row["OPName"], 2)
            if size > 5e7:
                rate = size / (float(row["Latency"]) / 1e3)
                shares[chip.name, kind].append(rate / chip.bandwidth_bytes_per_s)
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for (chip, kind), values in shares.items():
        found[chip][kind] = median(values)
    return dict(found)


def fit_kernels(data: Path, excluded: set[str] = frozenset()) -> Coefficients:
    """Returns coefficients fitted to kernels of all chips but the excluded."""
    kernels = product_kernels(data, excluded)
    names = sorted(kernels)
    chips = {name: find_chip(name) for name in names}
    memory = {name: shares for name, shares in memory_shares(data).items() if name not in excluded}

    def with_rates(shape: np.ndarray, rates: dict[str, float]) -> Coefficients:
        small, inner, power, batched = np.exp(shape)
        return replace(
            START,
            shapes=START.shapes | {"relative": [1.0, 1.0, small], "inner": {"fp32": inner, "tensor": 2 * inner}, "power": 1 + power},
            classes=START.classes | {"batched_product/fp32": batched, "attention/fp32": batched},
            chips={
                name: {kind: (value, MIN_SPREAD) for kind, value in memory.get(name, {}).items()} | {"fp32": (rates[name], MIN_SPREAD)}
                for name in names
            },
        )  # fmt: skip

    rates = dict.fromkeys(names, 0.8)

    def ratios(shape: np.ndarray) -> dict[str, np.ndarray]:
        model = with_rates(shape, rates)
        return {
            name: np.array([
                (EVENTS_S + operator_time(operator, chips[name], "fp32", model).seconds) / seconds
                for operator, seconds in kernels[name]
            ])
            for name in names
        }  # fmt: skip

    def residuals(shape: np.ndarray) -> np.ndarray:
        """Logarithmic errors, each chip's median error removed: the chip's rate follows from it."""
        found = ratios(shape)
        return np.concatenate([np.log(values / np.median(values)) for values in found.values()])

    shape = np.log([0.34, 49, 1.04, 1.26])
    for _ in range(2):
        shape = least_squares(residuals, shape, loss="soft_l1", f_scale=0.15, max_nfev=6).x
        rates = {name: rates[name] * float(np.median(values)) for name, values in ratios(shape).items()}
    fitted = with_rates(shape, dict(rates.items()))
    others = {name: {kind: (value, MIN_SPREAD) for kind, value in shares.items()} for name, shares in memory.items()}
    fitted = replace(fitted, chips=others | fitted.chips)
    return replace(fitted, kinds=kinds_of(fitted))


def kinds_of(coefficients: Coefficients) -> dict[str, tuple[float, float]]:
    """Returns the factor of each group of chips, and of all chips, with the spread between its chips."""
    values: dict[str, list[float]] = defaultdict(list)
    for name, factors in coefficients.chips.items():
        chip = find_chip(name)
        for kind, (value, _) in factors.items():
            if kind == "fp32" and is_power_limited(chip, coefficients):
                continue
            values[f"any/{kind}"].append(value)
            values[f"{group(chip)}/{kind}"].append(value)
    kinds = {key: (float(np.exp(np.mean(np.log(found)))), spread_of(found)) for key, found in values.items()}
    # Chips with two fp32 units in each lane reach less of their fp32 peak: 50 of H100's 67 and 24 of RTX 3090's 36 TFLOP/s.
    return {"nvidia-wide/fp32": (0.76, 0.15), "amd/fp32": (0.6, 0.2), "any/fp32": (0.7, 0.25)} | kinds


def is_power_limited(chip: Chip, coefficients: Coefficients) -> bool:
    return coefficients._power_limit(chip) < 0.9


def spread_of(values: list[float]) -> float:
    """Returns the spread of a chip outside of a group: with few chips, at least 0.12."""
    return max(0.12, stdev(np.log(values))) if len(values) > 2 else 0.15


LONG_S = 3e-4
"""Seconds of a kernel from which the error doesn't depend on the duration."""


def short_spread(data: Path, coefficients: Coefficients, excluded: set[str] = frozenset()) -> tuple[float, float]:
    """Returns (scale, most): the spread that a kernel of t seconds has in addition is scale / sqrt(t), `most` at the most.

    Both follow from product kernels: the spread of short kernels within 90 % of whose errors lie, and that of the shortest.
    """
    found = [
        (operator_time(operator, find_chip(chip), "fp32", coefficients).seconds, seconds - EVENTS_S)
        for chip, kernels in product_kernels(data, excluded).items()
        for operator, seconds in kernels
    ]
    times = np.array([predicted_s for predicted_s, _ in found])
    errors = np.abs(np.log([predicted_s / max(seconds, 1e-6) for predicted_s, seconds in found]))
    base = float(np.quantile(errors[times >= LONG_S], 0.9)) / 1.645
    short = times < LONG_S
    scaled = np.sqrt(np.maximum((errors[short] / 1.645) ** 2 - base**2, 0)) * np.sqrt(times[short])
    shortest = np.sort(errors[np.argsort(times)[:12]])[-2] / 1.645
    return float(np.quantile(scaled, 0.9)), float(np.sqrt(max(shortest**2 - base**2, 0.0)))
