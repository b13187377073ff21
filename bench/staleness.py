"""What stale gradients do to a training, and what dividing the step size by their staleness does about it.

    OMP_NUM_THREADS=1 python -m bench.staleness --minutes 2.5    # again and again, until it says that all is done
    OMP_NUM_THREADS=1 python -m bench.staleness --seeds 1 --epochs 2 --no-record

Figure 3 of Zhang et al. (2015, arXiv 1511.05950) in small: 30 workers, simulated in virtual time, train a small CNN on
Fashion-MNIST. Step size, momentum, batch size, order of the data and initial weights are the same for all.

The step size was chosen by trying (seed 0, three or four epochs), so that one worker and 30 with a divided step size both
learn. With one that is much smaller, 30 workers are behind one after the same epochs, since they move 30 times less far;
with one that is much larger, dividing it by the staleness isn't enough either.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import torch
from torch import nn

import hotloop
from bench.claim import CLAIMS, write_claim
from hotloop.errors import NonFiniteError
from hotloop.lowering.evaluation import evaluate
from hotloop.lowering.parameter_server.server import StalenessPolicy
from hotloop.lowering.parameter_server.server_program import ParameterServerProgram
from hotloop.lowering.parameter_server.workers.simulation import UniformTimes, simulate_training, simulated_workers
from hotloop.plan import BASELINE
from hotloop.report.html import style_figure
from hotloop.training.checkpoint import Checkpoint, CheckpointFolder

WORKERS = 30
RATE, MOMENTUM, BATCH = 0.02, 0.9, 16
CHANCE = 0.1
"""Accuracy of a guess among ten classes of the same size."""

ARMS: dict[str, tuple[int, StalenessPolicy]] = {
    "one worker": (1, StalenessPolicy()),
    "30 workers, fixed step size": (WORKERS, StalenessPolicy(divide=False)),
    "30 workers, step size divided by the staleness": (WORKERS, StalenessPolicy()),
}
COLOURS = ("#616e7c", "#d9622b", "#3566b8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--minutes", type=float, help="stop after about so long; call it again to go on")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "hotloop-staleness")
    parser.add_argument("--no-record", action="store_true", help="print the figures, write no claim")
    options = parser.parse_args()
    end = time.monotonic() + 60 * (options.minutes or 1e6)
    for seed in range(options.seeds):
        for arm in ARMS:
            for row in epochs(arm, seed, options.epochs, options.work):
                print(f"seed {seed}  {arm}: epoch {row['epoch']}  accuracy {row['accuracy']:.3f}", flush=True)
                if time.monotonic() > end:
                    print("call it again to go on")
                    return 0
    figures = {arm: [rows_of(options.work, arm, seed) for seed in range(options.seeds)] for arm in ARMS}
    record = summary(figures, options.epochs)
    print(json.dumps({arm: found["final"] for arm, found in record["arms"].items()}, indent=2))
    if not options.no_record:
        folder = write_claim("staleness", f"python -m bench.staleness --seeds {options.seeds}", BASELINE, record)
        picture(figures, options.epochs).write_html(folder / "staleness.html", include_plotlyjs="cdn")
        print(f"written to {folder.relative_to(CLAIMS.parent)}")
    shutil.rmtree(options.work)
    return 0


def task(seed: int) -> hotloop.Task:
    return hotloop.Task(
        model=lambda: nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 5 * 5, 10),
        ),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM),
        data=hotloop.data.fashion_mnist(),
        batch_size=BATCH,
        seed=seed,
    )


def epochs(arm: str, seed: int, count: int, work: Path) -> Iterator[dict[str, Any]]:
    """Trains on from the last epoch in `work`; each epoch begins with new workers, so that a pause changes nothing."""
    rows = rows_of(work, arm, seed)
    if len(rows) >= count or (rows and rows[-1]["diverged"]):
        return
    workers, policy = ARMS[arm]
    kept = CheckpointFolder(folder_of(work, arm, seed), keep=1)
    program = simulate_training(task(seed), workers=workers, policy=policy)
    if (found := kept.newest()) is not None:
        program.restore(found[0].state)
    for epoch in range(len(rows), count):
        program.set_workers(simulated_workers(task(seed), workers, UniformTimes(seed=seed * 1000 + epoch)))
        row = one_epoch(program, epoch)
        kept.save(Checkpoint(program.state()))
        with (kept.folder / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        yield row
        if row["diverged"]:
            return


def one_epoch(program: ParameterServerProgram, epoch: int) -> dict[str, Any]:
    before = program.staleness
    diverged = False
    try:
        while not program.advance(100).ended:
            pass
    except NonFiniteError:
        diverged = True
    validation = program.parts.splits.validation
    assert validation is not None
    accuracy = CHANCE if diverged else evaluate(program, validation).values["accuracy"]
    counts = {late: n - before.get(late, 0) for late, n in program.staleness.items()}
    mean = sum(late * n for late, n in counts.items()) / sum(counts.values())
    if not diverged:
        program.end_epoch()
    return {"epoch": epoch + 1, "accuracy": accuracy, "diverged": diverged, "mean_staleness": mean}


def folder_of(work: Path, arm: str, seed: int) -> Path:
    folder = work / f"{list(ARMS).index(arm)}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def rows_of(work: Path, arm: str, seed: int) -> list[dict[str, Any]]:
    path = folder_of(work, arm, seed) / "rows.jsonl"
    return [json.loads(line) for line in path.open()] if path.is_file() else []


def summary(figures: dict[str, list[list[dict[str, Any]]]], count: int) -> dict[str, Any]:
    arms = {}
    for arm, runs in figures.items():
        final = [run[-1]["accuracy"] for run in runs]
        arms[arm] = {
            "final": {"median": statistics.median(final), "least": min(final), "most": max(final), "n": len(final)},
            "diverged": sum(run[-1]["diverged"] for run in runs),
            "mean_staleness": statistics.mean(row["mean_staleness"] for run in runs for row in run),
            "accuracy": [[row["accuracy"] for row in run] for run in runs],
        }
    return {
        "what": "accuracy on the 5,000 held-out images of Fashion-MNIST's training data, after each epoch",
        "settings": {
            "step_size": RATE,
            "momentum": MOMENTUM,
            "batch_size": BATCH,
            "epochs": count,
            "step_size_chosen": "by trying 0.005 to 0.05, and batches of 16 and 64, on seed 0, so that the first and the last arm learn",
            "times": "uniform within 20 % of their mean, drawn anew for each batch",
        },
        "arms": arms,
    }


def picture(figures: dict[str, list[list[dict[str, Any]]]], count: int) -> go.Figure:
    figure = go.Figure()
    for (arm, runs), colour in zip(figures.items(), COLOURS, strict=True):
        for number, run in enumerate(runs):
            figure.add_scatter(
                x=[row["epoch"] for row in run],
                y=[row["accuracy"] for row in run],
                name=arm,
                legendgroup=arm,
                showlegend=number == 0,
                mode="lines+markers",
                line={"color": colour},
            )
    figure.add_hline(y=CHANCE, line={"dash": "dot", "color": "#9aa5b1"}, annotation_text="chance")
    figure.update_xaxes(title_text="epoch", dtick=1)
    figure.update_yaxes(title_text="accuracy on held-out images", range=[0, 1])
    note = f"a small CNN on Fashion-MNIST, virtual time, SGD {RATE} with momentum {MOMENTUM}, a line per seed"
    style_figure(figure, "30 asynchronous workers, with and without dividing the step size by the staleness", note)
    return figure.update_layout(height=520, legend={"orientation": "h", "y": -0.2})


if __name__ == "__main__":
    sys.exit(main())
