"""Trainings that are killed by SIGKILL and resumed end with the bits of one that never was."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

from bench.gpu.commands import ended, started
from bench.gpu.setting import Result, Setting

TASKS = {"eager": "everything", "graphs": "capturable"}
PLANS = {"eager": "", "graphs": "graphs=step"}
EPOCHS, REHEARSED_EPOCHS, EVERY = 10, 3, 10
"""Of the trainings: 13 steps an epoch, a checkpoint each 10 steps."""

KILLS = (17, 59)
"""Steps after which the training is killed."""

_LIMIT_S = 90.0


def run(part: str, setting: Setting) -> Result:
    from hotloop.training.run import Run
    from tests.support.processes.resumed_training import disagreements

    folder = setting.scratch / "resume" / part
    shutil.rmtree(folder, ignore_errors=True)
    settings = [f"{axis}={value}" for axis, value in setting.fitted(PLANS[part]).items()]
    options = [word for one in settings for word in ("--set", one)] or ["--plan", "baseline"]
    whole, killed = folder / "whole", folder / "killed"
    for path in (whole, killed):
        path.mkdir(parents=True)
    beside = begun(part, whole, options, setting)
    try:
        kills = [kill(part, killed, steps, options, setting) for steps in KILLS[: 1 if setting.is_rehearsal else None]]
        ended(begun(part, killed, options, setting))
        ended(beside)
    finally:
        beside.kill()
    differing = disagreements(whole / "run", killed / "run")
    resumes = sum(event["event"] == "resume" for event in Run.open(killed / "run").journal())
    figure = f"killed after {' and '.join(map(str, kills))} steps, resumes: {resumes}: each bit is the same"
    wrong = f"the resumed run differs in {', '.join(differing[:5])}" if differing else ""
    if not differing and resumes != len(kills):
        wrong = f"resumed {resumes} times after {len(kills)} kills"
    return Result(figure, {"kills": kills, "resumes": resumes, "differing": differing}, wrong)


def begun(part: str, folder: Path, options: list[str], setting: Setting) -> subprocess.Popen[str]:
    """Starts the training of a folder, or goes on with it."""
    from bench.gpu.deterministic import NEEDED
    from hotloop.training.run import is_run

    run = folder / "run"
    if is_run(run):
        arguments = ["--resume", str(run)]
    else:
        epochs = REHEARSED_EPOCHS if setting.is_rehearsal else EPOCHS
        arguments = [f"bench/gpu/deterministic.py:{TASKS[part]}", "-p", f"epochs={epochs}", "-p", f"marks={folder}"]
        arguments += ["--run", str(run), "--device", setting.device, "--checkpoint-every", str(EVERY), *options]
    return started("train", *arguments, cache=setting.scratch / "cache", more=NEEDED)


def kill(part: str, folder: Path, steps: int, options: list[str], setting: Setting) -> int:
    """Kills the training after so many steps; returns how many were begun.

    Raises:
        RuntimeError: the training ended, or didn't come as far.
    """
    held = folder / "held"
    held.write_bytes(bytes(steps))  # no step begins after so many
    process, until = begun(part, folder, options, setting), time.monotonic() + _LIMIT_S
    try:
        while begun_steps(folder) < steps:
            if process.poll() is not None:
                ended(process, ())
            if time.monotonic() > until:
                raise RuntimeError(f"{begun_steps(folder)} of {steps} steps were begun in {_LIMIT_S:.0f} s")
            time.sleep(0.005)
    finally:
        process.kill()
        process.communicate()
    held.unlink()
    return begun_steps(folder)


def begun_steps(folder: Path) -> int:
    marks = folder / "steps"
    return marks.stat().st_size if marks.exists() else 0
