"""A step of the same networks on the CPU and on the device, by batch: which device pays, and from which size on."""

from __future__ import annotations

import gc
import time
from typing import Any

from bench.gpu.setting import Result, Setting

BATCHES = (1, 8, 64, 512, 4096)
WINDOWS, WINDOW_S = 5, 0.1
LONG_S = 0.5
"""A first step that takes longer on the CPU is followed by one more alone."""

_BYTES = 32
"""Of a parameter: itself, its gradient, Adam's two moments, and copies on the way."""


def run(part: str, setting: Setting) -> Result:
    rows, left_out = [], []
    for batch in batches(part, setting):
        for device, axes in lanes(setting):
            row, reason = measured(part, batch, device, axes, setting)
            if row is not None:
                rows.append(row)
            else:
                left_out.append({"batch": batch, "device": device, "reason": reason})
    figure = "; ".join(pair_of(rows, batch, setting.device) for batch in dict.fromkeys(row["batch"] for row in rows))
    wrong = "" if rows else f"nothing was measured: {left_out[0]['reason']}"
    return Result(figure, {"rows": rows, "left_out": left_out}, wrong)


def batches(part: str, setting: Setting) -> tuple[int | None, ...]:
    """None is the workload's own batch."""
    if not part.startswith("mlp-"):
        return (None,)
    if setting.is_rehearsal:
        return (1, 64) if float(part.removeprefix("mlp-")) <= 1e6 else (8,)
    return BATCHES


def lanes(setting: Setting) -> list[tuple[str, dict[str, str]]]:
    """Devices and the plans that are measured there: the baseline, and on CUDA the step as a graph."""
    found: list[tuple[str, dict[str, str]]] = [("cpu", {})]
    if setting.device != "cpu":
        found.append((setting.device, {}))
    if setting.device == "cuda":
        found.append((setting.device, {"residency": "device", "graphs": "step"}))
    return found


def measured(
    part: str, batch: int | None, device: str, axes: dict[str, str], setting: Setting
) -> tuple[dict[str, Any] | None, str]:
    """A row of the table, or why there is none."""
    import torch

    from bench.gpu.loops import hotloop_steps, program_of
    from bench.gpu.tasks import network, task
    from hotloop.core.hardware import machine
    from hotloop.errors import HotloopError
    from hotloop.tuning.races.runner import synchronize_devices

    if setting.is_rehearsal and part in ("mlp-1e7", "mlp-1e8"):
        part = "mlp-1e6"  # the same lines, in a second
    where = torch.device(device)
    if part.startswith("mlp-"):
        needed = _BYTES * float(part.removeprefix("mlp-")) + 16 * (batch or 1) * 8e3
        if (free := machine.device_free_bytes(where)) is not None and needed > free:
            return None, f"{needed / 1e9:.1f} GB are needed, and {free / 1e9:.1f} GB are free"
    made = network(part, setting.size, batch)
    program = None
    try:
        program = program_of(task(part, setting.size, batch=batch or 0), device, axes)
        steps = hotloop_steps(program)
        parameters = sum(value.numel() for value in program.model.parameters())

        def seconds(count: int) -> float:
            began = time.perf_counter()
            steps(count)
            synchronize_devices(where)
            return (time.perf_counter() - began) / count

        windows = timed(seconds, setting)
    except (HotloopError, torch.OutOfMemoryError) as error:
        return None, str(error).splitlines()[0]
    finally:
        if program is not None:
            program.close()
        del program
        gc.collect()
    row = {"network": part, "parameters": parameters, "batch": made.batch, "device": device}
    plan = " ".join(f"{axis}={value}" for axis, value in axes.items()) or "baseline"
    return {
        **row,
        "plan": plan,
        "step_ms": round(1e3 * sorted(windows)[len(windows) // 2], 5),
        "windows": len(windows),
    }, ""


def timed(seconds: Any, setting: Setting) -> list[float]:
    """Seconds of a step in short windows, after steps that warm up; one window where a step is long."""
    if seconds(1) > LONG_S:
        return [seconds(1)]
    step_s = max(seconds(2), 1e-6)
    window_s = 0.01 if setting.is_rehearsal else WINDOW_S
    count = max(1, round(window_s / step_s))
    seconds(count)
    return [seconds(count) for _ in range(2 if setting.is_rehearsal else WINDOWS)]


def pair_of(rows: list[dict[str, Any]], batch: int, device: str) -> str:
    own = {(row["device"], row["plan"] != "baseline"): row["step_ms"] for row in rows if row["batch"] == batch}
    told = [f"{where}{' graph' if is_graph else ''} {step_ms:.3g} ms" for (where, is_graph), step_ms in own.items()]
    return f"batch {batch}: {', '.join(told)}"
