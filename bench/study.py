"""How many trials an hour does `hotloop study` train, and is its best value as good as that of Optuna with a plain loop?

    python -m bench.study --record                       about five minutes of a quiet machine with two cores
    python -m bench.study --trials 2 --pairs 1 --pair-trials 2 --samples 2000
    python -m bench.study --pair-trials 24 --epochs 8 --plan auto --networks cnn --record     a study of longer trials

First a study of Fashion-MNIST with its winner. Then, for each network, `hotloop study` and `bench/study_loop.py` in turn,
the first of a pair alternating: the same space, sampler, seed, number of trials and epochs. A time is that of the whole
process, from its start to its end, with an empty cache: `--plan auto` compiles and proves the plan of each shape in that time. The networks are W4 (`mlp`) and W1 (`cnn`) of `bench.speed`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from bench.claim import ROOT, write_claim

TASK = ROOT / "bench" / "study_task.py"
SPACE = ("lr=1e-3..1:log", "width=64,128", "dropout=0.0..0.5")
SAMPLES = {"mlp": 55_000, "cnn": 8_000}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=40, help="of the study of Fashion-MNIST; 0 for none")
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--pair-trials", type=int, default=16)
    parser.add_argument("--networks", nargs="+", choices=sorted(SAMPLES), default=list(SAMPLES))
    parser.add_argument("--samples", type=int, help="training samples; default " + str(SAMPLES))
    parser.add_argument("--epochs", type=int, default=2, help="of each trial; default 2")
    parser.add_argument("--plan", default="", help="of hotloop's trials; default: the rules' plan")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--record", action="store_true", help="write the figures to claims/")
    options = parser.parse_args()
    began = time.monotonic()
    figures: dict[str, Any] = {
        "epochs": options.epochs,
        "space": list(SPACE),
        "jobs": options.jobs,
        "plan": options.plan,
    }
    if options.trials:
        search = Search(
            "mlp", options.samples or SAMPLES["mlp"], options.trials, options.epochs, options.jobs, options.plan
        )
        figures["fashion_mnist"] = fashion = hotloop_study(search, seed=0)
        print(f"Fashion-MNIST: {fashion}", flush=True)
    for net in options.networks:
        samples = options.samples or SAMPLES[net]
        search = Search(net, samples, options.pair_trials, options.epochs, options.jobs, options.plan)
        pairs = [pair(search, number) for number in range(options.pairs)]
        figures[net] = summary(pairs) | {"samples": samples, "trials": options.pair_trials, "pairs": pairs}
        print(f"{net}: {summary(pairs)}", flush=True)
    figures["minutes"] = round((time.monotonic() - began) / 60, 1)
    if options.record:
        print(write_claim("study", shlex.join(["python", "-m", "bench.study", *sys.argv[1:]]), None, figures))
    return 0


@dataclass(frozen=True)
class Search:
    """What both sides search; `jobs` and `plan` are hotloop's, and an empty plan is the rules' plan."""

    net: str
    samples: int
    trials: int
    epochs: int
    jobs: int
    plan: str


def pair(search: Search, number: int) -> dict[str, Any]:
    """Runs both sides once, the first one by the number of the pair."""
    sides = {"hotloop": lambda: hotloop_study(search, number), "plain_loop": lambda: plain_loop(search, number)}
    names = list(sides) if number % 2 == 0 else list(sides)[::-1]
    found = {name: sides[name]() for name in names}
    ratio = found["plain_loop"]["seconds"] / found["hotloop"]["seconds"]
    print(f"{search.net}, pair {number + 1}: {ratio:.2f} times as many trials an hour as the plain loop", flush=True)
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


def hotloop_study(search: Search, seed: int) -> dict[str, Any]:
    space = [*SPACE, f"net={search.net}", f"samples={search.samples}", f"epochs={search.epochs}"]
    with tempfile.TemporaryDirectory() as folder:
        arguments = [text for value in space for text in ("-p", value)]
        numbers = ["--trials", str(search.trials), "--jobs", str(search.jobs), "--seed", str(seed)]
        plan = ["--plan", search.plan] if search.plan else []
        command = [
            "-m",
            "hotloop",
            "study",
            str(TASK),
            *arguments,
            *numbers,
            *plan,
            "--study",
            f"{folder}/study",
            "--json",
        ]
        output, seconds = timed(command)
    found = json.loads(output)
    winner = found["trials"][found["best"]]
    states = [one["state"] for one in found["trials"]]
    return {
        **times(search.trials, seconds),
        "value": winner["value"],
        "params": {name: winner["params"][name] for name in ("lr", "width", "dropout")},
        "failed": states.count("failed"),
        "exact": found["exact"],
    }


def plain_loop(search: Search, seed: int) -> dict[str, Any]:
    script = str(ROOT / "bench" / "study_loop.py")
    output, seconds = timed([script, search.net, *map(str, (search.samples, search.epochs, search.trials, seed))])
    return times(search.trials, seconds) | json.loads(output.splitlines()[-1])


def times(trials: int, seconds: float) -> dict[str, Any]:
    return {"trials": trials, "seconds": round(seconds, 2), "trials_an_hour": round(3600 * trials / seconds)}


def timed(arguments: list[str]) -> tuple[str, float]:
    """Runs Python with torch's own number of threads and an empty cache; returns the output and the time in seconds."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    with tempfile.TemporaryDirectory() as cache:
        environment |= {"XDG_CACHE_HOME": cache, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        return done.stdout, time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
