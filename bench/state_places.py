"""Kills trainings whose Task has state in one of 115 places, and compares what they end with bit by bit.

    OMP_NUM_THREADS=1 python -m bench.state_places                       about half an hour on 2 cores
    OMP_NUM_THREADS=1 python -m bench.state_places --places "a deque,a thread"

The Tasks are those of tests/support/tasks/state_places.py. Each is trained once without an interruption, with a rehearsal,
and once killed by SIGKILL some steps after a checkpoint, and resumed. The result is `equal`, or `announced` (`facts.exact`
is false and the end differs), or `unneeded` (false, and the end is equal), or `different`: nothing announced a difference.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.claim import write_claim
from hotloop.plan import BASELINE
from hotloop.training.run import Run
from tests.support.processes.forked_server import Process, Server
from tests.support.processes.resumed_training import disagreements
from tests.support.tasks.state_places import PLACES

FILE = Path("tests/support/tasks/state_places.py").resolve()
EVERY = 7
"""Steps from checkpoint to checkpoint; the Task has 12 steps an epoch and 48 in all."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", default=",".join(PLACES), help="names, separated by commas")
    parser.add_argument("--no-record", action="store_true", help="print the figures, write no claim")
    options = parser.parse_args()
    started, rounds, server = time.monotonic(), list[dict[str, Any]](), Server()
    with tempfile.TemporaryDirectory() as folder:
        for number, place in enumerate(options.places.split(",")):
            rounds.append(one_round(Path(folder) / str(number), place, server))
            print(json.dumps(rounds[-1]), flush=True)
    server.close()
    figures = {
        "n_places": len(rounds),
        "results": dict(Counter(one["result"] for one in rounds)),
        "rehearsals": dict(Counter(one["rehearsal"] for one in rounds)),
        "problems": [one["place"] for one in rounds if one["result"] in ("different", "failed")],
        "minutes": round((time.monotonic() - started) / 60, 1),
    }
    print(figures)
    if not options.no_record:
        write_claim("state-places", "python -m bench.state_places", BASELINE, {**figures, "rounds": rounds})
    return 1 if figures["problems"] else 0


def one_round(folder: Path, place: str, server: Server) -> dict[str, Any]:
    """A training that is killed and resumed, beside one that never is."""
    for name in ("whole", "killed"):
        (folder / name).mkdir(parents=True)
    whole, killed = folder / "whole" / "run", folder / "killed" / "run"
    output = _output(_start(server, whole, place, "--rehearse", "1"))
    process = _start(server, killed, place)
    _wait_for_kill(killed, process)
    process.kill()
    process.communicate()
    resumed = _output(server.start("train", "--resume", killed, **_surroundings(killed)))
    found: dict[str, Any] = {"place": place}
    try:
        differ = disagreements(whole, killed)
        rehearsed = Run.open(whole).record
        inexact = Run.open(killed).record.facts.inexact
    except Exception as error:
        return found | {"result": "failed", "rehearsal": "", "output": f"{output}\n{resumed}\n{error}"}
    rehearsal = "different" if not rehearsed.facts.exact else "same bits"
    if not any("rehearsed: " in line and "not rehearsed" not in line for line in rehearsed.rehearsals):
        rehearsal = "; ".join(rehearsed.rehearsals)
    result = ("announced" if inexact else "different") if differ else ("unneeded" if inexact else "equal")
    return found | {"result": result, "rehearsal": rehearsal, "differ": differ[:2], "inexact": inexact[:2]}


def _start(server: Server, run: Path, place: str, *more: str) -> Process:
    arguments = ["--run", str(run), "-p", f"place={place}", "-p", "slow_ms=10", "--checkpoint-every", str(EVERY)]
    return server.start("train", FILE, "--plan", "baseline", *arguments, *more, **_surroundings(run))


def _surroundings(run: Path) -> dict[str, Any]:
    return {"stderr": subprocess.STDOUT, "env": {**os.environ, "HOTLOOP_TEST_FOLDER": str(run.parent)}}


def _output(process: Process) -> str:
    return process.communicate(timeout=300)[0]


def _wait_for_kill(run: Path, process: Process) -> None:
    """Waits until some steps after a checkpoint are recorded."""
    steps = run / "steps.jsonl"
    while process.poll() is None:
        lines = steps.read_text().splitlines() if steps.exists() else []
        if (
            lines
            and int(json.loads(lines[-1])["step"]) > 2 * EVERY
            and json.loads(lines[-1])["step"] % EVERY in (2, 3, 4)
        ):
            return
        time.sleep(0.005)


if __name__ == "__main__":
    sys.exit(main())
