"""Whole scripts under `hotloop run` whose data set is read by workers: the same output, and no worker survives the script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

SCRIPTS = Path(__file__).parents[1] / "support/scripts"


@pytest.fixture
def jpegs(tmp_path: Path) -> Path:
    """A folder of files that take some milliseconds each."""
    generator = np.random.default_rng(0)
    for row in range(20):
        pixels = Image.fromarray(generator.integers(0, 255, (40, 40, 3), dtype=np.uint8))
        pixels.resize((500, 500)).save(tmp_path / f"{row:02}.jpg")
    return tmp_path


def script(*arguments: str, hosted: bool, record: Path | None = None) -> subprocess.Popen:
    command = [sys.executable, *(["-m", "hotloop", "run"] if hosted else []), str(SCRIPTS / "decoding_training.py")]
    command += (["--exact"] if hosted else []) + (["--record", str(record)] if record else [])
    command += (["--"] if hosted else []) + list(arguments)
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
@pytest.mark.few("plain")
@pytest.mark.parametrize("case", [(), ("--draw-at", "500"), ("--fail-at", "900")], ids=["plain", "draws", "fails"])
def test_a_script_prints_the_same(case: tuple[str, ...], jpegs: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ends = []
    for hosted in (False, True):
        process = script(str(jpegs), *case, hosted=hosted, record=tmp_path / "record.json" if hosted else None)
        stdout, stderr = process.communicate()
        ends.append((process.returncode, stdout, stderr.partition("hotloop: ")[0]))
    assert ends[0] == ends[1] and ends[0][0] == (1 if "--fail-at" in case else 0)
    parts = json.loads((tmp_path / "record.json").read_text())["parts"]
    (part,) = [part for part in parts if part["kind"] == "workers"]
    assert part["proven"] >= 3 and part["proof"] == "bitwise"


@pytest.mark.slow
def test_a_killed_script_leaves_no_worker(jpegs: Path) -> None:
    process = script(str(jpegs), "--epochs", "50", hosted=True)
    until, workers = time.monotonic() + 120, []
    while not workers and time.monotonic() < until and process.poll() is None:
        time.sleep(0.1)
        scripts = psutil.Process(process.pid).children()
        workers = scripts[0].children() if scripts else []
    assert workers
    scripts[0].kill()
    process.communicate()
    _, alive = psutil.wait_procs(workers, 20)
    assert not alive
