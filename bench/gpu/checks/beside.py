"""Large networks beside the tutorial's loop and torch.compile, in torch's default precision and in bf16."""

from __future__ import annotations

from typing import Any

from bench.gpu.setting import Result, Setting

PLANS = {
    "W6": ("residency=device graphs=step", "residency=device graphs=step compile=step layout=channels_last"),
    "W7": ("residency=device graphs=step", "residency=device graphs=step compile=step"),
    "W9": ("residency=device graphs=step", "residency=device graphs=step compile=step layout=channels_last"),
}
"""The fastest one that runs is compared; the first one needs no compiler."""

TARGETS = {"default": 1.5, "bf16": 3.0}
"""How many times as long as hotloop the tutorial's loop in default precision should take; noted, and no reason to fail."""


def run(part: str, setting: Setting) -> Result:
    from bench.gpu.loops import in_turn, kernels_of, ratios, tutorial_steps
    from bench.gpu.tasks import task

    name, _, reduced = part.partition("-")
    precision = reduced or "default"
    made = task(name, setting.size)
    programs, failed = programs_of(name, precision, setting)
    lanes: dict[str, Any] = {"tutorial": tutorial_steps(made, setting.device)}
    if reduced:
        lanes["tutorial bf16"] = tutorial_steps(made, setting.device, precision="bf16")
    if not setting.is_rehearsal:  # compiling takes the CPU longer than all else
        lanes["torch.compile"] = tutorial_steps(made, setting.device, compiled=True, precision=precision)
    lanes |= programs
    rounds, window_s = (3, 0.01) if setting.is_rehearsal else (10, 0.2)
    windows = in_turn(lanes, setting.device, rounds=rounds, window_s=window_s)
    own = min(programs, key=lambda plan: sorted(windows[plan])[rounds // 2])
    kernels = {lane: kernels_of(lanes[lane], setting.device) for lane in dict.fromkeys(("tutorial", own))}
    found = ratios(windows, own)
    others = [lane for lane in lanes if lane not in programs]
    told = [f"{lane} {found[lane]['times_as_long']:.3g} times as long" for lane in others]
    figure = f"{own}: {found[own]['step_ms']:.3g} ms; {', '.join(told)} (target {TARGETS[precision]:g})"
    tutorial = found["tutorial"]
    is_slower = setting.judges_times and tutorial["high"] is not None and tutorial["high"] < 1
    wrong = f"slower than the tutorial's loop: {figure}" if is_slower else "; ".join(failed.values())
    figures = {"lanes": found, "kernels": kernels, "failed": failed, "target": TARGETS[precision]}
    return Result(figure, figures, wrong)


def programs_of(name: str, precision: str, setting: Setting) -> tuple[dict[str, Any], dict[str, str]]:
    """hotloop's lanes by plan, each after its first steps, and plans that can't be run, with the reason."""
    from bench.gpu.loops import hotloop_steps, program_of
    from bench.gpu.tasks import task
    from hotloop.errors import HotloopError

    found: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for asked in PLANS[name]:
        axes = setting.fitted(asked + (f" precision={precision}" if precision != "default" else ""))
        if setting.is_rehearsal:
            axes.pop("compile", None)
        spoken = " ".join(f"{axis}={value}" for axis, value in axes.items()) or "baseline"
        try:
            steps = hotloop_steps(program_of(task(name, setting.size), setting.device, axes))
            steps(3)
        except HotloopError as error:
            failed[spoken] = str(error)
        else:
            found[spoken] = steps
    if not found:
        raise HotloopError(f"no plan of {name} runs: {'; '.join(failed.values())}")
    return found, failed
