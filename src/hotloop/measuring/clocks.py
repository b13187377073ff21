"""What a window takes, and what a step allocates."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hotloop.lowering import Program
from hotloop.trouble.memory import Peak, present

Clock = Callable[[], float]


def synchronise(*devices: torch.device) -> None:
    """Waits until the devices have done what they were asked for; the CPU has, whenever it is asked."""
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def peak_of_step(program: Program) -> int | None:
    """The most bytes that one training step holds at a time beyond what was there before; None where nobody says,
    and where it takes several devices.

    One step is run. On the CPU, what compiled code allocates is not seen, so a compiled step has none; nor has one in
    arrays, of which torch knows nothing.
    """
    device, plan = program.device, program.parts.plan
    if len(program.devices) > 1 or plan.engine != "eager":
        return None
    if device.type in ("cuda", "xpu"):
        module = torch.get_device_module(device)
        synchronise(device)
        before = module.memory_allocated(device)
        module.reset_peak_memory_stats(device)
        program.advance(1)
        synchronise(device)
        return int(module.max_memory_allocated(device) - before)
    if device.type != "cpu" or plan.compile != "none":
        return None
    try:
        with Peak(present(program, ())) as peak:
            program.advance(1)
    except NotImplementedError:  # of operations that torch shows to nobody
        return None
    return peak.bytes
