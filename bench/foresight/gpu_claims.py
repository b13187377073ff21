"""Steps of small networks on GPUs of the claims: those of a loop as tutorials write it, and those of hotloop's graphs.

The host's seconds are fitted to the other networks of the record; each network is left out of its own fit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np

from bench.claim import CLAIMS
from bench.speed.workloads import WORKLOADS
from hotloop.advisor.chips import find_chip
from hotloop.advisor.estimate import estimate
from hotloop.advisor.rates import Coefficients
from hotloop.core.records.step_costs import StepCosts

HOST_NAMES = ("forward_s", "backward_s", "update_s", "module_s", "step_s", "compiled_s")
DEVICE_NAMES = ("launch_s",)


@dataclass(frozen=True)
class Row:
    workload: str
    chip: str
    peer: str
    plan: str
    seconds: float


def rows(claims: Path = CLAIMS, *, on_gpu: bool = True) -> list[Row]:
    """Returns a row per workload and peer of each record of a GPU, or of a CPU: the median of its windows."""
    found = []
    for path in sorted(claims.glob("*speed-*/record.json")):
        record = json.loads(path.read_text())
        chips = record["machine"]["accelerators"]
        if bool(chips) != on_gpu:
            continue
        chips = chips or [f"{record['machine']['processor']['model']} {path.parent.name}"]
        for session in record["rows"]:
            for peer, lane in session.get("lanes", {}).items():
                if peer in ("tutorial", "hotloop") and lane["windows"]:
                    seconds = median(took / steps for steps, took in lane["windows"])
                    found.append(Row(session["workload"], chips[0], peer, lane["plan"] or "", seconds))
    return found


@cache
def costs_of(workload: str) -> StepCosts:
    from bench.foresight.cpu import workload_batch
    from bench.speed.models import build, loss_module
    from hotloop.profiler.step_costs.trace import trace_step

    batch = workload_batch(workload, WORKLOADS[workload].batch)
    return trace_step(lambda: build(workload), batch, loss=loss_module(workload)(), device="cuda")


def predicted(row: Row, coefficients: Coefficients) -> tuple[float, float, float]:
    """Returns median and interval in seconds."""
    plan = " ".join(
        word for word in row.plan.split() if word.split("=")[0] in ("compile", "graphs", "precision", "residency")
    )
    costs = costs_of(row.workload)
    # torch's defaults compute convolutions in tf32 and other products in fp32; hotloop's plans of the record compute in fp32.
    is_tf32 = row.peer == "tutorial" and any(operator.kind == "convolution" for operator in costs.operators)
    precision = "tf32" if is_tf32 else "fp32"
    result = estimate(costs, find_chip(row.chip), precision, plan or "baseline", coefficients=coefficients)
    return result.step_ms / 1e3, result.low_ms / 1e3, result.high_ms / 1e3


def scaled(coefficients: Coefficients, names: tuple[str, ...], factor: float) -> Coefficients:
    host = coefficients.host | {name: coefficients.host[name] * factor for name in names}
    return replace(coefficients, host=host)


def fit_host(
    found: list[Row], coefficients: Coefficients, chosen: Callable[[Row], bool] = lambda row: True
) -> Coefficients:
    """Returns coefficients whose host is slower or faster by one factor, and whose kernels start later or earlier by another."""
    for peer, names in (("tutorial", HOST_NAMES), ("hotloop", DEVICE_NAMES)):
        fitted = [row for row in found if row.peer == peer and chosen(row)]
        if not fitted:
            continue
        grid = np.exp(np.linspace(-1.6, 1.6, 33))
        errors = [
            np.mean(
                [abs(np.log(predicted(row, scaled(coefficients, names, factor))[0] / row.seconds)) for row in fitted]
            )
            for factor in grid
        ]
        coefficients = scaled(coefficients, names, float(grid[int(np.argmin(errors))]))
    return coefficients


def judge(coefficients: Coefficients) -> list[tuple[str, float, float, float, float]]:
    """Returns (name, predicted, low, high, measured) of each row; each workload is left out of its own fit."""
    found = rows()
    judged = []
    for workload in sorted({row.workload for row in found}):
        fitted = fit_host(found, coefficients, lambda row, left=workload: row.workload != left)
        judged += [
            (f"{row.chip} {workload} {row.peer}", *predicted(row, fitted), row.seconds)
            for row in found
            if row.workload == workload
        ]
    return judged


def judge_pays(coefficients: Coefficients) -> list[tuple[str, float, float, float, float]]:
    """Returns (name, predicted, low, high, measured) of CPU time over GPU time, for each CPU record of the same workload and peer.

    The CPU's time is measured, as `hotloop advise` does on the machine at hand; the GPU's time is predicted by `judge`.
    """
    gpu_rows = sorted(rows(), key=lambda row: row.workload)  # the order of judge
    gpu = {(row.workload, row.peer): one for row, one in zip(gpu_rows, judge(coefficients), strict=True)}
    judged = []
    for row in rows(on_gpu=False):
        if (row.workload, row.peer) in gpu:
            _, predicted_s, low_s, high_s, measured_s = gpu[row.workload, row.peer]
            ratios = (row.seconds / one for one in (predicted_s, high_s, low_s, measured_s))
            judged.append((f"{row.chip} {row.workload} {row.peer}", *ratios))
    return judged
