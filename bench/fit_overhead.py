"""How much longer `fit` takes than a bare loop that does the same steps. Takes about three minutes.

    OMP_NUM_THREADS=1 python -m bench.fit_overhead
    OMP_NUM_THREADS=1 python -m bench.fit_overhead --json

Both train the same network, whose step takes about a millisecond, on the same arrays in memory: a new order each epoch,
batches by `index_select`, Adam, the loss summed on the device. The bare loop does that and nothing else. `fit` also
reseeds all generators at each step, looks up every tenth of a second, writes journal, metrics and checkpoints: all from
its start until it has stopped counts, the last checkpoint too.

They run in turn in one process: after each span of `fit`, about a tenth of a second, the bare loop does as many steps.
The figure is the ratio of the two sums, with its bootstrap interval over the pairs. The width of the network is chosen
so that a bare step takes a millisecond on the machine at hand.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats
import torch
from torch import nn

import hotloop
from bench.claim import write_claim
from hotloop.plan import BASELINE

SAMPLES, FEATURES, CLASSES, BATCH = 32_768, 64, 10, 128
LIMIT = 1.03


def network(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )


def arrays() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(0))
    return x, (x[:, :CLASSES]).argmax(1)


class Bare:
    """The loop that a textbook would write, a few steps at a time."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, width: int) -> None:
        self.x, self.y = x, y
        self.model, self.loss_of = network(width).train(), nn.CrossEntropyLoss()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.total = torch.zeros((), dtype=torch.float64)
        self.order: list[torch.Tensor] = []

    def run_s(self, steps: int) -> float:
        """Seconds for so many steps."""
        started = time.perf_counter()
        for _ in range(steps):
            if not self.order:
                self.order = list(torch.randperm(len(self.x)).split(BATCH))
            index = self.order.pop()
            inputs, target = self.x.index_select(0, index), self.y.index_select(0, index)
            self.optimizer.zero_grad()
            loss = self.loss_of(self.model(inputs), target)
            loss.backward()
            self.optimizer.step()
            self.total.add_(loss.detach(), alpha=len(index))
        self.total.item()
        return time.perf_counter() - started


class Interleaved:
    """A callback of `fit` that runs the bare loop after each span, as many steps; neither's time counts as the other's.

    Attributes:
        pairs: `(seconds of fit, seconds of the bare loop)` for the same number of steps.
    """

    def __init__(self, bare: Bare) -> None:
        self.bare, self.step = bare, 0
        self.pairs: list[tuple[float, float]] = []
        self.left = 0.0

    def __call__(self, view: hotloop.View) -> None:
        now = time.perf_counter()
        if view.event == "start":
            self.left = now
        elif view.event in ("progress", "epoch", "stop"):
            fit_s, steps = now - self.left, view.step - self.step
            self.pairs.append((fit_s, self.bare.run_s(steps) if steps else 0.0))
            self.step = view.step
            self.left = time.perf_counter()


def measure(runs: int, epochs: int, width: int) -> list[list[tuple[float, float]]]:
    """The pairs of each run."""
    x, y = arrays()
    found = []
    for number in range(runs + 1):  # imports, allocations and caches of the first one belong to neither
        interleaved = Interleaved(Bare(x, y, width))
        task = hotloop.Task(
            model=lambda: network(width),
            loss=nn.CrossEntropyLoss(),
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
            data=(x, y),
            batch_size=BATCH,
            epochs=epochs,
        )
        with tempfile.TemporaryDirectory() as folder:
            hotloop.fit(task, run=Path(folder) / "run", device="cpu", progress=False, callbacks=[interleaved])
        if number:
            found.append(interleaved.pairs)
            fit_s, bare_s = np.sum(interleaved.pairs, axis=0)
            print(f"{number}/{runs}: {fit_s / bare_s:.4f}", file=sys.stderr, flush=True)
    return found


def width_of_1_ms() -> int:
    """The width at which this machine's bare step takes about a millisecond."""
    x, y = arrays()

    def step_ms(width: int) -> float:
        bare = Bare(x, y, width)
        bare.run_s(50)
        return 1e3 * statistics.median(bare.run_s(20) for _ in range(10)) / 20

    return min(range(64, 512, 32), key=lambda width: abs(step_ms(width) - 1))


def summary(runs: list[list[tuple[float, float]]], epochs: int, width: int) -> dict[str, Any]:
    pairs = np.array([pair for run in runs for pair in run])
    interval = scipy.stats.bootstrap(
        tuple(pairs.T),
        lambda fit_s, bare_s, axis: fit_s.sum(axis) / bare_s.sum(axis),
        paired=True,
        n_resamples=9999,
        method="percentile",
        rng=0,
    ).confidence_interval
    steps = len(runs) * epochs * -(-SAMPLES // BATCH)
    fit_s, bare_s = pairs.sum(axis=0)
    return {
        "ratio": round(fit_s / bare_s, 4),
        "interval_95": [round(float(interval.low), 4), round(float(interval.high), 4)],
        "limit": LIMIT,
        "n_runs": len(runs),
        "n_pairs": len(pairs),
        "steps": steps,
        "width": width,
        "bare_step_ms": round(1e3 * bare_s / steps, 4),
        "fit_step_ms": round(1e3 * fit_s / steps, 4),
        "threads": torch.get_num_threads(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "ratios_of_runs": [round(float(np.divide(*np.sum(run, axis=0))), 4) for run in runs],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--json", action="store_true", help="print the record on stdout")
    parser.add_argument("--no-record", action="store_true", help="write no claim")
    options = parser.parse_args()
    width = width_of_1_ms()
    figures = summary(measure(options.runs, options.epochs, width), options.epochs, width)
    low, high = figures["interval_95"]
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        print(f"fit / bare: {figures['ratio']:.4f}  [{low:.4f}, {high:.4f}]  over {figures['n_pairs']} pairs")
        print(f"a step: {figures['bare_step_ms']:.3f} ms bare, {figures['fit_step_ms']:.3f} ms in fit")
    if not options.no_record:
        command = f"OMP_NUM_THREADS=1 python -m bench.fit_overhead --runs {options.runs} --epochs {options.epochs}"
        print(write_claim("fit-overhead", command, BASELINE, figures), file=sys.stderr)
    return 0 if figures["ratio"] <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
