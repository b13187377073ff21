"""What does being profiled cost the steps that aren't watched closely? The same loop under a watch and without one, in turn.

    OMP_NUM_THREADS=1 python -m bench.profile_overhead
    OMP_NUM_THREADS=1 python -m bench.profile_overhead --rounds 40 --record

A training loop of each size runs in one process, on and on. A round is a whole watch of its steps, as `hotloop profile`
watches a script, and then as many steps without one. Of the watch those clean steps count by which a profile goes, of the
others all. What is compared are the medians of a round, and the ratio is given with its interval. What a whole watch takes,
with the steps that are watched closely and what is done between steps, is given beside it: it comes once, however long a
script runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bench.claim import write_claim
from hotloop.plan import BASELINE
from hotloop.profiler.base.call_sites import CallSites
from hotloop.profiler.base.phases import HostClock, Instant, without_cold_steps
from hotloop.profiler.session import ProfilerSession, make_observers
from hotloop.profiler.trace.inductor_kernels import CompilationRecorder
from hotloop.tuning.races.statistics import ratio_of

LIMIT = 1.05
CONFIDENCE = 0.95
WARM_UP = 30
MEASURED = 60


class Loop:
    """A training as people write it, which goes on for ever.

    Attributes:
        ended: when each step ended.
    """

    def __init__(
        self, model: nn.Module, shape: tuple[int, ...], batch: int, batches: int, now: Callable[[], float]
    ) -> None:
        torch.manual_seed(0)
        self._model = model
        data = TensorDataset(torch.randn(batches * batch, *shape), torch.randint(10, (batches * batch,)))
        self._loader = DataLoader(data, batch_size=batch, shuffle=True)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        self._batches = self._forever()
        self.ended: list[float] = []
        self._now = now

    def _forever(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from self._loader

    def step(self) -> None:
        x, y = next(self._batches)
        self._optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self._model(x), y)
        loss.backward()
        self._optimizer.step()
        self.ended.append(self._now())


def dense(width: int, depth: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def images(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, channels, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(channels * 169, 10)
    )


LOOPS: dict[str, Callable[[Callable[[], float]], Loop]] = {
    "tiny": lambda now: Loop(dense(16, 1), (16,), 8, 50, now),
    "small": lambda now: Loop(dense(128, 2), (128,), 64, 50, now),
    "many modules": lambda now: Loop(dense(32, 40), (32,), 16, 50, now),
    "images": lambda now: Loop(images(16), (1, 28, 28), 64, 20, now),
}


class ThreadClock(HostClock):
    """CPU time of the thread, where others share the machine."""

    def mark(self, *, idle: bool = True) -> Instant:
        now = time.thread_time()
        return super().mark(idle=idle)._replace(wall_s=now) if idle else Instant(now, 0.0, 0)


CLOCKS = {"wall": (HostClock, time.perf_counter), "cpu": (ThreadClock, time.thread_time)}


def one_round(loop: Loop, clock: HostClock) -> tuple[float, float, float]:
    """Median milliseconds of the clean steps under a watch, and of steps without; and what the whole watch took beyond."""
    watch = ProfilerSession(
        MEASURED,
        CallSites(),
        lambda facts: None,
        lambda watch: make_observers(watch, None),
        compilations=CompilationRecorder(),
    )
    watch.timeline.clock = clock
    first = len(loop.ended)
    watch.install()
    while not watch.closed:
        loop.step()
    watch.remove()
    steps = len(loop.ended) - first
    for _ in range(steps):
        loop.step()
    of_watch = [step for step in watch.facts.steps if step.kind in ("clean", "instrumented")]
    under = [step.ms for step in without_cold_steps(of_watch) if step.kind == "clean"]
    took = [(later - earlier) * 1e3 for earlier, later in pairwise(loop.ended[first - 1 :])]
    return statistics.median(under), statistics.median(took[steps:]), sum(took[:steps]) - sum(took[steps:])


def measured(name: str, rounds: int, clock: str) -> dict[str, Any]:
    marks, now = CLOCKS[clock]
    loop = LOOPS[name](now)
    for _ in range(WARM_UP):
        loop.step()
    found = [one_round(loop, marks()) for _ in range(rounds)]
    under, without, whole = zip(*found, strict=True)
    ratio = ratio_of(under, without, confidence=CONFIDENCE)
    return {
        "step_ms": statistics.median(without),
        "cost_us": 1e3 * statistics.median(a - b for a, b, _ in found),
        "ratio": ratio.median,
        "low": ratio.low,
        "high": ratio.high,
        "whole_watch_s": statistics.median(whole) / 1e3,
        "rounds_ms": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loops", nargs="*", default=list(LOOPS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: of the thread, where the machine is shared"
    )
    parser.add_argument("--record", action="store_true", help="write a claim")
    given = parser.parse_args()
    found = {}
    for name in given.loops:
        found[name] = one = measured(name, given.rounds, given.clock)
        interval = "" if one["low"] is None else f" ({one['low']:.3f} to {one['high']:.3f})"
        told = "" if one["ratio"] <= LIMIT else f"  above {LIMIT}"
        print(
            f"{name:14} {one['step_ms']:8.3f} ms; under a watch {one['ratio']:.3f} times{interval}, "
            f"{one['cost_us']:.0f} us more; a whole watch takes {one['whole_watch_s']:.2f} s{told}",
            flush=True,
        )
    if given.record:
        print(
            write_claim(
                "profile-overhead",
                f"OMP_NUM_THREADS=1 python -m bench.profile_overhead --rounds {given.rounds} "
                f"--clock {given.clock} --record",
                BASELINE,
                {"loops": found, "confidence": CONFIDENCE, "clock": given.clock},
            )
        )


if __name__ == "__main__":
    main()
