"""What does looking for a plan cost? `train --tune` against the two best fixed plans in hindsight.

python -m bench.tune_regret --run-seconds 135

For each workload, with nothing of it in any cache: fixed plans are raced to know the two best of them. Then this run is
trained under each of the two; by `train --tune`, which looks for a plan first; and by `train` where `tune` was run
before, so that the plan is remembered and what was compiled is kept. The trainings run side by side in short turns of
one at a time (the others are stopped meanwhile), so that the machine's moods meet all alike; the search itself is not
interrupted. What counts is the time in a process's own turns, from its start to its end. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hotloop
from bench.claim import write_claim
from hotloop.plan import BASELINE, Plan
from hotloop.task_file import LoadedTask, load_task
from hotloop.tuning import race
from hotloop.tuning.contenders import RaceSpec

TASKS = Path(__file__).with_name("regret_tasks.py")
WORKLOADS = ("cnn", "mlp", "rows")
TURN_S = 2.0
COLD, WARM = "tuned, cold", "tuned, warm"
ALLOWED = 0.05

FIXED: tuple[dict[str, Any], ...] = (
    {},
    {"threads": 1},
    {"optimizer": "fused"},
    {"optimizer": "fused", "threads": 1},
    {"compile": "step"},
    {"compile": "step", "threads": 1},
    {"compile": "package"},
    {"compile": "package", "threads": 1},
)
"""What a user would choose from by hand."""


class Place:
    """A user's caches, empty at first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = 0

    def command(self, *arguments: str) -> tuple[list[str], dict[str, str]]:
        temporary = self.folder / "tmp"  # where compilers keep headers that they have read
        temporary.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "TMPDIR": str(temporary),
            "XDG_CACHE_HOME": str(self.folder),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
        }
        return [sys.executable, "-m", "hotloop", *arguments], environment

    def train(self, workload: str, epochs: int, settings: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        self.runs += 1
        run = str(self.folder / f"run{self.runs}")
        return self.command(
            "train", f"{TASKS}:{workload}", "-p", f"epochs={epochs}", "--device", "cpu", "--run", run, *settings
        )


def in_turns(
    commands: Mapping[str, tuple[list[str], dict[str, str]]], searching: Mapping[str, Path]
) -> dict[str, float]:
    """Seconds that each process had, until it ended.

    Args:
        searching: files by name of the process; its first turn lasts until there is such a file.

    Raises:
        RuntimeError: one of them failed.
    """
    taken = dict.fromkeys(commands, 0.0)
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        while len(running) < len(commands) or any(process.poll() is None for process in running.values()):
            for name, (command, environment) in commands.items():
                began = time.monotonic()
                until = None
                if name not in running:
                    running[name] = subprocess.Popen(
                        command,
                        env=environment,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.PIPE,
                        start_new_session=True,
                    )
                    until = searching.get(name)
                elif running[name].poll() is None:
                    os.killpg(running[name].pid, signal.SIGCONT)
                else:
                    continue
                _turn(running[name], until)
                taken[name] += time.monotonic() - began
    finally:
        for process in running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    for name, process in running.items():
        if process.returncode:
            raise RuntimeError(f"{name} ended with {process.returncode}: {process.communicate()[1].decode()[-2000:]}")
    return taken


def _turn(process: subprocess.Popen[bytes], until: Path | None) -> None:
    while until is not None and not until.exists() and process.poll() is None:
        time.sleep(0.01)
    try:
        process.wait(TURN_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGSTOP)


def settings_of(plan: Mapping[str, Any]) -> list[str]:
    """The plan, whole: axes that are not named would be looked for."""
    chosen = {axis: value for axis, value in plan.items() if value != getattr(Plan(), axis) and axis != "device"}
    return ["--plan", "baseline", *(part for axis, value in chosen.items() for part in ("--set", f"{axis}={value}"))]


def best_fixed(workload: str, epochs: int, seconds: float) -> list[dict[str, Any]]:
    """The two that finish this run first, compilation included."""
    task = load_task(f"{TASKS}:{workload}", {"epochs": epochs}).task
    plans = [Plan(device="cpu", **axes) for axes in FIXED]
    verdict = race.race_loaded(LoadedTask(task, None, {}), RaceSpec(["baseline", *plans]), prove=None, racing_s=seconds)
    raced = [timing for timing in verdict.plans if timing.run_s is not None and timing.name != verdict.baseline]
    raced.sort(key=lambda timing: timing.run_s or 0.0)
    for timing in raced:
        told(f"  {timing.name}: {timing.step_ms:.3f} ms a step, {timing.run_s:.0f} s this run")
    return [
        {"name": timing.name, "plan": timing.plan, "step_ms": timing.step_ms, "run_s": timing.run_s}
        for timing in raced[:2]
    ]


def epochs_for(workload: str, run_s: float) -> int:
    """So many that the baseline takes about `run_s`."""
    task = load_task(f"{TASKS}:{workload}", {}).task
    verdict = hotloop.race(task, [Plan(device="cpu")], time_limit="3s", prove=None)
    base = verdict.plan(verdict.baseline)
    assert base.step_ms is not None and verdict.steps is not None
    return max(1, round(run_s / (base.step_ms / 1e3 * verdict.steps)))


def tuned(place: Place, workload: str, epochs: int) -> tuple[float, dict[str, Any]]:
    command, environment = place.command(
        "tune", f"{TASKS}:{workload}", "-p", f"epochs={epochs}", "--device", "cpu", "--json"
    )
    began = time.monotonic()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    return time.monotonic() - began, json.loads(done.stdout)


def regret(workload: str, run_s: float, race_s: float, folder: Path) -> dict[str, Any]:
    epochs = epochs_for(workload, run_s)
    told(f"{workload}: {epochs} epochs")
    fixed = best_fixed(workload, epochs, race_s)
    epochs = round(epochs * max(1.0, run_s / fixed[0]["run_s"]))
    told(f"  {epochs} epochs, for the best of these to take {run_s:.0f} s")
    cold, warm = Place(folder / "cold"), Place(folder / "warm")
    tune_s, verdict = tuned(warm, workload, epochs)
    told(f"  tune: {verdict['winner']} in {tune_s:.1f} s; {'; '.join(verdict['notes'])}")
    commands = {
        COLD: cold.train(workload, epochs, ["--tune"]),
        WARM: warm.train(workload, epochs, []),
    }
    for number, one in enumerate(fixed):
        commands[one["name"]] = Place(folder / f"fixed{number}").train(workload, epochs, settings_of(one["plan"]))
    seconds = in_turns(commands, {COLD: cold.folder / "run1" / "plan.toml"})
    chosen = Plan(**tomllib.loads((cold.folder / "run1" / "plan.toml").read_text(encoding="utf-8"))).brief()
    told(f"  the search with cold caches took {chosen}; seconds: {seconds}")
    best = min(seconds[one["name"]] for one in fixed)
    found: dict[str, Any] = {
        "epochs": epochs,
        "fixed": fixed,
        "searches": {
            "cold": {"winner": chosen},
            "before": {"winner": verdict["winner"], "notes": verdict["notes"], "tune_s": tune_s},
        },
        "seconds": seconds,
    }
    for caches, name in (("cold", COLD), ("warm", WARM)):
        found[f"regret_{caches}"] = seconds[name] / best - 1
        told(f"  {caches}: {seconds[name]:.1f} s against {best:.1f} s, regret {seconds[name] / best - 1:+.1%}")
    return found


def told(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=WORKLOADS, help="some of " + ", ".join(WORKLOADS))
    parser.add_argument("--run-seconds", type=float, default=135, help="of the run under the best fixed plan")
    parser.add_argument("--race-seconds", type=float, default=30, help="to find the best fixed plans")
    parser.add_argument("--no-record", action="store_true", help="write no claim")
    options = parser.parse_args()
    found = {}
    for name in options.workloads:
        with tempfile.TemporaryDirectory(prefix="regret-") as folder:
            os.environ.update(XDG_CACHE_HOME=f"{folder}/own", TORCHINDUCTOR_CACHE_DIR=f"{folder}/own/inductor")
            found[name] = regret(name, options.run_seconds, options.race_seconds, Path(folder))
    figures = {"allowed": ALLOWED, "turn_s": TURN_S, "load_average": os.getloadavg(), "workloads": found}
    print(json.dumps(figures, indent=2))
    if not options.no_record:
        command = f"python -m bench.tune_regret --run-seconds {options.run_seconds:g}"
        told(str(write_claim("tune-regret", command, BASELINE, figures)))
    return 0 if all(one[f"regret_{caches}"] <= ALLOWED for one in found.values() for caches in ("cold", "warm")) else 1


if __name__ == "__main__":
    sys.exit(main())
