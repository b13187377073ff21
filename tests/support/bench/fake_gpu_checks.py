"""Checks that pass, fail, hang and crash, for tests of what runs the real ones; each part notes that it began."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench.gpu.setting import Result, Setting, Skipped


def run(part: str, setting: Setting) -> Result:
    with (setting.scratch / "begun").open("a") as file:
        file.write(f"{part} {os.getpid()}\n")
    return PARTS[part.partition("-")[0]](setting)


def passes(setting: Setting) -> Result:
    return Result("fine", {"device": setting.device})


def measures(setting: Setting) -> Result:
    row = {"network": "mlp", "parameters": 10, "batch": 8, "device": "cpu", "plan": "baseline", "step_ms": 0.5}
    return Result("0.5 ms", {"rows": [{**row, "windows": 5}, {**row, "device": "cuda", "step_ms": 0.25, "windows": 5}]})


def judges(setting: Setting) -> Result:
    print("what it printed")
    return Result("a figure", {"value": 3}, "the figure is wrong")


def raises(setting: Setting) -> Result:
    raise ValueError("a fault that was planted")


def skips(setting: Setting) -> Result:
    raise Skipped("there is one GPU")


def crashes(setting: Setting) -> Result:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def sleeps(setting: Setting) -> Result:
    started = [sys.executable, "-c", "import time; time.sleep(600)"]
    process = subprocess.Popen(started, start_new_session=True)
    (setting.scratch / "started").write_text(str(process.pid))
    wait_for_ever()
    raise AssertionError


def wait_for_ever() -> None:
    while True:
        time.sleep(0.1)


PARTS = {
    "passes": passes,
    "measures": measures,
    "judges": judges,
    "raises": raises,
    "skips": skips,
    "crashes": crashes,
    "sleeps": sleeps,
}

BEGUN = "begun"


def begun(scratch: Path) -> list[str]:
    """Names of parts in the order in which they began."""
    return [line.split()[0] for line in lines(scratch)]


def lines(scratch: Path) -> list[str]:
    path = scratch / BEGUN
    return path.read_text().splitlines() if path.exists() else []
