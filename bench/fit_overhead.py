"""How much longer `fit` takes than a bare loop that does the same steps. Takes about two minutes.

    OMP_NUM_THREADS=1 python -m bench.fit_overhead
    OMP_NUM_THREADS=1 python -m bench.fit_overhead --json

Both train the same network, whose step takes about a millisecond, on the same arrays in memory: a new order each epoch,
batches by `index_select`, Adam, the loss summed on the device. The bare loop does that and nothing else. `fit` also
reseeds all generators at each step, looks up every tenth of a second, writes journal, metrics and checkpoints: all from
its start until it has stopped counts, the last checkpoint too.

They run in turn in one process, A B B A and so on; the figure is the median of the ratios of neighbours, with its
bootstrap interval. Only a machine that does nothing else gives a figure worth having.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats
import torch
from torch import nn

import hotloop
from bench.claim import write_claim
from hotloop.plan import BASELINE

SAMPLES, FEATURES, CLASSES, BATCH, WIDTH = 32_768, 64, 10, 128, 256
LIMIT = 1.03


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
    )


def arrays() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(0))
    return x, (x[:, :CLASSES]).argmax(1)


def bare_s(x: torch.Tensor, y: torch.Tensor, epochs: int) -> float:
    """Seconds of the bare loop."""
    torch.manual_seed(0)
    model, loss_of = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    started = time.perf_counter()
    for _ in range(epochs):
        order = torch.randperm(len(x))
        total = torch.zeros((), dtype=torch.float64)
        for first in range(0, len(x), BATCH):
            index = order[first : first + BATCH]
            inputs, target = x.index_select(0, index), y.index_select(0, index)
            optimizer.zero_grad()
            loss = loss_of(model(inputs), target)
            loss.backward()
            optimizer.step()
            total.add_(loss.detach(), alpha=len(index))
        total.item()
    return time.perf_counter() - started


def fit_s(x: torch.Tensor, y: torch.Tensor, epochs: int) -> float:
    """Seconds of `fit`, from its start until it has stopped."""
    heard: dict[str, float] = {}
    task = hotloop.Task(
        model=network,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        data=(x, y),
        batch_size=BATCH,
        epochs=epochs,
        callbacks=[lambda view: heard.setdefault(view.event, time.perf_counter())],
    )
    with tempfile.TemporaryDirectory() as folder:
        hotloop.fit(task, run=Path(folder) / "run", device="cpu", progress=False)
    return heard["stop"] - heard["start"]


def measure(pairs: int, epochs: int) -> list[dict[str, float]]:
    """Seconds of each, side by side; which goes first alternates."""
    x, y = arrays()
    sides: dict[str, Callable[..., float]] = {"bare": bare_s, "fit": fit_s}
    for run in sides.values():
        run(x, y, 1)  # imports, allocations and caches belong to neither
    rows = []
    for number in range(pairs):
        names = list(sides) if number % 2 == 0 else list(reversed(sides))
        rows.append({name: sides[name](x, y, epochs) for name in names})
        print(f"{number + 1}/{pairs}: {rows[-1]['fit'] / rows[-1]['bare']:.4f}", file=sys.stderr, flush=True)
    return rows


def summary(rows: list[dict[str, float]], epochs: int) -> dict[str, Any]:
    ratios = np.array([row["fit"] / row["bare"] for row in rows])
    interval = scipy.stats.bootstrap(
        (ratios,), np.median, confidence_level=0.95, n_resamples=9999, method="percentile", rng=0
    ).confidence_interval
    steps = epochs * -(-SAMPLES // BATCH)
    return {
        "median_ratio": round(float(np.median(ratios)), 5),
        "interval_95": [round(float(interval.low), 5), round(float(interval.high), 5)],
        "limit": LIMIT,
        "n_pairs": len(rows),
        "steps": steps,
        "bare_step_ms": round(1e3 * statistics.median(row["bare"] for row in rows) / steps, 4),
        "fit_step_ms": round(1e3 * statistics.median(row["fit"] for row in rows) / steps, 4),
        "threads": torch.get_num_threads(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "ratios": [round(float(ratio), 5) for ratio in ratios],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--json", action="store_true", help="print the record on stdout")
    parser.add_argument("--no-record", action="store_true", help="write no claim")
    options = parser.parse_args()
    figures = summary(measure(options.pairs, options.epochs), options.epochs)
    low, high = figures["interval_95"]
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        print(f"fit / bare: {figures['median_ratio']:.4f}  [{low:.4f}, {high:.4f}]  over {figures['n_pairs']} pairs")
        print(f"a step: {figures['bare_step_ms']:.3f} ms bare, {figures['fit_step_ms']:.3f} ms in fit")
    if not options.no_record:
        command = f"OMP_NUM_THREADS=1 python -m bench.fit_overhead --pairs {options.pairs} --epochs {options.epochs}"
        print(write_claim("fit-overhead", command, BASELINE, figures), file=sys.stderr)
    return 0 if figures["median_ratio"] <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
