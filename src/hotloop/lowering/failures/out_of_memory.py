"""Running out of memory: what held it, and which batch would fit."""

from __future__ import annotations

import re
import traceback
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hotloop.core.dispatch_mode import Onlooker
from hotloop.core.hardware.limits import UNITS, room_bytes, size
from hotloop.data.batch_tree import tensors, to_device
from hotloop.data.feeds.feed import peek
from hotloop.data.sources import Table
from hotloop.errors import MemoryExhausted, blame, out_of_memory
from hotloop.lowering.program import Program
from hotloop.lowering.transforms.allocator import let_go

_ASKED = re.compile(r"(?:[Tt]ried|Unable) to allocate ([\d.]+) ?(bytes|[KMGTPE]iB)")
_SAFE = 0.9
"""Share of the free memory that an advice uses: what a small batch tells of a large one is not exact."""


def exhausted(error: Exception, program: Program, place: str, *, training: bool) -> MemoryExhausted:
    """The error that says what held the memory and what would fit; the program is used up by finding out.

    Args:
        place: where it happened, such as `step 1 (epoch 1, batch 1)`.
        training: whether it was a training step, whose need can be measured on small batches.
    """
    text = " ".join(str(error).split())
    kinds = {device.type for device in program.devices}
    device = "memory" if kinds == {"cpu"} else f"memory on {' or '.join(map(str, program.devices))}"
    given = f"{place} ran out of {device}{_asked(text)}"
    _release(error, program)
    if not training:
        parts, advice = _held(program), "use a smaller batch_size or a smaller model"
    else:
        need, advice = _advice(program)
        parts = {**_held(program), **need}
    held = ", ".join(f"{name} {size(value)}" for name, value in parts.items() if value)
    free = " and ".join(f"{size(room_bytes(device))}{_where(device, program)}" for device in program.devices)
    return MemoryExhausted(f"{given}; {held}; {free} are free without the batch", fix=advice)


def _where(device: torch.device, program: Program) -> str:
    return f" on {device}" if program.parts.elsewhere else ""


def _asked(text: str) -> str:
    found = _ASKED.search(text)
    if found is None:
        return ""
    power = UNITS.index(found[2])
    return f" when it asked for {size(float(found[1]) * 1024**power)}"


def _release(error: Exception, program: Program) -> None:
    """Gives up what the failed step still held: its frames' values, the gradients, and memory that is kept for steps."""
    traceback.clear_frames(error.__traceback__)
    program.optimizer.zero_grad()
    let_go(program.parts)
    for device in program.devices:
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()


def _held(program: Program) -> dict[str, int]:
    """Bytes by what they are for; gradients as they are once there."""
    model, roles = program.model, program.parts.roles
    trained = [value for group in program.optimizer.param_groups for value in group["params"]]
    held = {
        "parameters": _bytes([*model.parameters(), *model.buffers()]),
        "gradients": _bytes(trained),
        "optimizer state": _bytes(tensors(list(program.optimizer.state.values()))),
        "average": _bytes(program.average.values()),
    }
    tables = [table for table in (roles.train, roles.validation, roles.raw_test) if isinstance(table, Table)]
    if program.device.type not in ("cpu", "mps"):  # elsewhere data on the host is in another memory
        tables = [table for table in tables if table.device.type == program.device.type]
    held["data"] = sum(table.nbytes() for table in tables)
    return held


def _bytes(values: Iterable[Tensor]) -> int:
    return sum(value.nbytes for value in values)


def _advice(program: Program) -> tuple[dict[str, int], str]:
    """What the batch needed, if that can be measured, and what to do."""
    batch_size = program.parts.roles.batch_size
    if program.parts.elsewhere:  # a small batch tells what one device needs, and which one lacks it isn't known
        return {}, "use a smaller batch_size, or place modules otherwise"
    try:
        needs = _needs(program, batch_size)
    except Exception as error:
        return {}, f"use a smaller batch_size (what a small batch needs can't be measured: {blame(error)})"
    if not needs:
        return {}, "use a smaller model, or a device with more memory: not even the smallest batch fits"
    small, large = min(needs), max(needs)
    each = (needs[large] - needs[small]) / (large - small) if large > small else needs[small] / small
    fixed = max(0.0, needs[small] - each * small)
    need = {f"the batch of {batch_size} about": int(fixed + each * batch_size)}
    free = _SAFE * room_bytes(program.device) - fixed - _held(program)["gradients"]
    fits = max(large, int(free / each) if each > 0 else batch_size)
    return need, _which_fits(program, fits, batch_size)


def _needs(program: Program, batch_size: int) -> dict[int, int]:
    """What small batches need in bytes, by their size; only those that fit."""
    needs: dict[int, int] = {}
    for samples in (few for few in (1, 2, 4) if few <= batch_size):
        if 3 * max(needs.values(), default=0) > room_bytes(program.device):
            break  # a system that grants more than it has would end this process
        try:
            _need(program, samples)  # makes the optimizer's state, which is not the batch's
            needs[samples] = _need(program, samples)
        except Exception as error:
            if out_of_memory(error):
                break
            if samples > 1:  # one sample alone can be too few, as for BatchNorm
                raise
    return needs


def _which_fits(program: Program, fits: int, batch_size: int) -> str:
    task = program.parts.task
    own_loader = task.batch_size is None and isinstance(task.data, torch.utils.data.DataLoader)
    if batch_size == 1:
        return "use a smaller model, or smaller samples"
    smaller = min(1 << (fits.bit_length() - 1), (batch_size + 1) // 2)
    by = f"about {fits} samples would fit" if fits < batch_size else "the need varies, or others took memory too"
    where = "in your DataLoader" if own_loader else f"(--batch-size {smaller})"
    return f"start again with batch_size={smaller} {where}: {by}"


def _need(program: Program, samples: int) -> int:
    """Bytes that one step on a batch of so many samples takes at its height, without its gradients of parameters."""
    batch = to_device(peek(program.parts.roles, samples), program.device)
    program.optimizer.zero_grad()
    gradients = _held(program)["gradients"]
    if program.device.type in ("cuda", "xpu"):
        module = torch.get_device_module(program.device)
        before = module.memory_allocated(program.device)
        module.reset_peak_memory_stats(program.device)
        program.step(batch)
        return max(0, module.max_memory_allocated(program.device) - before - gradients)
    with Peak(present(program, batch)) as peak:
        program.step(batch)
    return max(0, peak.bytes - gradients)


def present(program: Program, batch: Any) -> list[Tensor]:
    """Tensors that are there before a step."""
    state = list(program.optimizer.state.values())
    return [*program.model.parameters(), *program.model.buffers(), *program.average.values(), *tensors([state, batch])]


class Peak(Onlooker):
    """Adds up the memory of all tensors that operations make, as long as they live; `bytes` is its height."""

    def __init__(self, present: list[Tensor]) -> None:
        super().__init__()
        self.bytes = self._now = 0
        self._known = {_place(tensor) for tensor in present}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors(result):
            if tensor.layout is torch.strided and _place(tensor) not in self._known:
                self._add(tensor)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage, place = tensor.untyped_storage(), _place(tensor)
        self._known.add(place)
        self._now += storage.nbytes()
        self.bytes = max(self.bytes, self._now)
        weakref.finalize(storage, self._remove, place, storage.nbytes())

    def _remove(self, place: int, number: int) -> None:
        self._known.discard(place)
        self._now -= number


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
