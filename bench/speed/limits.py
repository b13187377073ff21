"""The least that this machine can take for a workload's step, from what it was measured to reach."""

from __future__ import annotations

from typing import Any

from bench.speed.data import data_bytes
from bench.speed.workloads import Workload
from hotloop.profiler.operator_cost import OpCost, device_limits, least_ms

_STATE_BYTES = 24
"""Of a parameter: it and both of Adam's moments, float32, read once and written once."""


def work_of(workload: Workload) -> OpCost:
    """Multiplications and additions of products, forward and backward, and the bytes that an update has to move.

    What a cache keeps is moved faster than memory allows, so that small networks can come below the limit by bytes.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from bench.speed.data import load
    from bench.speed.models import build, loss_module

    data = load(workload.data)
    with torch.device("meta"):
        model = build(workload.name)
        shape = data.x.shape[1:] if data.x.ndim != 3 or not data.images else (1, *data.x.shape[1:])
        x = torch.empty((workload.batch, *shape), dtype=torch.float32 if data.images else torch.int64)
        y = torch.empty((workload.batch, *data.y.shape[1:]), dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            loss_module(workload.name)()(model(x), y).backward()
    flops = float(counter.get_total_flops())
    parameters = sum(value.numel() for value in model.parameters())
    return OpCost(flops, float(_STATE_BYTES * parameters + 4 * x.numel()))


def limit_of(workload: Workload, name: str) -> dict[str, Any]:
    """FLOPs and bytes of a step, and milliseconds that the measured limits of the device of that name allow for them, in fp32
    and in bf16; bytes of the data set."""
    from hotloop.core.hardware.devices import check_device
    from hotloop.core.hardware.probe import measure_hardware

    name = str(check_device(name))
    device = measure_hardware(name).device(name)
    assert device is not None
    work, limits = work_of(workload), device_limits(device)
    return {
        "flops": work.flops,
        "bytes": work.bytes,
        "data_bytes": data_bytes(workload.data),
        "least_ms": least_ms(work, limits, "fp32"),
        "least_bf16_ms": least_ms(work, limits, "bf16") if "bf16" in limits.flop_per_s else None,
        "flop_per_s": limits.flop_per_s.get("fp32"),
        "bytes_per_s": limits.bytes_per_s,
    }
