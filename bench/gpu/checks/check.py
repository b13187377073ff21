"""`hotloop check`: plans for this device compute what the baseline computes."""

from __future__ import annotations

from bench.gpu.commands import within
from bench.gpu.setting import Result, Setting

PLANS = {
    "W1": "residency=device graphs=32 compile=step rewrites=all",
    "W6": "graphs=step compile=step",
    "W7": "graphs=step compile=step",
    "W6-bf16": "graphs=step compile=step precision=bf16",
}


def run(part: str, setting: Setting) -> Result:
    from hotloop.core.records.race import TRUSTED_CLASSES

    axes = setting.fitted(PLANS[part])
    name = part.partition("-")[0]
    if setting.is_rehearsal:  # compiling takes the CPU longer than all else: one small network has to do
        absent = {"rewrites"} if part == "W1" else {"compile"}
        axes = {axis: value for axis, value in axes.items() if axis not in absent}
        name = "W4" if part == "W1" else name
    settings = [word for axis, value in axes.items() for word in ("--set", f"{axis}={value}")]
    command = ["check", *setting.task(name, epochs=100), *settings, "--device", setting.device, "--json"]
    found = within(*command, codes=(0, 1)).document
    wanted = ("reduced-precision",) if "precision" in axes else TRUSTED_CLASSES
    spoken = " ".join(f"{axis}={value}" for axis, value in axes.items()) or "baseline"
    figure = f"{spoken}: {found['parity']} ({found['seconds']:.0f} s)"
    wrong = "" if found["parity"] in wanted else f"{figure}: {found['reason']}"
    return Result(figure, {"axes": axes, "parity": found | {"errors": found["errors"][:10]}}, wrong)
