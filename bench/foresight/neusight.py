"""NeuSight's training and inference runs in fp32: predicted for a chip of which no training run was used."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np

from bench.foresight.kernels import MIN_SPREAD, kinds_of
from bench.foresight.mosaic import spread_of
from bench.foresight.transformers import hugging_face
from hotloop.advisor.chips import Chip, find_chip
from hotloop.advisor.rates import PRODUCTS, Coefficients, operator_time
from hotloop.core.records.step_costs import StepCosts


@dataclass(frozen=True)
class Run:
    chip: Chip
    model: str
    mode: str
    batch: int
    variant: str
    seconds: float
    costs: StepCosts

    @property
    def name(self) -> str:
        return f"{self.chip.name} {self.model} {self.batch} {self.variant}".strip()


@cache
def runs(data: Path) -> tuple[Run, ...]:
    """Returns all runs but those with operators fused by hand."""
    found = []
    with (data / "neusight" / "labels_end_to_end.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["variant"] == "fusion":
                continue
            config = json.loads((data / "neusight" / "model_configs" / f"{row['model']}.json").read_text())
            batch = int(row["batch"])
            share = batch // 4 if row["variant"] == "dp4" else batch
            shards = 4 if row["variant"] == "tp4" else 1
            costs = hugging_face(config, share, int(row["seq"]), training=row["mode"] == "train", shards=shards)
            found.append(
                Run(
                    find_chip(row["device"]),
                    row["model"],
                    row["mode"],
                    batch,
                    row["variant"],
                    float(row["e2e_ms"]) / 1e3,
                    costs,
                )
            )
    return tuple(found)


def device_seconds(costs: StepCosts, chip: Chip, precision: str, coefficients: Coefficients) -> float:
    launches = coefficients.host.get("launch_s", 4e-6)
    return sum(
        operator_time(one, chip, precision, coefficients).seconds + one.count * one.launches * launches
        for one in costs.operators
    )


def with_inference(coefficients: Coefficients, data: Path, wanted: Callable[[Run], bool]) -> Coefficients:
    """Adds the products' factor of chips without product kernels, from their inference runs."""
    shares: dict[str, list[float]] = {}
    for run in runs(data):
        if run.mode != "inf" or not wanted(run) or "fp32" in coefficients.chips.get(run.chip.name, {}):
            continue
        flops_s = sum(one.flops * one.count for one in run.costs.operators if one.kind in PRODUCTS) / run.chip.peak(
            "fp32"
        )
        others = [one for one in run.costs.operators if one.kind not in PRODUCTS]
        rest = sum(operator_time(one, run.chip, "fp32", coefficients).seconds for one in others)
        shares.setdefault(run.chip.name, []).append(flops_s / (run.seconds - rest))
    chips = dict(coefficients.chips)
    for name, values in shares.items():
        chips[name] = chips.get(name, {}) | {"fp32": (median(values), MIN_SPREAD)}
    fitted = replace(coefficients, chips=chips)
    return replace(fitted, kinds=coefficients.kinds | kinds_of(fitted))


def judge(
    data: Path, kernels: Callable[[str], Coefficients], *, sees_kernels: bool
) -> list[tuple[str, float, float, float]]:
    """Returns (name, predicted, measured, spread) of each training run; no run of its chip was used.

    Args:
        data: folder of the measurements.
        kernels: returns coefficients fitted to the kernels of all chips but the named one.
        sees_kernels: whether the kernels of the chip itself were used.
    """
    training = [run for run in runs(data) if run.mode == "train"]
    judged = []
    for name in sorted({run.chip.name for run in training}):
        fitted = with_inference(
            kernels("" if sees_kernels else name), data, lambda run, left=name: run.chip.name != left
        )
        others = [run for run in training if run.chip.name != name]
        ratios = np.array([run.seconds / device_seconds(run.costs, run.chip, "fp32", fitted) for run in others])
        whole = float(np.median(ratios))
        spread = spread_of(np.log(ratios / whole))
        for run in training:
            if run.chip.name == name:
                chip_spread = fitted.factor(run.chip, "fp32").spread
                predicted = whole * device_seconds(run.costs, run.chip, "fp32", fitted)
                judged.append((run.name, predicted, run.seconds, float(np.hypot(spread, chip_spread))))
    return judged
