"""Kills real trainings of Tasks with state of several kinds, and compares what they end with bit by bit.

    OMP_NUM_THREADS=1 python -m bench.kill_kinds                     60 kills, in less than 10 minutes on 2 cores
    OMP_NUM_THREADS=1 python -m bench.kill_kinds --kinds gan --kills 6

The Tasks are those of tests/support/tasks/state_kinds.py. Each is trained once without an interruption, and once killed by SIGKILL about 6 times,
at moments of each sort (start-up, after a step, while a checkpoint is written, while the validation data is evaluated), and
resumed each time. State, history, best epoch and test figures must then be equal, or the run must have said before that they
may differ (`facts.exact` is false): `equal`, `announced` or `different`.
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
from tests.support.processes.forked_server import Server
from tests.support.processes.resumed_training import INSTANTS, Training, disagreements

KINDS = {
    "lookahead": ("lookahead", 0),
    "schedule_free": ("schedule_free", 0),
    "generators": ("generators", 0),
    "generators_2_workers": ("generators", 2),
    "thawing": ("thawing", 0),
    "gan": ("gan", 0),
    "gan_2_workers": ("gan", 2),
    "counters": ("counters", 0),
    "counters_2_workers": ("counters", 2),
    "module_counter": ("module_counter", 0),
}
"""By name: the function of tests/support/tasks/state_kinds.py, and worker processes of the training that is killed."""

FILE = Path("tests/support/tasks/state_kinds.py").resolve()
EVERY, EPOCHS = 5, 6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="names, separated by commas")
    parser.add_argument("--no-record", action="store_true", help="print the figures, write no claim")
    options = parser.parse_args()
    kinds, started, rounds, server = options.kinds.split(","), time.monotonic(), list[dict[str, Any]](), Server()
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(kinds):
            kills = options.kills // len(kinds) + (number < options.kills % len(kinds))
            draws = random.Random(f"{options.seed} {name}")
            rounds.append(one_round(Path(folder) / name, name, kills, draws, server))
            print(rounds[-1], flush=True)
    server.close()
    figures = summary(rounds) | {"seed": options.seed, "minutes": round((time.monotonic() - started) / 60, 1)}
    print(figures)
    if not options.no_record:
        command = f"python -m bench.kill_kinds --kills {options.kills} --seed {options.seed} --kinds {options.kinds}"
        print(write_claim("exact-resume-kinds", command, BASELINE, {**figures, "rounds": rounds}))
    return 1 if figures["problems"] else 0


def one_round(folder: Path, name: str, kills: int, draws: random.Random, server: Server) -> dict[str, Any]:
    """A training of the kind that is killed so many times, unless it comes to its end before, beside one that never is."""
    function, workers = KINDS[name]
    task = FILE.with_name(f"{FILE.name}:{function}")
    whole = Training(folder / "whole", EPOCHS, EVERY, task=task, server=server)
    whole.finish(fresh=False)
    training = Training(folder / "killed", EPOCHS, EVERY, workers, task=task, server=server)
    killed: list[str] = []
    problems = list(whole.problems)
    while not problems and len(killed) < kills:
        instant = draws.choice(INSTANTS)
        if not training.kill(instant, draws):
            break  # it came to its end
        killed.append(instant)
    problems += training.problems
    differ, inexact = list[str](), list[str]()
    if not problems:
        training.finish()  # a fresh process
        training.check_end()
        problems += training.problems
    if not problems:
        differ = disagreements(whole.run, training.run)
        inexact = Run.open(training.run).record.facts.inexact
        if differ and not inexact:
            problems.append(f"{name}: {len(differ)} differences that nothing announced, such as {differ[0]}")
    return {
        "kind": name,
        "workers": workers,
        "kills": len(killed),
        "instants": dict(Counter(killed)),
        "result": "failed" if problems and not differ else result(differ, inexact),
        "inexact": inexact,
        "steps": whole.marks("steps"),
        "steps_begun": training.marks("steps"),
        "problems": problems,
    }


def result(differ: list[str], inexact: list[str]) -> str:
    if not differ:
        return "equal"
    return "announced" if inexact else "different"


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """All rounds in a few figures."""
    instants: Counter[str] = sum((Counter(one["instants"]) for one in rounds), Counter())
    return {
        "n_kills": sum(one["kills"] for one in rounds),
        "n_trainings_compared": len(rounds),
        "instants": dict(instants),
        "checkpoint_every_steps": EVERY,
        "results": dict(Counter(one["result"] for one in rounds)),
        "problems": [problem for one in rounds for problem in one["problems"]],
    }


if __name__ == "__main__":
    sys.exit(main())
