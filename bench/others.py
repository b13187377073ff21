"""Does a profile see what happens in scripts that somebody else wrote, and leave them what they are?

    OMP_NUM_THREADS=1 python -m bench.others LISTING.toml [NAME ...] [--record]

A listing names scripts that lie beside it, unmodified, and how they are called:

    [[script]]
    name = "a small language model"       # what it is
    source = "github:owner/repository"    # where it is from, and at which commit
    folder = "repository"                 # in which it runs, relative to the listing
    command = ["train.py", "--epochs", "1"]
    results = ["out/*.pt"]                # files that it leaves, compared byte by byte
    environment = { PYTHONPATH = "data" } # paths relative to the listing
    varying = "[0-9.]+ ms"                # what differs in its output from run to run, such as times
    seconds = 60                          # after which it is stopped as by `hotloop profile --stop-after`

Each script runs alone, under `hotloop profile --json`, and alone once more. Its output (without what varies), its exit
code and its results must be the same; where two runs alone differ from each other, that is said instead.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.claim import CLAIMS, write_claim
from hotloop.core.format import format_milliseconds
from hotloop.plan import BASELINE
from hotloop.scripts.script_process import GRACE_S

_CLAIM = "profile-others"
_ATTRIBUTED = 0.95
_INTERRUPTED = "KeyboardInterrupt"
_STOPPED = (130, 1)
"""Exit codes of what Ctrl-C ended: the second where Python evaluated a text after it."""
_FIRST = 3
"""Remedies that are recorded."""


@dataclass(frozen=True)
class Script:
    """One script of a listing; see above."""

    name: str
    command: list[str]
    base: Path
    source: str = ""
    folder: str = "."
    results: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    varying: str = ""
    seconds: float | None = None

    @property
    def place(self) -> Path:
        return self.base / self.folder

    def variables(self) -> dict[str, str]:
        """The environment; a path of the listing's own comes before what is there."""
        own = dict(os.environ)
        for name, value in self.environment.items():
            beside = self.base / value
            path = [str(beside), *filter(None, [own.get(name)])] if beside.exists() else [value]
            own[name] = os.pathsep.join(path)
        return own


@dataclass(frozen=True)
class Ran:
    """What a run left behind."""

    output: list[str]
    exit_code: int
    results: dict[str, str]
    seconds: float


def listed(path: Path) -> list[Script]:
    return [Script(base=path.resolve().parent, **one) for one in tomllib.loads(path.read_text())["script"]]


def ran(script: Script, python: str, command: list[str], out: int = subprocess.STDOUT) -> tuple[Ran, str]:
    """Runs a command in the script's folder; returns what it left, and standard output where the script doesn't use it."""
    for path in _results(script):
        path.unlink()
    began = time.monotonic()
    process = subprocess.Popen(
        [python, *command],
        cwd=script.place,
        env=script.variables(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=out,
        text=True,
        errors="replace",
    )
    stdout, stderr = _said(process, script.seconds if command is script.command else None)
    seconds = time.monotonic() - began
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in _results(script)}
    output = re.sub(script.varying, "", stderr or stdout) if script.varying else stderr or stdout
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode  # as a shell gives it
    return Ran(output.splitlines(), code, hashes, seconds), stdout


def _said(process: subprocess.Popen[str], limit_s: float | None) -> tuple[str, str]:
    """What it wrote until its end; it is stopped after a while, if asked for, by the rule of `hotloop profile`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            return process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(number)
            limit_s = GRACE_S
    return process.communicate()


def _results(script: Script) -> list[Path]:
    return sorted(path for pattern in script.results for path in script.place.glob(pattern))


def watched(script: Script, python: str, steps: int) -> tuple[Ran, dict[str, Any]]:
    """Runs it under `hotloop profile --json`, where its own output goes to standard error."""
    options = ["--steps", str(steps), "--json"]
    options += ["--stop-after", f"{script.seconds}s"] if script.seconds else []
    command = ["-m", "hotloop", "profile", script.command[0], *options, "--", *script.command[1:]]
    left, stdout = ran(script, python, command, subprocess.PIPE)
    return left, json.loads(stdout)


def tried(script: Script, python: str, steps: int) -> dict[str, Any]:
    """All that is recorded of a script."""
    alone, _ = ran(script, python, script.command)
    under, profile = watched(script, python, steps)
    again, _ = ran(script, python, script.command)
    profile = _relative(profile, script)
    return {
        "name": script.name,
        "source": script.source,
        "command": script.command,
        "same": _same(alone, under, again),
        "interrupted": _INTERRUPTED in alone.output,
        "exit_code": [alone.exit_code, under.exit_code, again.exit_code],
        "seconds": {"alone": min(alone.seconds, again.seconds), "under": under.seconds},
        **{name: profile[name] for name in _KEPT},
        "remedies": [{name: one[name] for name in _SAID} for one in profile["remedies"] if not one["note"]][:_FIRST],
    }


_KEPT = ("step_ms", "steps", "step_where", "phases", "attributed", "bound", "overhead", "apart", "notes")
_SAID = ("cause", "where", "gain", "evidence")


def _relative(profile: dict[str, Any], script: Script) -> dict[str, Any]:
    """Without the folder that the listing lies in."""
    text = json.dumps(profile).replace(json.dumps(f"{script.base}{os.sep}")[1:-1], "")
    return json.loads(text.replace(json.dumps(sys.prefix)[1:-1], "(environment)"))


def _same(alone: Ran, under: Ran, again: Ran) -> dict[str, bool | None]:
    """Whether the profiler changed anything; None where two runs alone differ, too, or where there is nothing."""

    def judged(name: str) -> bool | None:
        first, seen, second = (getattr(one, name) for one in (alone, under, again))
        return _agree(seen, first) if _agree(first, second) and first else None

    return {name: judged(name) for name in ("output", "results")}


def _agree(one: Any, other: Any) -> bool:
    """Whether they are the same; of what was interrupted, as far as both go."""
    if isinstance(one, list) and (_INTERRUPTED in one or _INTERRUPTED in other):
        return all(a == b for a, b in zip(_before(one), _before(other), strict=False))
    return bool(one == other)


def _before(lines: list[str]) -> list[str]:
    """What it said before it was interrupted."""
    end = next((at for at, line in enumerate(lines) if line.startswith("Traceback")), len(lines))
    return lines[:end]


def wrong(one: dict[str, Any]) -> list[str]:
    """What isn't as it should be."""
    found = [f"its {what} differs under the profiler" for what, same in one["same"].items() if same is False]
    alone, under, again = one["exit_code"]
    usual = {0, *(_STOPPED if one["interrupted"] else ())}
    found += [f"alone it ends with exit code {code}" for code in sorted({alone, again} - usual)]
    if alone == again != under:
        found.append(f"its exit code is {under} instead of {alone}")
    if (one["attributed"] or 0.0) < _ATTRIBUTED:
        found.append(f"{one['attributed']} of the time is attributed")
    return found


def _line(one: dict[str, Any]) -> str:
    phases = ", ".join(f"{name} {ms:.3g}" for name, ms in sorted(one["phases"].items(), key=lambda item: -item[1]))
    overhead = (
        ""
        if one["overhead"] is None
        else "watched/clean {ratio:.3f} ({low:.3f} to {high:.3f})".format(**one["overhead"])
    )
    lines = [
        f"{one['name']}: {'; '.join(wrong(one)) or 'right'}",
        f"  {one['steps']} steps of {format_milliseconds(one['step_ms'] or float('nan'))}, ending at {one['step_where']}; {overhead}",
        f"  {phases}",
        f"  attributed {one['attributed']}, bound by {one['bound']}; same {one['same']}",
        *(f"  {each['gain']:.0%} {each['cause']} @ {each['where']}: {each['evidence']}" for each in one["remedies"]),
        *(f"  note: {note}" for note in one["notes"]),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("listing", type=Path)
    parser.add_argument("names", nargs="*", help="parts of the names of those to be tried; all, if none is given")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--python", default=sys.executable, help="that runs them, and has hotloop; default this one")
    parser.add_argument("--record", action="store_true", help="write a claim; scripts that it holds already are kept")
    given = parser.parse_args()
    scripts = [one for one in listed(given.listing) if not given.names or any(name in one.name for name in given.names)]
    found = []
    for script in scripts:
        found.append(tried(script, given.python, given.steps))
        print(_line(found[-1]), flush=True)
        if given.record:
            print(recorded(found[-1]), flush=True)
    bad = [one["name"] for one in found if wrong(one)]
    print(f"{len(found) - len(bad)} of {len(found)} right")
    sys.exit(bool(bad))


def recorded(one: dict[str, Any]) -> Path:
    """Writes a script into today's claim, in the place of what it held of it."""
    before = CLAIMS / f"{time.strftime('%Y-%m-%d')}_{_CLAIM}" / "record.json"
    kept = json.loads(before.read_text())["scripts"] if before.is_file() else []
    scripts = sorted([*(old for old in kept if old["name"] != one["name"]), one], key=lambda each: each["name"])
    return write_claim(_CLAIM, "python -m bench.others LISTING.toml --record", BASELINE, {"scripts": scripts})


if __name__ == "__main__":
    main()
