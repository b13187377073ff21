"""How many trials an hour does `hotloop study` train, and is its best value as good as that of Optuna with a plain loop?

    python -m bench.study --record                       about five minutes of a quiet machine with two cores
    python -m bench.study --trials 2 --pairs 1 --pair-trials 2 --samples 2000

First a study of Fashion-MNIST with its winner. Then, for each network, `hotloop study` and `bench/study_loop.py` in turn,
the first of a pair alternating: the same space, sampler, seed, number of trials and epochs. A time is that of the whole
process, from its start to its end. The networks are W4 (`mlp`) and W1 (`cnn`) of `bench.speed`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from bench.claim import ROOT, write_claim

TASK = ROOT / "bench" / "study_task.py"
SPACE = ("lr=1e-3..1:log", "width=64,128", "dropout=0.0..0.5")
SAMPLES = {"mlp": 55_000, "cnn": 8_000}
EPOCHS = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=40, help="of the study of Fashion-MNIST")
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--pair-trials", type=int, default=16)
    parser.add_argument("--networks", nargs="+", choices=sorted(SAMPLES), default=list(SAMPLES))
    parser.add_argument("--samples", type=int, help="training samples; default " + str(SAMPLES))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--record", action="store_true", help="write the figures to claims/")
    options = parser.parse_args()
    began = time.monotonic()
    fashion = hotloop_study("mlp", options.samples or SAMPLES["mlp"], options.trials, options.jobs, seed=0)
    print(f"Fashion-MNIST: {fashion}", flush=True)
    figures: dict[str, Any] = {"epochs": EPOCHS, "space": list(SPACE), "jobs": options.jobs, "fashion_mnist": fashion}
    for net in options.networks:
        samples = options.samples or SAMPLES[net]
        pairs = [pair(net, samples, options.pair_trials, options.jobs, number) for number in range(options.pairs)]
        figures[net] = summary(pairs) | {"samples": samples, "trials": options.pair_trials, "pairs": pairs}
        print(f"{net}: {summary(pairs)}", flush=True)
    figures["minutes"] = round((time.monotonic() - began) / 60, 1)
    if options.record:
        command = f"python -m bench.study --trials {options.trials} --pairs {options.pairs} --pair-trials {options.pair_trials}"
        command += "" if options.samples is None else f" --samples {options.samples}"
        print(write_claim("study", command, None, figures))
    return 0


def pair(net: str, samples: int, trials: int, jobs: int, number: int) -> dict[str, Any]:
    """Runs both sides once, the first one by the number of the pair."""
    sides = {
        "hotloop": lambda: hotloop_study(net, samples, trials, jobs, seed=number),
        "plain_loop": lambda: plain_loop(net, samples, trials, seed=number),
    }
    names = list(sides) if number % 2 == 0 else list(sides)[::-1]
    found = {name: sides[name]() for name in names}
    ratio = found["plain_loop"]["seconds"] / found["hotloop"]["seconds"]
    print(f"{net}, pair {number + 1}: {ratio:.2f} times as many trials an hour as the plain loop", flush=True)
    return {"first": names[0], "ratio": round(ratio, 3), **found}


def summary(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    ratios = [one["ratio"] for one in pairs]
    values = [one["hotloop"]["value"] - one["plain_loop"]["value"] for one in pairs]
    return {
        "ratio_of_trials_an_hour": round(statistics.median(ratios), 3),
        "ratio_lowest": min(ratios),
        "ratio_highest": max(ratios),
        "trials_an_hour": round(statistics.median(one["hotloop"]["trials_an_hour"] for one in pairs)),
        "trials_an_hour_of_the_plain_loop": round(
            statistics.median(one["plain_loop"]["trials_an_hour"] for one in pairs)
        ),
        "best_validation_loss_less_that_of_the_plain_loop": round(statistics.median(values), 4),
    }


def hotloop_study(net: str, samples: int, trials: int, jobs: int, seed: int) -> dict[str, Any]:
    space = [*SPACE, f"net={net}", f"samples={samples}", f"epochs={EPOCHS}"]
    with tempfile.TemporaryDirectory() as folder:
        arguments = [text for value in space for text in ("-p", value)]
        numbers = ["--trials", str(trials), "--jobs", str(jobs), "--seed", str(seed)]
        command = ["-m", "hotloop", "study", str(TASK), *arguments, *numbers, "--study", f"{folder}/study", "--json"]
        output, seconds = timed(command)
    found = json.loads(output)
    winner = found["trials"][found["best"]]
    states = [one["state"] for one in found["trials"]]
    return {
        **times(trials, seconds),
        "value": winner["value"],
        "params": {name: winner["params"][name] for name in ("lr", "width", "dropout")},
        "failed": states.count("failed"),
        "exact": found["exact"],
    }


def plain_loop(net: str, samples: int, trials: int, seed: int) -> dict[str, Any]:
    script = str(ROOT / "bench" / "study_loop.py")
    output, seconds = timed([script, net, *map(str, (samples, EPOCHS, trials, seed))])
    return times(trials, seconds) | json.loads(output.splitlines()[-1])


def times(trials: int, seconds: float) -> dict[str, Any]:
    return {"trials": trials, "seconds": round(seconds, 2), "trials_an_hour": round(3600 * trials / seconds)}


def timed(arguments: list[str]) -> tuple[str, float]:
    """Runs Python in a process with torch's own number of threads; returns the output and the time in seconds."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout, time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
