"""Does packing make a study faster? Trials an hour of the same study, packed and unpacked, in interleaved pairs.

    OMP_NUM_THREADS=1 python -m bench.packed --search    finds the fastest plans, which are cached: two to four minutes
    OMP_NUM_THREADS=1 python -m bench.packed --record    about five minutes of a quiet machine with two cores

Each pair runs the study packed, unpacked under the rules' plan, and unpacked under its fastest plan, in an order that
changes from pair to pair. A study of `--plan auto`, which isn't timed, finds the fastest plan once. The time is that of the
whole command, with start, proof, evaluations and checkpoints. The images are random: no figure depends on their values.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import hotloop
from bench.claim import ROOT, write_claim
from bench.speed.models import build
from bench.speed.workloads import WORKLOADS
from hotloop.tuning.races.statistics import ratio_of

GOALS = {"W4": 2.0, "W1": 1.2}
"""Trials an hour, packed over unpacked under the fastest plan, on two cores."""

SAMPLES = {"W4": 30_000, "W1": 3_000}

FORMS = ("packed", "rules", "fastest")


def task(name: str = "W4", lr: float = 0.01, samples: int = 60_000, epochs: int = 3) -> hotloop.Task:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 1, 28, 28, generator=generator)
    y = torch.randint(10, (samples,), generator=generator)
    return hotloop.Task(
        model=lambda: build(name),
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=lr),
        data=(x, y),
        validation=0.1,
        batch_size=WORKLOADS[name].batch,
        epochs=epochs,
        name=name,
    )


def run_study(name: str, options: argparse.Namespace, folder: Path, *arguments: str) -> float:
    """Runs a study in a new folder and returns its seconds."""
    fixed = {"name": name, "samples": options.samples or SAMPLES.get(name, 6_000), "epochs": options.epochs}
    params = [part for key, value in fixed.items() for part in ("-p", f"{key}={value}")]
    command = [sys.executable, "-m", "hotloop", "study", "bench.packed:task", "-p", "lr=1e-4..1e-1:log", *params]
    command += ["--trials", str(options.trials), "--round", str(options.trials), "--sampler", "random"]
    began = time.perf_counter()
    subprocess.run([*command, "--study", str(folder), *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def find_plan(name: str, options: argparse.Namespace, folder: Path) -> Path:
    """Returns the file of the fastest proven plan; a later study has the plan from the user's cache."""
    run_study(name, options, folder / "search", "--plan", "auto")
    (plan,) = (folder / "search/plans").glob("*.toml")
    return plan


def compare(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Returns the seconds of each form's studies, trials an hour, and the ratios with their intervals."""
    plan = find_plan(name, options, folder)
    settings = {"packed": ("--pack", str(options.trials)), "rules": (), "fastest": ("--plan", str(plan))}
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    for pair in range(options.pairs):
        for form in FORMS[pair % 3 :] + FORMS[: pair % 3]:
            seconds[form].append(run_study(name, options, folder / f"{form}-{pair}", *settings[form]))
            print(f"{name} {form} {seconds[form][-1]:.1f}s", flush=True)
    trials = json.loads(
        subprocess.run(
            [sys.executable, "-m", "hotloop", "study", "--resume", str(folder / "packed-0"), "--json"],
            cwd=ROOT, check=True, capture_output=True, text=True,
        ).stdout
    )["trials"]  # fmt: skip
    ratios = {form: asdict(ratio_of(seconds[form], seconds["packed"])) for form in ("rules", "fastest")}
    return {
        "goal": GOALS.get(name),
        "trials_per_hour": {
            form: 3600 * options.trials / sorted(times)[len(times) // 2] for form, times in seconds.items()
        },
        "packed_over": ratios,
        "seconds": seconds,
        "fastest_plan": plan.read_text(),
        "packed_trials": sum(bool(trial["packed"]) for trial in trials),
        "reasons_alone": sorted({trial["alone"] for trial in trials if trial["alone"]}),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=list(GOALS))
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, help="default " + str(SAMPLES))
    parser.add_argument("--pairs", type=int, default=3, help="8 pairs give an interval of 99 %%")
    parser.add_argument("--search", action="store_true", help="find the fastest plans alone")
    parser.add_argument("--record", action="store_true", help="write a claim")
    options = parser.parse_args()
    found = {}
    for name in options.workloads:
        with tempfile.TemporaryDirectory(prefix="packed-") as folder:
            if options.search:
                print(name, find_plan(name, options, Path(folder)).read_text(), flush=True)
            else:
                found[name] = compare(name, options, Path(folder))
    if options.search:
        return 0
    settings = {key: getattr(options, key) for key in ("trials", "epochs", "samples", "pairs")}
    figures = {**settings, "load_average": os.getloadavg(), "workloads": found}
    print(json.dumps(figures, indent=2))
    if options.record:
        print(write_claim("packed-trials", f"python -m bench.packed {' '.join(sys.argv[1:])}", None, figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
