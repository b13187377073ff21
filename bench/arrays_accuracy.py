"""Whether the small CNN, written out in array operations, learns the real Fashion-MNIST as torch does. Takes half an hour.

    OMP_NUM_THREADS=1 python -m bench.arrays_accuracy

conv 10 3x3, max-pool 2, dense 100, dense 10; Adam at 1e-3, batch 8, 5 epochs; 55,000 images to train on, 10,000 to test.
For each seed two trainings, and what counts is the accuracy on the test images after the last epoch:

    torch     the Task with plan=baseline
    network   hotloop.arrays.Network by itself, with weights and an order of its own

The figure is the mean over the seeds of the difference to torch, in points (hundredths of all test images).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hotloop
from bench.claim import write_claim
from hotloop.arrays.conv import Conv, MaxPool
from hotloop.arrays.dense import Dense
from hotloop.arrays.network import Network
from hotloop.data.builtin import fashion_mnist
from hotloop.plan import BASELINE

LIMIT = 0.5
"""Points that the arrays may be below torch."""


def model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 10, 3, padding=1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1960, 100), nn.Linear(100, 10)
    )


def by_torch(seed: int, epochs: int) -> float:
    """Test accuracy of the Task's last epoch, in percent."""
    task = hotloop.Task(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        data=fashion_mnist(),
        batch_size=8,
        epochs=epochs,
        seed=seed,
    )
    with tempfile.TemporaryDirectory() as folder:
        run = hotloop.fit(task, run=Path(folder) / "run", plan="baseline", device="cpu", progress=False)
        return 100 * hotloop.evaluate(run, on="test", weights="last").metrics["accuracy"]


def by_network(seed: int, epochs: int) -> float:
    """The same of the network by itself."""
    data = fashion_mnist()
    assert data.prepare is not None and data.test is not None
    (x, y), (x_test, y_test) = ((data.prepare(x).numpy(), y.numpy()) for x, y in (data.train, data.test))
    net = Network([Conv(10, 3, pad=1), MaxPool(2), Dense(100), Dense(10)], optimizer="adam", xp="numpy", seed=seed)
    net.fit(x, y, epochs=epochs, batch_size=8, progress=False)
    return 100 * (1 - net.evaluate(x_test, y_test)["error"])


Accuracies = dict[str, dict[str, float]]
"""In percent, by way and by seed."""


def measure(seeds: int, epochs: int) -> Accuracies:
    ways = {"torch": by_torch, "network": by_network}
    found: Accuracies = {name: {} for name in ways}
    for seed in range(seeds):
        for name, train in ways.items():
            began = time.perf_counter()
            found[name][str(seed)] = round(train(seed, epochs), 2)
            took = time.perf_counter() - began
            print(f"seed {seed}  {name:8} {found[name][str(seed)]:.2f} %  {took:.0f}s", file=sys.stderr, flush=True)
    return found


def summary(found: Accuracies, epochs: int) -> dict[str, Any]:
    network, torch_ = found["network"], found["torch"]
    return {
        "points_to_torch": round(statistics.fmean(network[seed] - torch_[seed] for seed in network), 3),
        "limit": LIMIT,
        "n_seeds": {name: len(accuracies) for name, accuracies in found.items()},
        "epochs": epochs,
        "batch_size": 8,
        "test_accuracy_percent": found,
        "data": "Fashion-MNIST, 55,000 to train on, 10,000 to test",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--no-record", action="store_true", help="write no claim")
    options = parser.parse_args()
    figures = summary(measure(options.seeds, options.epochs), options.epochs)
    print(json.dumps(figures, indent=2))
    if not options.no_record:
        command = f"OMP_NUM_THREADS=1 python -m bench.arrays_accuracy --seeds {options.seeds} --epochs {options.epochs}"
        print(write_claim("arrays-accuracy", command, BASELINE, figures), file=sys.stderr)
    return 0 if abs(figures["points_to_torch"]) <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
