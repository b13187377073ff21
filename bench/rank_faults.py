"""Real faults of real ranks and workers, again and again. Takes about half an hour for 20 repetitions.

    OMP_NUM_THREADS=1 python -m bench.rank_faults                          20 repetitions of each fault
    OMP_NUM_THREADS=1 python -m bench.rank_faults --repetitions 1
    OMP_NUM_THREADS=1 python -m bench.rank_faults --record --rows /tmp/rows.jsonl    # in pieces; call it again

The Task and the troubles are those of tests/multi/distributed/test_rank_failures.py (three ranks) and tests/multi/lowering/test_parameter_server.py (three
workers); here they come on a rank and in a step that are drawn. What must be so:

killed      the line names the rank, the ranks start again, and the end is bitwise that of a run without a fault
stopped     for 20 s: a line says for whom the others wait, and the end is bitwise the same
exception   the rank's own error ends the training in one line; resumed, the end is bitwise the same
memory      the same, and the error says that memory ran out
operation, operation in validation    a collective operation that one rank alone runs: one line names each rank's place
                                      within the timeout of 10 s; resumed, the end is bitwise the same
exception in validation               the rank's own error, with the place; resumed, the end is bitwise the same
worker killed, worker stopped    the others go on, and each sample counts once

A repetition that isn't over after 180 s has failed, too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

import hotloop
from bench.claim import write_claim
from hotloop.errors import HotloopError
from hotloop.lowering.parameter_server.workers.process_pool import ProcessPool
from hotloop.training.run import Run
from tests.multi.distributed import test_rank_failures as ranks
from tests.multi.lowering import test_parameter_server as workers
from tests.support.processes.resumed_training import disagreements

STEPS = 24
"""Of the ranks' whole training."""
STOPPED_S, LIMIT_S = 20, 180
"""How long a rank stands still, and after how long a training that isn't over has failed."""
TROUBLES: dict[str, Callable[[], Any]] = {
    "killed": ranks.kill,
    "stopped": partial(ranks.stop, STOPPED_S),
    "exception": ranks.raise_error,
    "memory": ranks.allocate,
    "operation": torch.distributed.barrier,
    "operation in validation": torch.distributed.barrier,
    "exception in validation": ranks.raise_error,
}
EVALUATING = ("operation in validation", "exception in validation")
TIMEOUT_S = 10
"""How long ranks wait for each other where one runs an operation of its own."""
SIGNALS = {"worker killed": signal.SIGKILL, "worker stopped": signal.SIGSTOP}
FAULTS = (*TROUBLES, *SIGNALS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=Path, help="a file to which each fault is written, and from which to go on")
    parser.add_argument("--at-most", type=int, help="faults in this call")
    parser.add_argument("--record", action="store_true", help="write a claim")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.rows.open()] if options.rows and options.rows.is_file() else []
    done = {(row["repetition"], row["fault"]) for row in rows}
    left = [(number, fault) for number in range(options.repetitions) for fault in FAULTS if (number, fault) not in done]
    with tempfile.TemporaryDirectory() as folder:
        whole = ranks.fit(Path(folder) / "whole", ranks.task(), progress=False).path
        for number, fault in left[: options.at_most]:
            draws = random.Random(f"{options.seed} {number} {fault}")
            own = Path(folder) / f"{fault} {number}"
            rows.append({"repetition": number, "fault": fault, **limited(own, fault, draws, whole)})
            print(json.dumps(rows[-1]), flush=True)
            if options.rows:
                with options.rows.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    if options.at_most is not None and len(left) > options.at_most:
        print("call it again to go on")
        return 0
    record = {fault: summary([row for row in rows if row["fault"] == fault]) for fault in FAULTS}
    print(json.dumps(record, indent=2))
    if options.record:
        command = f"python -m bench.rank_faults --repetitions {options.repetitions} --seed {options.seed} --record"
        figures = {"stopped_s": STOPPED_S, "faults": record, "rows": rows}
        print(write_claim("rank-faults", command, ranks.PLAN, figures))
    return 1 if any(row["problems"] for row in rows) else 0


def limited(folder: Path, fault: str, draws: random.Random, whole: Path) -> dict[str, Any]:
    """The same as `one`, in a fork: a training that isn't over in time has failed, and ends with all that it started."""
    began, found, said = time.monotonic(), folder.with_suffix(".json"), folder / "said"

    def train() -> None:
        found.write_text(json.dumps(one(folder, fault, draws, whole)))

    process = multiprocessing.get_context("fork").Process(target=train)
    process.start()
    process.join(LIMIT_S)
    if process.exitcode == 0:
        return dict(json.loads(found.read_text()))
    seen = f"ended with exit code {process.exitcode}" if process.exitcode is not None else given_up(process.pid)
    lines = said.read_text(errors="replace") if said.is_file() else ""
    return {"problems": [f"{seen}; it said {lines!r}"], "seconds": round(time.monotonic() - began, 1)}


def given_up(pid: int | None) -> str:
    """Kills a process and its descendants; says what they were at."""
    first = psutil.Process(pid)
    family = [first, *first.children(recursive=True)]
    seen = ", ".join(f"{one.pid} {one.status()} after {one.cpu_times().user:.0f} s of CPU" for one in family)
    for one in family:
        one.kill()
    return f"not over after {LIMIT_S} s: processes {seen}"


def one(folder: Path, fault: str, draws: random.Random, whole: Path) -> dict[str, Any]:
    """One training with one fault: where it came, how long it took, and what wasn't as it must be."""
    began = time.monotonic()
    folder.mkdir()
    found = of_ranks(folder, fault, draws, whole) if fault in TROUBLES else of_workers(fault, draws)
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def of_ranks(folder: Path, fault: str, draws: random.Random, whole: Path) -> dict[str, Any]:
    # A first rank that is stopped can't speak for the others, nor for itself.
    culprit, step = draws.randrange(fault == "stopped", ranks.PLAN.ranks or 1), draws.randint(2, STEPS - 1)
    marker, run, error = folder / "marker", folder / "run", ""
    given = ranks.task(TROUBLES[fault], marker, culprit, step, evaluating=fault in EVALUATING)
    waits: dict[str, Any] = {"rank_timeout": f"{TIMEOUT_S}s"} if fault.startswith("operation") else {}
    with heard(folder / "said") as said:
        try:
            ranks.fit(run, given, **waits)
        except HotloopError as raised:
            error = str(raised)
            hotloop.fit(given, run=run, resume=True, progress=False)
    lines = said()
    must = {
        "killed": f"rank {culprit} was killed (SIGKILL): all 3 start again from the last checkpoint (1 of 3)" in lines,
        "stopped": f"waiting for rank {culprit}: no sign of life" in lines and f"rank {culprit} goes on" in lines,
        "exception": error.startswith(f"rank {culprit}: ") and "ValueError: the culprit has had enough" in error,
        "operation": error.startswith("the ranks have waited ") and f"rank {culprit} in barrier, operation " in error,
        "exception in validation": error.startswith(f"rank {culprit}: validation after step "),
        "memory": error.startswith(f"rank {culprit}: step {step} ") and "ran out of memory" in error,
    }
    must["operation in validation"] = must["operation"] and "(evaluation, step " in error
    problems = [] if must[fault] else [f"it said {error or lines!r}"]
    problems += [] if marker.exists() else ["the fault never came"]
    problems += ["a traceback"] if "Traceback" in lines else []
    problems += disagreements(whole, run)
    resumed = [event["step"] for event in Run.open(run).journal() if event["event"] == "resume"]
    return {"rank": culprit, "step": step, "resumed_from": resumed, "problems": problems}


def of_workers(fault: str, draws: random.Random) -> dict[str, Any]:
    victim, updates, lines = draws.randrange(3), draws.randint(1, 20), list[str]()
    problems = []
    with workers.trained_by(3, workers.task(step_s=0.02), lines.append) as program:
        crew = program.feed.crew
        assert isinstance(crew, ProcessPool)
        program.advance(updates)
        os.kill(crew.pids()[victim], SIGNALS[fault])
        for _ in range(2):
            counted = workers.an_epoch(program)["samples"], sorted(program.feed.ledger.counted)
            if counted != (workers.SAMPLES, list(range(-(-workers.SAMPLES // workers.BATCH)))):
                problems.append(f"counted {counted}")
    if fault == "worker killed" and not any(
        line.startswith(f"worker {victim} was killed by SIGKILL") for line in lines
    ):
        problems.append(f"it said {lines}")
    return {"worker": victim, "update": updates, "problems": problems}


@contextmanager
def heard(path: Path) -> Iterator[Callable[[], str]]:
    """Keeps what this process and its forks write to stderr in a file; the function given reads it."""
    sys.stderr.flush()
    before = os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield lambda: path.read_text(errors="replace")
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How often a fault was put right, and how long such a training took."""
    seconds = sorted(row["seconds"] for row in rows)
    return {
        "n": len(rows),
        "as_it_must_be": sum(not row["problems"] for row in rows),
        "seconds": {"least": seconds[0], "median": seconds[len(seconds) // 2], "most": seconds[-1]} if rows else None,
        "problems": [problem for row in rows for problem in row["problems"]],
    }


if __name__ == "__main__":
    sys.exit(main())
