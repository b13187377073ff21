"""Two machines with two ranks each; one of them is killed, and comes back. Linux, as root: they are network namespaces.

    OMP_NUM_THREADS=1 python -m bench.two_nodes                     3 times
    OMP_NUM_THREADS=1 python -m bench.two_nodes --repetitions 1 --no-record

Each machine has a network interface of its own and the user's torchrun (c10d rendezvous on the first); both see one
folder. In some step all processes of the second are killed (SIGKILL), and later its torchrun is started anew.
What the run ends with is compared bit by bit with that of a run in which nothing was killed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.claim import write_claim
from hotloop.plan import Plan
from hotloop.training.run import Run
from tests.support.processes.resumed_training import disagreements

PLAN = Plan(parallel="data")
NODES, RANKS_EACH, PORT, LIMIT_S = (1, 2), 2, 29411, 300
BACK_AFTER_S = 5.0

TASK = """
import time

import torch
from torch import nn

import hotloop

x = torch.randn(92, 6, generator=torch.Generator().manual_seed(1))


def loss(output, target):
    time.sleep(0.1)  # so that the training lasts until it is killed
    return nn.functional.cross_entropy(output, target)


def task():
    return hotloop.Task(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)),
        loss=loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        data=(x, x[:, :3].argmax(1)),
        validation=0.1,
        batch_size=20,
        epochs=12,
    )
"""


@contextmanager
def machines() -> Iterator[None]:
    """Two network namespaces, joined by a cable."""
    made = [["netns", "add", f"hotloop{node}"] for node in NODES]
    cable = ["link", "add", "hot1", "netns", "hotloop1", "type", "veth", "peer", "name", "hot2", "netns", "hotloop2"]
    try:
        for command in [*made, cable]:
            subprocess.run(["ip", *command], check=True)
        for node in NODES:
            inside = ["ip", "-n", f"hotloop{node}"]
            subprocess.run([*inside, "addr", "add", f"10.9.0.{node}/24", "dev", f"hot{node}"], check=True)
            for device in ("lo", f"hot{node}"):
                subprocess.run([*inside, "link", "set", device, "up"], check=True)
        yield
    finally:
        for node in NODES:
            subprocess.run(["ip", "netns", "del", f"hotloop{node}"], check=False)


def torchrun(node: int, folder: Path) -> subprocess.Popen[bytes]:
    """The user's own, on one machine."""
    options = {
        "nnodes": 2,
        "nproc-per-node": RANKS_EACH,
        "max-restarts": 3,
        "rdzv-backend": "c10d",
        "rdzv-id": folder.name,
        "rdzv-endpoint": f"10.9.0.1:{PORT}",
        "rdzv-conf": f"is_host={int(node == 1)}",
        "local-addr": f"10.9.0.{node}",
    }
    words = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    hotloop = ["hotloop", "train", "task.py", "--set", "parallel=data", "--run", "run", "--checkpoint-every", "5"]
    with (folder / f"node{node}.log").open("ab") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", f"hotloop{node}", sys.executable, "-m", "torch.distributed.run", *words]
            + ["-m", "--", *hotloop, "--device", "cpu"],
            cwd=folder,
            env={**os.environ, "GLOO_SOCKET_IFNAME": f"hot{node}", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=log,
            stderr=log,
        )


def train(folder: Path, kill_at: int | None = None) -> dict[str, Any]:
    """One training on both; the second is killed in that step, and comes back.

    Raises:
        RuntimeError: a machine didn't come to a good end.
    """
    folder.mkdir()
    (folder / "task.py").write_text(TASK)
    agents = {node: torchrun(node, folder) for node in NODES}
    until = time.monotonic() + LIMIT_S
    found: dict[str, Any] = {}
    if kill_at is not None:
        while reached(folder / "run") < kill_at and time.monotonic() < until:
            time.sleep(0.05)
        for process in processes_of(2):
            os.kill(process, signal.SIGKILL)
        agents[2].wait()
        found["killed_at_step"] = reached(folder / "run")
        time.sleep(BACK_AFTER_S)
        agents[2] = torchrun(2, folder)
    codes = {}
    for node, agent in agents.items():
        try:
            codes[node] = agent.wait(max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            agent.kill()
            codes[node] = agent.wait()
    if any(codes.values()):
        logs = "\n".join(log.read_text()[-1500:] for log in sorted(folder.glob("node*.log")))
        raise RuntimeError(f"exit codes by machine: {codes}\n{logs}")
    return found


def reached(run: Path) -> int:
    return Run.open(run).reached() if (run / "run.json").is_file() else 0


def processes_of(node: int) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", f"hotloop{node}"], stdout=subprocess.PIPE, check=True)
    return [int(line) for line in listed.stdout.split()]


def resumed_from(run: Path) -> list[int]:
    return [event["step"] for event in Run.open(run).journal() if event["event"] == "resume"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--no-record", action="store_true", help="print the figures, write no claim")
    options = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("ip") is None:
        print("two_nodes needs root and `ip` (iproute2) to make network namespaces", file=sys.stderr)
        return 1
    draws, rounds = random.Random(0), []
    with machines(), tempfile.TemporaryDirectory() as folder:
        train(Path(folder) / "whole")
        for number in range(options.repetitions):
            place = Path(folder) / f"killed{number}"
            one = train(place, kill_at=draws.randint(11, 40))
            one |= {"resumed_from_step": resumed_from(place / "run")}
            one |= {"disagreements": disagreements(Path(folder) / "whole" / "run", place / "run")}
            rounds.append(one)
            print(one, file=sys.stderr, flush=True)
    bad = [one for one in rounds if one["disagreements"] or len(one["resumed_from_step"]) != 1]
    if not options.no_record:
        figures = {"machines": len(NODES), "ranks_each": RANKS_EACH, "rounds": rounds, "failed": len(bad)}
        command = f"OMP_NUM_THREADS=1 python -m bench.two_nodes --repetitions {options.repetitions}"
        print(write_claim("two-nodes", command, PLAN, figures))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
