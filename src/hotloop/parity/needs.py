"""The memory that a proof takes. Where it isn't there, none is begun: a system that has promised too much kills who takes it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch

from hotloop.data.tree import tensors
from hotloop.lowering import Program
from hotloop.parity.witnesses import normalises_images
from hotloop.probe.room import room_bytes, size
from hotloop.rng import preserved

_WEIGHTS, _STATE = 14, 6
"""Times the bytes of the weights and of the optimizer's state that a proof takes of the host's memory, as measured on the CPU:
the truth and its step are in float64, which takes twice what fp32 does, those of the baseline and the plan are as they are.
The host of an accelerator, to which each step is copied, is taken to need as much; nobody has measured it there."""

_PROGRAMS = 3
"""Times what a Program holds, on an accelerator: the baseline, and the truth in float64."""

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
    device, host = programs[0].device, torch.device("cpu")
    others, whole = (len(programs) - 1) * (weights + state), 2 * weights + state  # with its gradients
    needed = {host: _WEIGHTS * weights + _STATE * state + others}
    if device != host:
        needed[device] = _PROGRAMS * whole
    if normalises_images(programs[0]):  # by another Program, from the beginning
        needed[device] += whole
    return needed


def _held(program: Program) -> tuple[int, int]:
    """Bytes of parameters and buffers, and of the optimizer's state; before that is made, as many as it will have."""
    weights = sum(value.nbytes for value in (*program.model.parameters(), *program.model.buffers()))
    if not program.optimizer.state:
        return weights, int(weights * _state_per_weight(program.optimizer))
    return weights, _bytes_of_state(program.optimizer)


def _bytes_of_state(optimizer: torch.optim.Optimizer) -> int:
    return sum(value.nbytes for value in tensors(list(optimizer.state.values())) if value.ndim)  # counts are nothing


def _state_per_weight(optimizer: torch.optim.Optimizer) -> float:
    """Bytes of state for each byte of weights, by a step of another of its kind; 2, as Adam's, where there can't be one."""
    weight = torch.nn.Parameter(torch.zeros(8, 8))
    weight.grad = torch.ones_like(weight)
    known = inspect.signature(type(optimizer)).parameters
    try:
        with preserved():
            twin = type(optimizer)(
                [weight], **{name: value for name, value in optimizer.defaults.items() if name in known}
            )
            twin.step()
    except Exception:  # an optimizer of the user's may ask for anything: this is an estimate, and that of most
        return 2.0
    return _bytes_of_state(twin) / weight.nbytes
