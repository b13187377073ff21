"""How much faster the small CNN is than the form that one writes first, both in NumPy. Takes three minutes.

    OMP_NUM_THREADS=1 python -m bench.arrays_naive

conv 10 3x3, max-pool 2, dense 100, dense 10; Adam, batch 8, on images of the size of Fashion-MNIST's. The form that one
writes first is in float64, its im2col walks over the positions of the window in Python, and its pooling keeps a list of
where the largest numbers were and scatters by it. Everything else is the same code.

Both train the same batches in turn in one process, some steps of one and then as many of the other. The figure is the
median of the ratios of their times, with its bootstrap interval over the pairs; beside it stands the ratio of the
processor times, which others on the machine do not lengthen. Then each layer by itself, in processor time too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import scipy.stats

from bench.claim import write_claim
from hotloop.arrays.conv import Conv, MaxPool, Window
from hotloop.arrays.dense import Dense
from hotloop.arrays.network import Network

BATCH, IMAGES = 8, 55_000
LIMIT = 3.0


class SlowWindow(Window):
    """A window that is moved to one position after the other."""

    def unfold(self, x: np.ndarray, fill: float = 0.0) -> np.ndarray:
        (n, c), (oh, ow), x = x.shape[:2], self.positions(x.shape[2:]), self._padded(x, fill)
        seen = np.empty((n, c, self.places, oh, ow), dtype=x.dtype)
        for i in range(oh):
            for j in range(ow):
                seen[:, :, :, i, j] = x[:, :, self._rows(i), self._columns(j)].reshape(n, c, -1)
        return seen

    def fold(self, seen: np.ndarray, image: tuple[int, ...]) -> np.ndarray:
        (n, c, _, oh, ow), (h, w), (above, left) = seen.shape, image, self.pad
        x = np.zeros((n, c, h + 2 * above, w + 2 * left), dtype=seen.dtype)
        for i in range(oh):
            for j in range(ow):
                x[:, :, self._rows(i), self._columns(j)] += seen[:, :, :, i, j].reshape(n, c, *self.size)
        return x[:, :, above : above + h, left : left + w]

    def _rows(self, i: int) -> slice:
        return slice(i * self.stride[0], i * self.stride[0] + self.size[0])

    def _columns(self, j: int) -> slice:
        return slice(j * self.stride[1], j * self.stride[1] + self.size[1])


class SlowConv(Conv):
    def __init__(self, channels: int, size: int, pad: int = 0) -> None:
        super().__init__(channels, size, pad=pad)
        self.window = SlowWindow(size, 1, pad)


class ScatterPool(MaxPool):
    """Keeps where the largest number of each window is, and scatters what comes back to those places."""

    def forward(self, x: np.ndarray, training: bool = False) -> np.ndarray:
        n, c, h, w = x.shape
        oh, ow = self.window.positions((h, w))
        self._from = x.shape
        seen = self.window.unfold(x)
        (_, kw), (sh, sw) = self.window.size, self.window.stride
        place = seen.argmax(axis=2)
        rows = np.arange(oh)[:, None] * sh + place // kw
        columns = np.arange(ow)[None, :] * sw + place % kw
        samples, channels = np.arange(n)[:, None, None, None], np.arange(c)[None, :, None, None]
        self._where = (samples, channels, rows, columns)
        return x[self._where]

    def backward(self, dy: np.ndarray) -> np.ndarray:
        dx = np.zeros(self._from, dtype=dy.dtype)
        np.add.at(dx, self._where, dy)  # windows may overlap, so that a place can come twice
        return dx


def network(naive: bool) -> Network:
    first = [SlowConv(10, 3, pad=1), ScatterPool(2)] if naive else [Conv(10, 3, pad=1), MaxPool(2)]
    return Network([*first, Dense(100), Dense(10)], optimizer="adam", xp="numpy")


def data(batches: int, size: int = BATCH) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(0)
    return [
        (random.standard_normal((size, 1, 28, 28)).astype("float32"), random.integers(0, 10, size))
        for _ in range(batches)
    ]


def run_s(net: Network, batches: list[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float]:
    """Seconds for a step on each batch: of the clock, and of the processor."""
    began, used = time.perf_counter(), time.process_time()
    for x, y in batches:
        net.step(x, y)
    return time.perf_counter() - began, time.process_time() - used


def measure(pairs: int, steps: int) -> np.ndarray:
    """(pairs, 2, 2): milliseconds of a step, naive and as it is, by the clock and by the processor."""
    batches = data(steps)
    wide = [(x.astype("float64"), y) for x, y in batches]
    slow, fast = network(naive=True), network(naive=False)
    slow.predict(wide[0][0]), fast.predict(batches[0][0])  # makes the weights
    run_s(slow, wide[:5]), run_s(fast, batches)
    return 1e3 / steps * np.array([(run_s(slow, wide), run_s(fast, batches)) for _ in range(pairs)])


def agree() -> float:
    """Largest difference of the loss of ten steps, both in float64: they are the same network."""
    batches = [(x.astype("float64"), y) for x, y in data(10)]
    losses = [[float(net.step(x, y)[0]) for x, y in batches] for net in map(built, (True, False))]
    return float(np.abs(np.subtract(*losses)).max())


def built(naive: bool) -> Network:
    net = network(naive)
    net.predict(data(1)[0][0].astype("float64"))
    return net


def layers(size: int) -> dict[str, Any]:
    """Milliseconds of each layer, at a batch size: of the naive form, of a pool that scatters alone, and as it is.

    Forward, backward, and update, by the processor's clock.
    """
    (x, y), wide = data(1, size)[0], data(1, size)[0][0].astype("float64")
    scatters = Network([Conv(10, 3, pad=1), ScatterPool(2), Dense(100), Dense(10)])
    forms = {"naive": (network(naive=True), wide), "scatter": (scatters, x), "mask": (network(naive=False), x)}
    by_the_processor = SimpleNamespace(perf_counter=time.process_time)
    with patch("hotloop.arrays.network.time", by_the_processor):
        timed = {name: net.time_layers(inputs, y, repeats=50) for name, (net, inputs) in forms.items()}
    return {
        name: {
            f"{place} {one.layer}": [round(ms, 3) for ms in (one.forward_ms, one.backward_ms, one.update_ms)]
            for place, one in enumerate(times)
        }
        for name, times in timed.items()
    }


def summary(pairs: np.ndarray) -> dict[str, Any]:
    (slow, fast), ratios = pairs[:, :, 0].T, pairs[:, 0, 0] / pairs[:, 1, 0]
    interval = scipy.stats.bootstrap(
        (ratios,), np.median, n_resamples=9999, method="percentile", rng=0
    ).confidence_interval
    steps = -(-IMAGES // BATCH)
    slow_ms, fast_ms = float(np.median(slow)), float(np.median(fast))
    return {
        "ratio": round(float(np.median(ratios)), 2),
        "interval_95": [round(float(interval.low), 2), round(float(interval.high), 2)],
        "limit": LIMIT,
        "n_pairs": len(pairs),
        "ratio_of_processor_times": round(float(np.median(pairs[:, 0, 1] / pairs[:, 1, 1])), 2),
        "naive_step_ms": round(slow_ms, 3),
        "step_ms": round(fast_ms, 3),
        "steps_per_epoch": steps,
        "naive_epoch_s": round(slow_ms * steps / 1e3, 1),
        "epoch_s": round(fast_ms * steps / 1e3, 1),
        "largest_difference_of_the_loss_in_float64": agree(),
        "layers_forward_backward_update_ms": {f"batch {size}": layers(size) for size in (8, 128)},
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "numpy": np.__version__,
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--steps", type=int, default=25, help="of each in a pair")
    parser.add_argument("--no-record", action="store_true", help="write no claim")
    options = parser.parse_args()
    figures = summary(measure(options.pairs, options.steps))
    print(json.dumps(figures, indent=2))
    if not options.no_record:
        command = f"OMP_NUM_THREADS=1 python -m bench.arrays_naive --pairs {options.pairs} --steps {options.steps}"
        print(write_claim("arrays-naive", command, None, figures), file=sys.stderr)
    return 0 if figures["interval_95"][0] >= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
