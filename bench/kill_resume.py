"""Kills real trainings again and again, and compares what they end with bit by bit. Takes about a quarter of an hour.

    OMP_NUM_THREADS=1 python -m bench.kill_resume                 200 kills
    OMP_NUM_THREADS=1 python -m bench.kill_resume --kills 20

The Task is tests/support/tasks/full_state_task.py, which has all that training carries from step to step. One round is a training that is
killed about 20 times, at moments of each kind (start-up, after a step, while a checkpoint is written, while the
validation data is evaluated), resumed each time, and then compared with a training that was never interrupted: State,
history, best epoch, test figures. Every other round loads its data by two worker processes.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.claim import write_claim
from hotloop.plan import BASELINE
from hotloop.training.run import Run
from tests.support.processes.resumed_training import INSTANTS, Training, disagreements

KILLS_PER_ROUND, EVERY, EPOCHS = 20, 10, 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-record", action="store_true", help="print the figures, write no claim")
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        whole = Training(Path(folder) / "whole", EPOCHS, EVERY)
        whole.finish()
        assert whole.problems == [], whole.problems
        rounds = []
        while (left := options.kills - sum(round_["kills"] for round_ in rounds)) > 0:
            number = len(rounds)
            draws = random.Random(f"{options.seed} {number}")
            rounds.append(
                one_round(Path(folder) / str(number), whole, min(left, KILLS_PER_ROUND), draws, 2 * (number % 2))
            )
            print(f"round {number + 1}: {rounds[-1]}", flush=True)
    figures = summary(rounds) | {"seed": options.seed, "minutes": round((time.monotonic() - started) / 60, 1)}
    print(figures)
    if not options.no_record:
        command = f"python -m bench.kill_resume --kills {options.kills} --seed {options.seed}"
        print(write_claim("exact-resume", command, BASELINE, {**figures, "rounds": rounds}))
    return 1 if figures["problems"] else 0


def one_round(folder: Path, whole: Training, kills: int, draws: random.Random, workers: int) -> dict[str, Any]:
    """One training that is killed so many times, unless it comes to its end before."""
    training = Training(folder, EPOCHS, EVERY, workers)
    killed: list[str] = []
    while len(killed) < kills:
        instant = draws.choice(INSTANTS)
        if not training.kill(instant, draws):
            break  # it came to its end
        killed.append(instant)
    training.finish()
    if not training.problems:
        training.check_end()
        training.problems += disagreements(whole.run, training.run)
    resumes = [event for event in Run.open(training.run).journal() if event["event"] == "resume"]
    return {
        "workers": workers,
        "kills": len(killed),
        "instants": dict(Counter(killed)),
        "resumes": len(resumes),
        "steps": whole.marks("steps"),
        "steps_begun": training.marks("steps"),
        "most_repeated_by_a_resume": max((event["repeated_at_most"] for event in resumes), default=0),
        "workers_orphaned": len(training.orphans),
        "problems": training.problems,
    }


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """All rounds in a few figures."""
    instants: Counter[str] = sum((Counter(one["instants"]) for one in rounds), Counter())
    return {
        "n_kills": sum(one["kills"] for one in rounds),
        "n_trainings_compared": len(rounds),
        "instants": dict(instants),
        "checkpoint_every_steps": EVERY,
        "most_steps_repeated_by_a_resume": max(one["most_repeated_by_a_resume"] for one in rounds),
        "bitwise_equal": not any(one["problems"] for one in rounds),
        "problems": [problem for one in rounds for problem in one["problems"]],
    }


if __name__ == "__main__":
    sys.exit(main())
