"""`hotloop train --tune` as a user starts it: a cold start, a warm one, and the plan beside the tutorial's loop."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from bench.gpu.commands import ended, started
from bench.gpu.loops import hotloop_steps, in_turn, kernels_of, ratios, tutorial_steps
from bench.gpu.setting import Result, Setting

EPOCHS = 1000
"""Of the run that the search plans for: a long one, which `seconds` end."""

TARGETS = {"W1": 10.0, "W4": 10.0, "W6": 1.5}
"""How many times as long the tutorial's loop should take; noted, and no reason to fail."""

_SIGTERM = 143


def run(part: str, setting: Setting) -> Result:
    folder = setting.scratch / "train" / part
    shutil.rmtree(folder, ignore_errors=True)  # a cold start finds no cache
    folder.mkdir(parents=True)
    starts = {"cold": start(part, "cold", folder, setting)}
    # A rehearsal's start takes as long as all else, so one of its networks starts again.
    starts["warm"] = (
        start(part, "warm", folder, setting) if part == "W4" or not setting.is_rehearsal else starts["cold"]
    )
    measured = beside(part, starts["warm"]["axes"], setting)
    ratio = measured["lanes"]["tutorial"]
    plan = starts["warm"]["plan"]
    figure = (
        f"{plan}: {measured['lanes']['hotloop']['step_ms']:.3g} ms, the tutorial's loop {ratio['times_as_long']:.3g}"
        f" times as long (target {TARGETS[part]:g}); first step after {starts['cold']['first_step_s']:.0f} s cold,"
        f" {starts['warm']['first_step_s']:.0f} s warm"
    )
    is_slower = setting.judges_times and ratio["high"] is not None and ratio["high"] < 1
    wrong = f"the plan is slower than the tutorial's loop: {figure}" if is_slower else ""
    return Result(figure, {"starts": starts, **measured, "target": TARGETS[part]}, wrong)


def start(part: str, name: str, folder: Path, setting: Setting) -> dict[str, Any]:
    """A training from its process's start until `PathState` ends it."""
    from hotloop.training.run import Run

    marks, run = folder / "marks.json", folder / name
    marks.unlink(missing_ok=True)
    epochs, seconds = (2, 1000.0) if setting.is_rehearsal else (EPOCHS, 2.0)
    arguments = setting.task(part, epochs=epochs, marks=marks, seconds=seconds)
    began = time.time()
    process = started(
        *("train", *arguments, "--tune", "--device", setting.device, "--run", str(run), "--json"),
        cache=folder / "cache",
    )
    done = ended(process, (0, _SIGTERM))
    seen, plan = json.loads(marks.read_text()), Run.open(run).plan
    return {
        "first_step_s": seen["first_at"] - began,
        "plan": plan.brief(),
        "axes": plan.model_dump(exclude_defaults=True),
        "said": [line for line in done.err.splitlines() if line.strip()][-20:],
    }


def beside(part: str, axes: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """The plan's steps and the tutorial's loop, in interleaved pairs, and their kernels."""
    from bench.gpu.tasks import task
    from hotloop.lowering.build import lower
    from hotloop.plan import Plan

    made, rounds = task(part, setting.size), 3 if setting.is_rehearsal else 12
    window_s = 0.02 if setting.is_rehearsal else 0.2
    program = lower(made, Plan(**axes))
    try:
        lanes = {"tutorial": tutorial_steps(made, setting.device), "hotloop": hotloop_steps(program)}
        windows = in_turn(lanes, setting.device, rounds=rounds, window_s=window_s)
        kernels = {name: kernels_of(steps, setting.device, 32) for name, steps in lanes.items()}
    finally:
        program.close()
    return {"lanes": ratios(windows, "hotloop"), "kernels": kernels}
