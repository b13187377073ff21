"""How much longer does a step of `parallel=data` take than a step of DistributedDataParallel by hand?

    OMP_NUM_THREADS=1 python -m bench.ddp_by_hand                 about 6 minutes of a quiet machine with two cores
    OMP_NUM_THREADS=1 python -m bench.ddp_by_hand --seconds 20 --networks mlp --no-record

Two ranks of `hotloop.fit`, and two processes of `bench/ddp_loop.py` under torchrun, train the same network from the same
parameters on the same batches, one thread each. The two pairs of processes run in turn: after each window of hotloop's
steps the loop by hand takes the same number of steps, while hotloop's first rank waits in a callback and the second rank
for the first. The figure is the median ratio of the windows with its interval of 95 %.

The windows contain steps alone, with all that hotloop does between them: spans, decisions of the ranks, callbacks. The ends
of epochs, checkpoints and the first seconds are left out. The mean losses of all epochs must be equal within rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

import hotloop
from bench.claim import write_claim
from bench.ddp_networks import BATCH_SIZES, arrays, network, optimizer
from hotloop.core.random.rng import seed_for
from hotloop.plan import Plan
from hotloop.tuning.races.statistics import ratio_of

PLAN = Plan(parallel="data", ranks=2, device="cpu")
LIMIT = 1.03
CONFIDENCE = 0.95
SAME_LOSS = 1e-5
"""Largest relative difference of two mean losses of an epoch that rounding may cause."""
_NEVER = "1000000000"
_START_S, _WARM_S, _WINDOW_S = 10.0, 3.0, 0.4


class InTurn:
    """A callback of `fit` that has the loop by hand take as many steps after each window.

    Attributes:
        pairs: seconds of hotloop's steps, seconds of the other loop's steps, and their number, window by window.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.pairs: list[tuple[float, float, int]] = []
        self._step, self._own_s, self._trained_s, self._left = 0, 0.0, 0.0, 0.0
        self._idle_cpu_s = self._idle_s = 0.0

    def __call__(self, view: hotloop.View) -> None:
        now = time.perf_counter()
        if view.event == "start":
            self._ask, self._told = (self._folder / "ask").open("w"), (self._folder / "told").open()
        elif view.event in ("progress", "epoch", "stop"):
            self._own_s += now - self._left
            if view.event != "progress" or self._own_s >= _WINDOW_S:
                self._end_window(view.step - self._step, counts=view.event == "progress")
                self._step = view.step
        if view.event == "stop":
            self._write()
        self._left = time.perf_counter()

    def _end_window(self, steps: int, *, counts: bool) -> None:
        if steps:
            began, cpu = time.perf_counter(), time.process_time()
            print(steps, file=self._ask, flush=True)
            other_s = float(self._told.readline())
            self._idle_s += time.perf_counter() - began
            self._idle_cpu_s += time.process_time() - cpu
            if counts and self._trained_s > _WARM_S:
                self.pairs.append((self._own_s, other_s, steps))
        self._trained_s += self._own_s
        self._own_s = 0.0

    def _write(self) -> None:
        found = {"pairs": self.pairs, "idle_cpu_share": round(self._idle_cpu_s / max(self._idle_s, 1e-9), 4)}
        (self._folder / "pairs.json").write_text(json.dumps(found))
        self._ask.close()


@contextmanager
def by_hand(name: str, folder: Path) -> Iterator[None]:
    """Runs the loop by hand under torchrun, which waits for numbers of steps."""
    for pipe in ("ask", "told"):
        os.mkfifo(folder / pipe)
    (folder / "seeds.json").write_text(json.dumps([seed_for(0, "order", epoch) for epoch in range(2000)]))
    script = Path(__file__).with_name("ddp_loop.py")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, name, folder]
    process = subprocess.Popen([sys.executable, *map(str, command)], env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"})
    try:
        while not (folder / "ready").exists():
            if process.poll() is not None:
                raise RuntimeError(f"the loop by hand ended with exit code {process.returncode}")
            time.sleep(0.1)
        yield
        process.wait(timeout=60)
    finally:
        process.terminate()
        process.wait()


def task(name: str) -> hotloop.Task:
    return hotloop.Task(
        model=lambda: network(name),
        loss=nn.CrossEntropyLoss(),
        seed=0,
        optimizer=optimizer,
        data=arrays(name),
        batch_size=BATCH_SIZES[name],
        epochs=2000,
    )


def measure(name: str, seconds: float) -> dict[str, Any]:
    """The figures of one network.

    Raises:
        RuntimeError: the two trainings have different losses.
    """
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with by_hand(name, folder):
            run = hotloop.fit(
                task(name),
                run=folder / "run",
                plan=PLAN,
                stop_after=f"{seconds + _START_S}s",
                checkpoint_every=_NEVER,
                callbacks=[InTurn(folder)],
                progress=False,
            )
        found = json.loads((folder / "pairs.json").read_text())
        losses = json.loads((folder / "losses.json").read_text())
        ours = [row["train_loss"] for row in run.epochs]
    far = max((abs(one - other) / other for one, other in zip(ours, losses, strict=True)), default=0.0)
    if not ours or far > SAME_LOSS:
        raise RuntimeError(f"{name}: losses of {len(ours)} epochs differ by {far:.2g}: {ours} and {losses}")
    if not found["pairs"]:
        raise RuntimeError(f"{name}: no window of steps in {seconds:g}s, use larger --seconds")
    own, other = ([pair[place] / pair[2] for pair in found["pairs"]] for place in (0, 1))
    ratio = ratio_of(own, other, CONFIDENCE)
    return {
        "times_as_long": round(ratio.median, 4),
        "low": None if ratio.low is None else round(ratio.low, 4),
        "high": None if ratio.high is None else round(ratio.high, 4),
        "pairs": ratio.pairs,
        "step_ms": {"hotloop": round(1e3 * _middle(own), 4), "by hand": round(1e3 * _middle(other), 4)},
        "steps": sum(pair[2] for pair in found["pairs"]),
        "epochs": len(ours),
        "last_loss": ours[-1],
        "losses_differ_by": far,
        "idle_cpu_share": found["idle_cpu_share"],
    }


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=list(BATCH_SIZES), default=list(BATCH_SIZES))
    parser.add_argument(
        "--seconds", type=float, default=100.0, help="of each network, both loops together; 10 more to start"
    )
    parser.add_argument("--no-record", action="store_true", help="print the figures, write no claim")
    options = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":
        parser.error("set OMP_NUM_THREADS=1, so that each of the two ranks has one core")
    networks = {}
    for name in options.networks:
        networks[name] = found = measure(name, options.seconds)
        print(
            f"{name}: {found['times_as_long']} times as long ({found['low']} to {found['high']}, "
            f"{found['pairs']} pairs), {found['step_ms']}",
            file=sys.stderr,
            flush=True,
        )
    figures = {"limit": LIMIT, "load_average": os.getloadavg(), "networks": networks}
    print(json.dumps(figures, indent=2))
    if not options.no_record:
        command = f"OMP_NUM_THREADS=1 python -m bench.ddp_by_hand --seconds {options.seconds:g}"
        print(write_claim("data-parallel-by-hand", command, PLAN, figures), file=sys.stderr)
    return 0 if all(found["times_as_long"] <= LIMIT for found in networks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
