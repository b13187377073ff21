"""How much faster are two ranks than one, and which part of their time do they spend on each other?

    OMP_NUM_THREADS=1 python -m bench.scaling                       5 rounds, about 10 minutes of a quiet machine
    OMP_NUM_THREADS=1 python -m bench.scaling --ranks 2 4 --rounds 3 --no-record
    OMP_NUM_THREADS=1 python -m bench.scaling --ways stages local async tensor --rounds 3 --claim scaling-more

Efficiency is samples/s of N ranks over N times those of one process, each with one thread, measured in turns. The first
epoch of each training is left out, in which the ranks get to know each other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.claim import write_claim
from hotloop.plan import Plan
from hotloop.training.run import Run

TASKS = Path(__file__).with_name("scaling_task.py")
WORKLOADS = ("cnn", "mlp")
WAYS = ("data", "sharded", "towers")
MORE_WAYS = ("stages", "local", "async", "tensor")
IMPOSSIBLE = {("cnn", "tensor")}
"""The CNN has a single linear layer, and `tensor` splits pairs of them."""


def train(workload: str, settings: list[str]) -> dict[str, Any]:
    """Samples/s of the steady state, and shares of the steps' time in waiting and communication, the largest of a rank."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [
            "train",
            f"{TASKS}:{workload}",
            "--device",
            "cpu",
            "--plan",
            "baseline",
            "--run",
            str(run),
            *settings,
        ]
        subprocess.run([sys.executable, "-m", "hotloop", *command], check=True, stderr=subprocess.DEVNULL)
        done = Run.open(run)
        shares = [event for event in done.journal() if event["event"] == "ranks"]
        speed = statistics.median(row["samples_per_s"] for row in done.epochs[1:])
        return {"samples_per_s": speed} | {
            name: max(shares[-1][name]) for name in ("waiting", "communication") if shares
        }


def summary(rows: list[dict[str, Any]], ranks: int) -> dict[str, Any]:
    """Over the rounds: median efficiency with its range, and median shares."""
    efficiencies = sorted(row["several"]["samples_per_s"] / row["one"]["samples_per_s"] / ranks for row in rows)
    found: dict[str, Any] = {
        "efficiency": round(statistics.median(efficiencies), 3),
        "from": round(efficiencies[0], 3),
        "to": round(efficiencies[-1], 3),
        "n": len(rows),
    }
    for share in ("waiting", "communication"):
        seen = [row["several"][share] for row in rows if share in row["several"]]
        found[share] = round(statistics.median(seen), 3) if seen else None
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, *MORE_WAYS], default=list(WAYS))
    parser.add_argument("--claim", default="scaling", help="the name of the record")
    parser.add_argument("--no-record", action="store_true", help="print the figures, write no claim")
    options = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":
        parser.error("set OMP_NUM_THREADS=1, so that one process doesn't take the cores of several ranks")
    found: dict[str, Any] = {}
    for workload in WORKLOADS:
        for way in options.ways:
            for ranks in [] if (workload, way) in IMPOSSIBLE else options.ranks:
                several = ["--set", f"parallel={way}", "--ranks", str(ranks)]
                rows = [
                    {"one": train(workload, []), "several": train(workload, several)} for _ in range(options.rounds)
                ]
                found[f"{workload}, {way}, {ranks} ranks"] = {**summary(rows, ranks), "rounds": rows}
                print(workload, way, ranks, summary(rows, ranks), file=sys.stderr, flush=True)
    print(json.dumps(found, indent=2))
    if not options.no_record:
        more = f" --ways {' '.join(options.ways)} --claim {options.claim}" if options.ways != list(WAYS) else ""
        command = f"OMP_NUM_THREADS=1 python -m bench.scaling --rounds {options.rounds}{more}"
        figures = {"load_average": os.getloadavg(), "found": found}
        print(write_claim(options.claim, command, Plan(parallel=options.ways[0]), figures), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
