"""The memory that a proof takes. Where it isn't there, none is begun: a system that has promised too much kills who takes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hotloop.data.tree import tensors
from hotloop.lowering import Program
from hotloop.probe.room import room_bytes, size

_WEIGHTS, _STATE = 26, 14
"""Times the bytes of the weights and of the optimizer's state that a proof takes, as measured: float64 takes twice what fp32
does, and steps are kept in it, of the truth, the baseline and the plan."""

_PROGRAMS = 3
"""Times what a Program holds: the baseline, and the truth in float64."""

_SAFE = 0.75
"""Of what is free: allocators give back what is freed only in part, and activations come on top."""


def lacking(programs: Sequence[Program]) -> str:
    """What a proof of these Programs needs and what there is; empty where it is enough."""
    for device, need in needed_bytes(programs).items():
        room = room_bytes(device)
        if need > _SAFE * room:
            where = "" if device.type == "cpu" else f" on {device}"
            return f"a proof takes about {size(need)} of memory{where}, of which {size(room)} are free"
    return ""


def needed_bytes(programs: Sequence[Program]) -> dict[torch.device, int]:
    """Of the host and of where they compute, beside what they hold themselves; what activations take isn't counted."""
    weights, state = _held(programs[0])
    beside = _PROGRAMS * (2 * weights + state)  # with their gradients
    kept = _WEIGHTS * weights + _STATE * state - beside + (len(programs) - 1) * (weights + state)
    found = {torch.device("cpu"): kept}
    found[programs[0].device] = found.get(programs[0].device, 0) + beside
    return found


def _held(program: Program) -> tuple[int, int]:
    """Bytes of parameters and buffers, and of the optimizer's state; twice the former before it is made, as Adam's is."""
    weights = sum(value.nbytes for value in (*program.model.parameters(), *program.model.buffers()))
    state = sum(value.nbytes for value in tensors(list(program.optimizer.state.values())))
    return weights, state if program.optimizer.state else 2 * weights
