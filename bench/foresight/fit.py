"""Fits all coefficients of the package to the measurements of others and writes them."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
from scipy.optimize import nnls

from bench.foresight import gpu_claims, megatron, mosaic, neusight, torchvision_runs
from bench.foresight.kernels import fit_kernels, short_spread
from hotloop.advisor.chips import FACTS, find_chip
from hotloop.advisor.rates import Coefficients
from hotloop.core.records.step_costs import StepCosts

UNIT_KINDS = {f"any/{kind}": (1.0, 0.1) for kind in ("tensor", "memory", "normalization", "softmax", "fp32")}
"""Factors of 1, on which the fits of whole runs put their own."""

HOST = {
    "launch_s": 2.5e-6,
    "graph_launch": 0.4,
    "compiled_s": 6e-6,
    "forward_s": 1.5e-5,
    "backward_s": 1.2e-5,
    "update_s": 2e-5,
    "module_s": 1e-5,
    "step_s": 4e-4,
    "cpu_dispatch": 0.45,
    "fused_bytes": 0.45,
    "fused_launches": 0.4,
    "overlap_power": 3.0,
    "spread": 0.3,
}
"""The host's part. Launches, updates and steps after the record of an H200 in claims/2026-11-26_gpu-steps; the share of bytes and
launches that fusion leaves after claims/2026-11-26_speed-h200."""

COMMUNICATION = {
    "link_efficiency": 0.72, "latency_s": 4e-5, "hop_s": 4e-6, "pcie_efficiency": 0.6, "node_efficiency": 1.0,
    "node_latency_s": 5e-5, "overlap": 0.6, "unhidden": 0.4, "gather_share": 0.4,
}  # fmt: skip
"""Shares and seconds before any fit; `pcie_efficiency`, `node_latency_s` and `overlap` were set by hand."""

SOURCES = {
    "shapes, chips": "NeuSight's tables of kernels (sitar-lab/NeuSight, 2025-06, MIT): products, elementwise, normalization, softmax",
    "classes of convolutions, forward and backward": "pytorch-gpu-benchmark (ryujaehun, 2021, MIT): torchvision networks, fp32 and fp16",
    "tensor, attention, cast": "llm-foundry (mosaicml, 2025-07, Apache-2.0): MPT on A100",
    "communication": "vTrain (VIA-Research, 2024-09, MIT): all-reduce on A100, and runs of GPT",
    "whole": "NeuSight's training runs in fp32 (sitar-lab/NeuSight, 2025-06, MIT)",
    "host": "claims/2026-11-26_gpu-steps and claims/2026-11-26_speed-h200 of this project",
}


def unit_coefficients(fitted: Coefficients) -> Coefficients:
    """Returns coefficients whose chips and classes all reach their published rates, with the fitted shapes."""
    return replace(fitted, kinds=UNIT_KINDS, chips={}, watts={}, classes={"vector": 0.5})


def runs_coefficients(fitted: Coefficients) -> Coefficients:
    """Returns coefficients for fits of whole runs: shares of memory as measured, products at their published rate."""
    kinds = {**UNIT_KINDS, "any/memory": (0.82, 0.1), "any/normalization": (0.55, 0.1), "any/softmax": (0.6, 0.1)}
    classes = fitted.classes | {"linear/tensor": 1.0, "attention/tensor": 0.5, "batched_product/tensor": 1.0}
    return replace(
        fitted, kinds=kinds, chips={}, watts={}, classes=classes, whole={"eager": (1.0, 0.1), "compiled": (1.0, 0.1)},
        host=HOST | {"cast_bytes": 1.5, "half": 1.0}, communication=COMMUNICATION,
    )  # fmt: skip


def all_reduce(data: Path) -> dict[str, float]:
    """Returns share of the link's bandwidth, latency, and latency per GPU, by least relative squares on A100."""
    rows = []
    link = find_chip("A100 SXM4 80GB").link_bytes_per_s or 0.0
    for path in sorted((data / "vtrain" / "allreduce").glob("a100_*.csv")):
        gpus = int(path.name.split("_GPU")[1][0])
        with path.open(newline="") as file:
            for row in list(csv.reader(file))[1::16]:
                seconds = float(row[3]) * 1e-9
                rows.append((2 * float(row[0]) * (gpus - 1) / gpus / link / seconds, 1 / seconds, gpus / seconds))
    inverse, latency, hop = nnls(np.array(rows), np.ones(len(rows)))[0]
    return {"link_efficiency": 1 / inverse, "latency_s": latency, "hop_s": hop}


def fit_all(data: Path, costs: dict[str, StepCosts]) -> Coefficients:
    fitted = fit_kernels(data)
    fitted = replace(fitted, shapes=fitted.shapes | {"short_spread": short_spread(data, fitted)})
    fitted = neusight.with_inference(fitted, data, lambda run: True)
    mpt = mosaic.fit(mosaic.rows(data), runs_coefficients(fitted))
    trained = megatron.fit(megatron.rows(data), runs_coefficients(fitted))
    found = [row for row in torchvision_runs.rows(data) if row.network in costs]
    table = torchvision_runs.features(found, costs, unit_coefficients(fitted))
    pictures, _ = torchvision_runs.fit(table)
    nvidia = fitted.kinds["nvidia/fp32"][0]
    tensor = mpt["tensor"]
    classes = dict(fitted.classes)
    for form in torchvision_runs.FORMS:
        classes[f"{form}/fp32"] = pictures[f"{form}/fp32"] / nvidia
        classes[f"{form}/tensor"] = pictures[f"{form}/tensor"] / (0.9 * tensor)
    classes |= {
        "conversion": pictures["conversion"],
        "attention/tensor": mpt["attention/tensor"],
        "batched_product/tensor": min(1.3, trained["batched_product/tensor"]),
        "linear/tensor": 1.0,
    }
    a100s = dict.fromkeys(("A100 SXM4 80GB", "A100 SXM4 40GB"), (tensor, 0.08))
    chips = {name: dict(factors) for name, factors in fitted.chips.items()}
    for name, factor in a100s.items():
        chips[name] = chips.get(name, {}) | {"tensor": factor}
    kinds = fitted.kinds | {
        "nvidia/tensor": (0.9 * tensor, 0.2), "nvidia-wide/tensor": (0.8 * tensor, 0.25), "amd/tensor": (0.55, 0.3),
        "any/tensor": (0.6, 0.3), "cpu/fp32": (0.6, 0.3), "cpu/memory": (0.6, 0.3), "cpu/tensor": (0.4, 0.4),
        "integrated/fp32": (0.7, 0.25), "integrated/memory": (0.75, 0.2), "measured/fp32": (0.9, 0.15),
        "measured/memory": (0.8, 0.2), "measured/normalization": (0.6, 0.25), "measured/softmax": (0.6, 0.25),
    }  # fmt: skip
    host = HOST | {
        "cast_bytes": mpt["cast_bytes"], "half": pictures["half"],
    }  # fmt: skip
    communication = COMMUNICATION | all_reduce(data) | {name: mpt[name] for name in ("unhidden", "gather_share")}
    fitted = replace(
        fitted, classes=classes, chips=chips, kinds=kinds, host=host, communication=communication, sources=SOURCES
    )
    ratios = [
        run.seconds / neusight.device_seconds(run.costs, run.chip, "fp32", fitted)
        for run in neusight.runs(data)
        if run.mode == "train"
    ]
    spread = max(0.1, 1.15 * float(np.quantile(np.abs(np.log(ratios) - np.log(median(ratios))), 0.9)) / 1.645)
    fitted = replace(fitted, whole={"eager": (median(ratios), spread), "compiled": (1.0, 0.15)})
    return gpu_claims.fit_host(gpu_claims.rows(), fitted)


def rounded(value):
    """Returns the value with four digits in each number."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float | np.floating) else value


def write(coefficients: Coefficients) -> Path:
    path = FACTS / "coefficients.json"
    path.write_text(json.dumps(rounded(coefficients.to_dict()), indent=1) + "\n", encoding="utf-8")
    return path
