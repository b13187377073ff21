"""`hotloop profile` of a Task and of an unmodified script: phases add up, operators agree with torch's own profiler, and
what is planted into the script is named with its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.gpu.commands import within
from bench.gpu.setting import ROOT, Result, Setting

SCRIPT = ROOT / "bench" / "gpu" / "scripts" / "loop.py"

AGREES = 0.10
"""By how much an operator's time may differ from what torch's profiler says, as a share."""

COUNTS = 0.05
"""Operators with a smaller share of the device's time aren't compared one by one."""

ADDS_UP = 0.02
"""By how much the phases together may differ from the step, as a share."""

PLANTED = {"synchronisation": r".item()", "slow-operator": "scatter by index"}
"""Words of the remedy that names what is planted."""

STEPS = 60


def run(part: str, setting: Setting) -> Result:
    return named(part, setting) if part in PLANTED else compared(part, setting)


def of_script(plant: str, setting: Setting) -> dict[str, Any]:
    command = ["profile", str(SCRIPT), "--steps", str(steps_of(setting)), "--json"]
    own = ["--device", setting.device, "--plant", plant, "--steps", str(4 * steps_of(setting)), *sizes_of(setting)]
    return within(*command, "--", *own).document


def sizes_of(setting: Setting) -> list[str]:
    return ["--batch", "16", "--width", "8"] if setting.is_rehearsal else []


def steps_of(setting: Setting) -> int:
    return 20 if setting.is_rehearsal else STEPS


def compared(part: str, setting: Setting) -> Result:
    if part == "task":
        steps = ["--steps", str(steps_of(setting)), "--device", setting.device, "--json"]
        found = within("profile", *setting.task("W6"), "--plan", "baseline", *steps).document
        truth = operators_by_torch(steps_of_task(setting), setting)
    else:
        found = of_script("none", setting)
        truth = operators_by_torch(steps_of_script(setting), setting)
    adds_up = sum(found["phases"].values()) / found["step_ms"]
    own = operators_of(found, setting.device)
    total_ms, true_ms = sum(own.values()), sum(truth.values())
    differing = {
        name: (own.get(name, 0.0), ms)
        for name, ms in truth.items()
        if ms > COUNTS * true_ms and abs(own.get(name, 0.0) / ms - 1) > AGREES
    }
    figure = (
        f"phases are {100 * adds_up:.1f} % of a step of {found['step_ms']:.3g} ms; operators take {total_ms:.3g} ms,"
        f" by torch.profiler {true_ms:.3g} ms"
    )
    wrong = ""
    if abs(adds_up - 1) > ADDS_UP:
        wrong = f"the phases don't add up to the step: {figure}"
    elif setting.judges_times and (differing or abs(total_ms / true_ms - 1) > AGREES):
        wrong = f"operators differ from torch.profiler's by more than {100 * AGREES:.0f} %: {differing or figure}"
    figures = {"adds_up": adds_up, "operators_ms": own, "by_torch_ms": truth, "differing": differing}
    return Result(figure, figures, wrong)


def operators_of(profile: dict[str, Any], device: str) -> dict[str, float]:
    """Milliseconds of a step by operator, on the device."""
    found: dict[str, float] = {}
    for one in profile["operators"]:
        if one["device"].partition(":")[0] == device:
            found[one["name"]] = found.get(one["name"], 0.0) + one["ms"]
    return found


def steps_of_task(setting: Setting) -> Callable[[int], None]:
    from bench.gpu.loops import hotloop_steps, program_of
    from bench.gpu.tasks import task

    return hotloop_steps(program_of(task("W6", setting.size), setting.device, {}))


def steps_of_script(setting: Setting) -> Callable[[int], None]:
    from bench.gpu.scripts.loop import train

    sizes = dict(batch=16, width=8) if setting.is_rehearsal else {}
    return lambda count: train(setting.device, count, **sizes)


def operators_by_torch(steps: Callable[[int], None], setting: Setting) -> dict[str, float]:
    """The same by torch's profiler alone: the time of an operator's kernels, without operators inside it."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from hotloop.tuning.races.runner import synchronize_devices

    count = 8 if setting.is_rehearsal else 32
    where = torch.device(setting.device)
    steps(4)
    synchronize_devices(where)
    on_cuda = [ProfilerActivity.CUDA] if setting.device == "cuda" else []
    with profile(activities=[ProfilerActivity.CPU, *on_cuda]) as seen:
        steps(count)
        synchronize_devices(where)
    found = {}
    for event in seen.key_averages():
        us = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        if event.key.startswith("aten::") and us:
            found[event.key] = us / 1e3 / count
    return found


def named(part: str, setting: Setting) -> Result:
    """Whether the remedies name what is planted, with its line."""
    found = of_script(part, setting)
    line = next(number for number, text in enumerate(SCRIPT.read_text().splitlines(), 1) if text.endswith(f"# {part}"))
    remedies = found["remedies"]
    naming = [one for one in remedies if PLANTED[part] in one["cause"]]
    there = [one for one in naming if one["where"].endswith(f"{SCRIPT.name}:{line}")]
    told = [f"{one['cause']} at {one['where'].rpartition('/')[2]}" for one in remedies[:3]]
    figure = f"named: {there[0]['cause']}, up to {100 * there[0]['gain']:.0f} %" if there else ""
    wrong = "" if there else f"not named at {SCRIPT.name}:{line}; the remedies are: {'; '.join(told) or 'none'}"
    return Result(figure, {"remedies": remedies[:6], "bound": found["bound"]}, wrong)
