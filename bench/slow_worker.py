"""What one worker that is five times slower costs: synchronous training against asynchronous, with real processes.

    OMP_NUM_THREADS=1 python -m bench.slow_worker
    OMP_NUM_THREADS=1 python -m bench.slow_worker --repeats 1 --rows /tmp/rows.jsonl    # in pieces; call it again

A step is a sleep (bench/slow_task.py), so that four processes need no four cores. Each training is compared with one of
the same plan whose workers are all equally fast, run just before or after it. The first epoch, in which the processes
start, is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.claim import write_claim
from bench.slow_task import STEP_S
from hotloop.plan import Plan

RANKS, SLOWNESS = 4, 5.0
PLANS = {
    "synchronous": (["parallel=data"], 24),
    "asynchronous": (["parallel=async"], 160),
    "asynchronous, staleness=3": (["parallel=async", "staleness=3"], 160),
}
"""Axes, and batches in an epoch: what takes a few seconds if all workers are equally fast."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=Path, help="a file to which each training is written, and from which to go on")
    parser.add_argument("--at-most", type=int, help="trainings in this call")
    parser.add_argument("--no-record", action="store_true", help="print the figures, write no claim")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.rows.open()] if options.rows and options.rows.is_file() else []
    wanted = [(repeat, name, slow) for repeat in range(options.repeats) for name in PLANS for slow in (False, True)]
    left = [key for key in wanted if key not in {(row["repeat"], row["plan"], row["slow"]) for row in rows}]
    for repeat, name, slow in left[: options.at_most]:
        row = {"repeat": repeat, "plan": name, "slow": slow, "updates_per_s": rate(*PLANS[name], slow)}
        if slow and row["updates_per_s"] > (RANKS - 1 + 1 / SLOWNESS) / STEP_S:
            raise SystemExit(f"{row}: more than such workers can do, so none of them was slow")
        rows.append(row)
        print(row, flush=True)
        if options.rows:
            with options.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
    if options.at_most is not None and len(left) > options.at_most:
        print("call it again to go on")
        return 0
    record = {name: summary([row for row in rows if row["plan"] == name]) for name in PLANS}
    print(json.dumps(record, indent=2))
    if not options.no_record:
        settings = {"ranks": RANKS, "slowness_of_one": SLOWNESS, "step_s": STEP_S, "repeats": options.repeats}
        plan = Plan(parallel="async", ranks=RANKS)
        write_claim("slow-worker", "python -m bench.slow_worker", plan, {"settings": settings, "plans": record})
    return 0


def rate(axes: list[str], batches: int, slow: bool) -> float:
    """Updates per second of the epochs after the first."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hotloop", "train", str(Path(__file__).with_name("slow_task.py"))]
        settings = [part for axis in axes for part in ("--set", axis)]
        run = [
            "--ranks",
            str(RANKS),
            "-p",
            f"slowness={SLOWNESS if slow else 1.0}",
            "-p",
            f"batches={batches}",
            "--run",
            f"{folder}/run",
        ]
        done = subprocess.run([*command, *settings, *run], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        epochs = [json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").open()][1:]
        return statistics.mean(epoch["samples_per_s"] / 8 for epoch in epochs)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rates, and how many times slower training is with the slow worker, pair by pair."""
    even, slow = ([row["updates_per_s"] for row in rows if row["slow"] is kind] for kind in (False, True))
    times = [one / other for one, other in zip(even, slow, strict=True)]
    return {
        "updates_per_s": {"all_equal": even, "one_slow": slow},
        "times_slower": {"median": statistics.median(times), "least": min(times), "most": max(times), "n": len(times)},
    }


if __name__ == "__main__":
    sys.exit(main())
