"""Measures `hotloop run` on scripts: paired runs with plain python, exit codes and output.

    python -m bench.run_scripts scripts.toml --pairs 3 --record
    python -m bench.run_scripts train.py other.py --pairs 3

A list in TOML has a table for each script: `[name]` with `script`, a path beside the list, and optionally `arguments` and `cwd`.
The two runs of a pair follow each other in random order. The ratio is python's time over hotloop's; the interval is that of
paired windows (95 %, from six pairs on). `equal` compares stdout byte for byte; `numbers` compares the text outside numbers
and gives the largest relative difference of a number.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.claim import write_claim
from hotloop.tuning.races.statistics import ratio_of

_NUMBER = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class Script:
    """A script with its arguments and working folder."""

    name: str
    path: Path
    arguments: tuple[str, ...]
    folder: Path


@dataclass(frozen=True)
class Outcome:
    """The end of one process."""

    seconds: float
    exit_code: int
    stdout: str


def read_scripts(paths: Sequence[Path]) -> list[Script]:
    """Returns the scripts of TOML lists and of files."""
    scripts = list[Script]()
    for path in paths:
        if path.suffix == ".toml":
            for name, entry in tomllib.loads(path.read_text(encoding="utf-8")).items():
                file = (path.parent / entry["script"]).resolve()
                folder = (path.parent / entry.get("cwd", file.parent)).resolve()
                scripts.append(Script(name, file, tuple(map(str, entry.get("arguments", ()))), folder))
        else:
            scripts.append(Script(path.stem, path.resolve(), (), path.resolve().parent))
    return scripts


def run(script: Script, command: Sequence[str]) -> Outcome:
    began = time.perf_counter()
    done = subprocess.run(command, cwd=script.folder, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    return Outcome(time.perf_counter() - began, done.returncode, done.stdout)


def differences(plain: str, hosted: str) -> tuple[bool, float]:
    """Returns whether the text outside numbers is equal, and the largest relative difference of a number."""
    if _NUMBER.split(plain) != _NUMBER.split(hosted):
        return False, math.inf
    pairs = zip(map(float, _NUMBER.findall(plain)), map(float, _NUMBER.findall(hosted)), strict=True)
    return True, max((abs(a - b) / max(abs(a), abs(b)) for a, b in pairs if a != b), default=0.0)


def measure(script: Script, pairs: int, options: Sequence[str]) -> dict[str, Any]:
    """Returns the figures of one script."""
    order = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        plain_command = [sys.executable, str(script.path), *script.arguments]
        hosted_command = [sys.executable, "-m", "hotloop", "run", str(script.path), "--record", str(record), *options]
        hosted_command += ["--", *script.arguments]
        outcomes: dict[str, list[Outcome]] = {"python": [], "hotloop": []}
        for _ in range(pairs):
            forms = [("python", plain_command), ("hotloop", hosted_command)]
            order.shuffle(forms)
            for form, command in forms:
                outcomes[form].append(run(script, command))
        summary = json.loads(record.read_text(encoding="utf-8"))
    plain, hosted = outcomes["python"], outcomes["hotloop"]
    ratio = ratio_of([one.seconds for one in plain], [one.seconds for one in hosted], confidence=0.95)
    same_text, largest = differences(plain[0].stdout, hosted[0].stdout)
    return {
        "script": script.name,
        "python_s": [one.seconds for one in plain],
        "hotloop_s": [one.seconds for one in hosted],
        "ratio": ratio.median,
        "low": ratio.low,
        "high": ratio.high,
        "exit_codes_equal": {one.exit_code for one in plain} == {one.exit_code for one in hosted},
        "stdout_equal": plain[0].stdout == hosted[0].stdout,
        "text_equal": same_text,
        "largest_difference": largest if math.isfinite(largest) else None,
        "step_ratio": summary["ratio"],
        "exchanged": [
            f"{part['kind']}: {part['name']}: {part['exchange']}" for part in summary["parts"] if part["used"]
        ],
        "not_exchanged": [
            f"{part['kind']}: {part['name']}: {part['reason']}" for part in summary["parts"] if not part["used"]
        ],
    }


def geometric_mean(ratios: Sequence[float]) -> float | None:
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", type=Path, nargs="+", help="scripts, or TOML lists of scripts")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--record", action="store_true", help="write a claim")
    arguments = parser.parse_args()
    options = ["--exact"] if arguments.exact else []
    rows = list[dict[str, Any]]()
    for script in read_scripts(arguments.scripts):
        row = measure(script, arguments.pairs, options)
        rows.append(row)
        print(json.dumps(row), flush=True)
    figures = {
        "scripts": rows,
        "geometric_mean": geometric_mean([row["ratio"] for row in rows]),
        "geometric_mean_with_exchange": geometric_mean([row["ratio"] for row in rows if row["exchanged"]]),
    }
    print(json.dumps({name: value for name, value in figures.items() if name != "scripts"}))
    if arguments.record:
        print(write_claim("run-scripts", f"python -m bench.run_scripts {' '.join(sys.argv[1:])}", None, figures))


if __name__ == "__main__":
    main()
