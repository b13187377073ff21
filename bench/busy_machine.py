"""What advise, tune, race, auto and run print and store beside other busy programs. Takes about ten minutes.

    python -m bench.busy_machine
    python -m bench.busy_machine --busy 4 --repetitions 1 --no-record

Each command runs in a cache folder of its own while 1 and then 4 processes use as much of the cores as the system gives them. A
command is right if it prints no sure word without saying that the machine was busy, and if it stores no result of a race, a search,
a speed or a prediction.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.claim import write_claim
from hotloop.plan import BASELINE

TASK = """
import torch
from torch import nn
import hotloop

x = torch.randn(20_000, 64, generator=torch.Generator().manual_seed(0))
task = hotloop.Task(
    model=lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)),
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3, foreach=False),
    data=(x, x[:, :10].argmax(1)),
    batch_size=64,
    epochs=60,
)
"""
SCRIPT = """
import torch
from torch import nn

x = torch.randn(20_000, 64, generator=torch.Generator().manual_seed(0))
y = x[:, :10].argmax(1)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
for step in range(12_000):
    rows = torch.randint(0, len(x), (64,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
    optimizer.step()
"""
COMMANDS: dict[str, list[str]] = {
    "advise": ["advise", "task.py"],
    "tune": ["tune", "task.py", "--time-limit", "20s"],
    "race": ["race", "task.py", "--plans", "baseline,foreach.toml"],
    "auto": ["train", "task.py", "--plan", "auto", "--run", "run"],
    "run": ["run", "train.py"],
}
SURE = re.compile(r"\bsurely\b|\bwins\b|\bproven\b.*times as fast|times as fast.*\bproven\b|\d times as fast \(9\d %")
UNSURE = re.compile(r"busy|not sure|No sure|other programs")
NO_RESULTS = ("packages", "torchinductor")
"""Folders of the cache without measurements: compiled programs."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, nargs="*", default=[1, 4], help="numbers of busy processes")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=list(COMMANDS))
    parser.add_argument("--no-record", action="store_true", help="print the figures, write no claim")
    options = parser.parse_args()
    rows = []
    for number in options.busy:
        for name in options.only:
            for _ in range(options.repetitions):
                with busy_processes(number), tempfile.TemporaryDirectory() as folder:
                    rows.append({"busy": number, "command": name, **outcome(Path(folder), COMMANDS[name])})
                print({key: rows[-1][key] for key in ("busy", "command", "result", "stored")}, flush=True)
    figures = {"n": len(rows), "results": dict(Counter(row["result"] for row in rows)), "rows": rows}
    print(figures["results"])
    if not options.no_record:
        print(write_claim("busy-machine", "python -m bench.busy_machine", BASELINE, figures))
    return 1 if set(figures["results"]) != {"right"} else 0


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Runs so many processes that use a core each, as far as there are cores."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        time.sleep(1)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def outcome(folder: Path, command: list[str]) -> dict[str, Any]:
    """Runs a command; returns its sure and unsure lines, and the names of the results that it stored."""
    (folder / "task.py").write_text(TASK)
    (folder / "train.py").write_text(SCRIPT)
    (folder / "foreach.toml").write_text('optimizer = "foreach"\n')
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "200"}
    environment.pop("HOTLOOP_ACCEPT_LOAD", None)
    done = subprocess.run(
        [sys.executable, "-m", "hotloop", *command], cwd=folder, env=environment, capture_output=True, text=True
    )
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
    sure = [line for line in lines if SURE.search(line) and not UNSURE.search(line)]
    unsure = [line for line in lines if UNSURE.search(line)]
    cache = folder / "cache" / "hotloop"
    names = (path.relative_to(cache) for path in cache.rglob("*") if path.is_file())
    stored = sorted(
        name.as_posix() for name in names if name.parts[0] not in NO_RESULTS and not name.name.startswith("steps-")
    )
    result = "right"
    if done.returncode:
        result = f"exit code {done.returncode}"
    elif sure and not unsure:
        result = "a sure word"
    elif stored:
        result = "stored"
    return {"result": result, "stored": stored, "sure": sure, "unsure": unsure[:3]}


if __name__ == "__main__":
    sys.exit(main())
