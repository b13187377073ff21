"""How much faster the larger CNN is on CuPy than on NumPy, written out once for both. Needs an NVIDIA GPU and CuPy.

    python -m bench.arrays_gpu
    python -m bench.arrays_gpu --xp torch --no-record      # tries the script where there is no GPU

conv 32 3x3, ReLU, conv 64 3x3, ReLU, max-pool 2, dense 128, ReLU, dense 10; Adam, batch 128, fp32, on images of the size
of Fashion-MNIST's. The two train the same batches in turn in one process. The figure is the median of the ratios of their
times, with its bootstrap interval over the pairs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import numpy as np
import scipy.stats

from bench.claim import write_claim
from hotloop.arrays.activations import ReLU
from hotloop.arrays.conv import Conv, MaxPool
from hotloop.arrays.dense import Dense
from hotloop.arrays.network import Network

LIMIT = 10.0


class Racer:
    """One network with its batches, where it computes."""

    def __init__(self, xp: str, steps: int, size: int) -> None:
        layers = [Conv(32, 3), ReLU(), Conv(64, 3), ReLU(), MaxPool(2), Dense(128), ReLU(), Dense(10)]
        self.net = Network(layers, xp=xp)
        random = np.random.default_rng(0)
        x = random.standard_normal((steps * size, 1, 28, 28)).astype("float32")
        y = random.integers(0, 10, steps * size)
        self.net.predict(x[:2])  # makes the weights
        x, y = self.net.xp.asarray(x), self.net.xp.asarray(y)
        cuts = range(0, steps * size, size)
        self.batches = [(x[first : first + size, ...], y[first : first + size]) for first in cuts]

    def run_s(self) -> float:
        """Seconds for a step on each batch; reading the last loss waits for the device."""
        began = time.perf_counter()
        for x, y in self.batches:
            loss, _ = self.net.step(x, y)
        float(loss)
        return time.perf_counter() - began


def measure(xp: str, pairs: int, steps: int, size: int) -> np.ndarray:
    """(pairs, 2): seconds of NumPy and of `xp`."""
    slow, fast = Racer("numpy", steps, size), Racer(xp, steps, size)
    fast.run_s(), slow.run_s()
    return np.array([(slow.run_s(), fast.run_s()) for _ in range(pairs)])


def summary(pairs: np.ndarray, xp: str, steps: int) -> dict[str, Any]:
    ratios = pairs[:, 0] / pairs[:, 1]
    found = scipy.stats.bootstrap((ratios,), np.median, n_resamples=9999, method="percentile", rng=0)
    low, high = found.confidence_interval
    return {
        "xp": xp,
        "ratio": round(float(np.median(ratios)), 2),
        "interval_95": [round(float(low), 2), round(float(high), 2)],
        "limit": LIMIT,
        "n_pairs": len(pairs),
        "numpy_step_ms": round(1e3 * float(np.median(pairs[:, 0])) / steps, 3),
        "step_ms": round(1e3 * float(np.median(pairs[:, 1])) / steps, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--xp", default="cupy")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="of each in a pair")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--no-record", action="store_true", help="write no claim")
    options = parser.parse_args()
    figures = summary(measure(options.xp, options.pairs, options.steps, options.batch), options.xp, options.steps)
    print(json.dumps(figures, indent=2))
    if not options.no_record:
        command = f"python -m bench.arrays_gpu --xp {options.xp} --pairs {options.pairs} --steps {options.steps}"
        print(write_claim("arrays-gpu", command, None, figures), file=sys.stderr)
    return 0 if figures["interval_95"][0] >= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
