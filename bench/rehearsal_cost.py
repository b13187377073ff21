"""What one rehearsal of a resume costs a run. Takes about ten minutes.

    python -m bench.rehearsal_cost
    python -m bench.rehearsal_cost W4 --pairs 5

Each pair trains a workload of bench.speed twice in turn, with `--rehearse no` and with `--rehearse 1`; both runs take the same
steps. The cost is the difference of the seconds of all epochs. `--rehearse auto` begins a rehearsal only once 1 % of the run
so far is as long as the seconds that a rehearsal's process is expected to take.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.claim import write_claim
from bench.speed.data import lay_down
from bench.speed.workloads import WORKLOADS
from hotloop.plan import BASELINE
from hotloop.training.run import Run

LENGTHS = {"W1": (4, 12_000), "W4": (30, 60_000), "W7": (4, 160)}
"""Epochs and samples of runs of about 25 s on two cores: the first checkpoint comes after a quarter or less."""

SHARE = 0.01
"""Largest share of a run that rehearsals take under `auto`."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=list(LENGTHS))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--no-record", action="store_true", help="print the figures, write no claim")
    options = parser.parse_args()
    found = {}
    for name in options.workloads:
        lay_down(WORKLOADS[name].data)
        found[name] = cost_of(name, options.pairs)
        print(name, found[name], flush=True)
    if not options.no_record:
        command = f"python -m bench.rehearsal_cost {' '.join(options.workloads)} --pairs {options.pairs}"
        print(write_claim("rehearsal-cost", command, BASELINE, {"n_pairs": options.pairs, "workloads": found}))
    return 0


def cost_of(name: str, pairs: int) -> dict[str, Any]:
    rows = list[dict[str, float]]()
    for number in range(pairs):
        order = ("no", "1") if number % 2 == 0 else ("1", "no")
        seconds = {rehearse: training_s(name, rehearse) for rehearse in order}
        rows.append({"without_s": round(seconds["no"], 3), "with_s": round(seconds["1"], 3)})
    costs_s = [row["with_s"] - row["without_s"] for row in rows]
    typical_s = statistics.median(costs_s)
    return {
        "pairs": rows,
        "cost_s": round(typical_s, 2),
        "largest_cost_s": round(max(costs_s), 2),
        "share_of_this_run": round(typical_s / statistics.median(row["without_s"] for row in rows), 3),
        "shortest_run_at_1_percent_s": round(typical_s / SHARE),
    }


def training_s(name: str, rehearse: str) -> float:
    """Seconds of all epochs of one run."""
    epochs, samples = LENGTHS[name]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        arguments = [
            "-p",
            f"name={name}",
            "-p",
            f"epochs={epochs}",
            "-p",
            f"samples={samples}",
            "--plan",
            "baseline",
            "--run",
            str(run),
        ]
        command = [sys.executable, "-m", "hotloop", "train", "bench.speed.tasks:task", *arguments]
        subprocess.run([*command, "--rehearse", rehearse], check=True, capture_output=True)
        opened = Run.open(run)
        if rehearse == "1" and not any(line.startswith("resume rehearsed") for line in opened.record.rehearsals):
            raise SystemExit(f"{name}: {opened.record.rehearsals}")
        return sum(epoch["seconds"] for epoch in opened.epochs)


if __name__ == "__main__":
    sys.exit(main())
