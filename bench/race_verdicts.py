"""How often does a race tell the truth? A plan against itself, and against one that a planted delay makes 10 % slower.

OMP_NUM_THREADS=1 python -m bench.race_verdicts --runs 20

The delay is a busy wait after each step, for a tenth of the processor's time that the step took: by the clock on the
wall it would be more than a tenth where the processor is shared. Each race is a fresh one. Ctrl-C stops after the races
done so far, and what they found is still printed and recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import hotloop
from bench.claim import write_claim
from hotloop.core.records.race import Timing, Verdict
from hotloop.lowering.eager_step import EagerStep
from hotloop.plan import BASELINE

SLOWER = 0.1
NEEDED = 0.95
MARKED = hotloop.Plan(device="cpu", workers=0)
"""Does what the baseline does, where data lies in memory; it tells the delayed plan from the other."""


@contextmanager
def delayed(share: float = SLOWER) -> Iterator[None]:
    """Steps of the marked plan take longer by `share` of their own time."""
    as_it_is = EagerStep.__call__

    def step(self: EagerStep, batch: Any, samples: int, number: int) -> Tensor:
        began = time.thread_time()
        loss = as_it_is(self, batch, samples, number)
        if self.parts.plan.workers == MARKED.workers:
            until = time.thread_time() + share * (time.thread_time() - began)
            while time.thread_time() < until:
                pass
        return loss

    EagerStep.__call__ = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        EagerStep.__call__ = as_it_is  # type: ignore[method-assign]


def task() -> hotloop.Task:
    """An MLP whose step takes one to two milliseconds."""
    x = torch.randn(4096, 128, generator=torch.Generator().manual_seed(0))

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    return hotloop.Task(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        data=(x, torch.arange(4096) % 10),
        batch_size=128,
    )


def one(time_limit: str) -> tuple[Timing, Verdict]:
    verdict = hotloop.race(task(), ["baseline", MARKED], devices=["cpu"], time_limit=time_limit, prove=None)
    return verdict.plans[1], verdict


def summary(expected: str, found: list[tuple[Timing, Verdict]]) -> dict[str, Any]:
    right = sum(timing.verdict == expected for timing, _ in found)
    return {
        "expected": expected,
        "right": right,
        "of": len(found),
        "verdicts": [timing.verdict for timing, _ in found],
        "ratios": [round(timing.ratio or 0.0, 4) for timing, _ in found],
        "intervals": [[timing.ratio_low, timing.ratio_high] for timing, _ in found],
        "pairs": [timing.windows for timing, _ in found],
        "step_ms": [round(verdict.plans[0].step_ms or 0.0, 3) for _, verdict in found],
        "busy": sum(any("busy" in note for note in verdict.notes) for _, verdict in found),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--time-limit", default="60s")
    parser.add_argument("--no-record", action="store_true", help="write no claim")
    options = parser.parse_args()
    itself: list[tuple[Timing, Verdict]] = []
    slower: list[tuple[Timing, Verdict]] = []
    loads = [os.getloadavg()[0]]
    try:
        for number in range(options.runs):
            itself.append(one(options.time_limit))
            with delayed():
                slower.append(one(options.time_limit))
            loads.append(os.getloadavg()[0])
            told = [f"{timing.verdict} {timing.ratio:.3f}" for timing, _ in (itself[-1], slower[-1])]
            print(f"{number + 1}/{options.runs}: itself {told[0]}, 10 % slower {told[1]}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    cases = {"itself": summary("no difference", itself), "slower": summary("slower", slower)}
    figures = {
        "planted_delay": SLOWER,
        "time_limit": options.time_limit,
        "needed": f"{NEEDED:.0%} of the races",
        "threads": torch.get_num_threads(),
        "load_average": [round(load, 2) for load in loads],
        **cases,
    }
    print(json.dumps(figures, indent=2))
    if not options.no_record:
        command = f"OMP_NUM_THREADS=1 python -m bench.race_verdicts --runs {options.runs}"
        command += f" --time-limit {options.time_limit}"
        print(write_claim("race-verdicts", command, BASELINE, figures), file=sys.stderr)
    return 0 if all(case["right"] >= NEEDED * case["of"] > 0 for case in cases.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
