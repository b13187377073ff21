"""Explanation of a lack of memory: what takes the memory, and which batch size fits."""

from __future__ import annotations

import re
import traceback
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hotloop.core.hardware.limits import UNITS, format_binary_bytes, free_memory_bytes
from hotloop.core.torch_private import ReadOnlyDispatchMode
from hotloop.data.batch_tree import to_device, tree_tensors
from hotloop.data.feeds.feed import first_batch
from hotloop.data.sources import Table
from hotloop.errors import MemoryExhausted, describe_error, is_out_of_memory
from hotloop.lowering.program import Program
from hotloop.lowering.transforms.allocator import restore_allocator

_REQUESTED = re.compile(r"(?:[Tt]ried|Unable) to allocate ([\d.]+) ?(bytes|[KMGTPE]iB)")
_SAFE_SHARE = 0.9
"""Share of the free memory that the advice uses, since small batches predict large ones only roughly."""


def explain_out_of_memory(error: Exception, program: Program, place: str, *, training: bool) -> MemoryExhausted:
    """Returns the error with the memory in use and a batch size that fits; the program can't be used afterwards.

    Args:
        place: where the memory ran out, such as `step 1 (epoch 1, batch 1)`.
        training: whether a training step failed, whose need can be measured on small batches.
    """
    text = " ".join(str(error).split())
    kinds = {device.type for device in program.devices}
    device = "memory" if kinds == {"cpu"} else f"memory on {' or '.join(map(str, program.devices))}"
    failure = f"{place} ran out of {device}{_requested_bytes(text)}"
    _release_memory(error, program)
    need: dict[str, int] = {}
    advice = "use a smaller batch_size or a smaller model"
    if training:
        need, advice = _batch_size_advice(program)
    parts = {**_used_bytes(program), **need}
    used = ", ".join(f"{name} {format_binary_bytes(value)}" for name, value in parts.items() if value)
    free = " and ".join(
        format_binary_bytes(free_memory_bytes(device)) + (f" on {device}" if program.parts.elsewhere else "")
        for device in program.devices
    )
    return MemoryExhausted(f"{failure}; {used}; {free} are free without the batch", fix=advice)


def _requested_bytes(text: str) -> str:
    match = _REQUESTED.search(text)
    if match is None:
        return ""
    power = UNITS.index(match[2])
    return f" when it asked for {format_binary_bytes(float(match[1]) * 1024**power)}"


def _release_memory(error: Exception, program: Program) -> None:
    traceback.clear_frames(error.__traceback__)
    program.optimizer.zero_grad()
    restore_allocator(program.parts)
    for device in program.devices:
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()


def _used_bytes(program: Program) -> dict[str, int]:
    model, roles = program.model, program.parts.splits
    trained = [value for group in program.optimizer.param_groups for value in group["params"]]
    used = {
        "parameters": _tensor_bytes([*model.parameters(), *model.buffers()]),
        "gradients": _tensor_bytes(trained),
        "optimizer state": _tensor_bytes(tree_tensors(list(program.optimizer.state.values()))),
        "average": _tensor_bytes(program.average.values()),
    }
    tables = [table for table in (roles.train, roles.validation, roles.raw_test) if isinstance(table, Table)]
    if program.device.type not in ("cpu", "mps"):  # data on the host is in another memory
        tables = [table for table in tables if table.device.type == program.device.type]
    used["data"] = sum(table.nbytes() for table in tables)
    return used


def _tensor_bytes(values: Iterable[Tensor]) -> int:
    return sum(value.nbytes for value in values)


def _batch_size_advice(program: Program) -> tuple[dict[str, int], str]:
    """Returns the bytes that the batch needs, if small batches can be measured, and the advice."""
    batch_size = program.parts.splits.batch_size
    if program.parts.elsewhere:  # the device that lacks memory isn't known
        return {}, "use a smaller batch_size, or place modules otherwise"
    try:
        needs = _measure_needs(program, batch_size)
    except Exception as error:
        return {}, f"use a smaller batch_size (what a small batch needs can't be measured: {describe_error(error)})"
    if not needs:
        return {}, "use a smaller model, or a device with more memory: not even the smallest batch fits"
    small, large = min(needs), max(needs)
    per_sample = (needs[large] - needs[small]) / (large - small) if large > small else needs[small] / small
    fixed = max(0.0, needs[small] - per_sample * small)
    need = {f"the batch of {batch_size} about": int(fixed + per_sample * batch_size)}
    free = _SAFE_SHARE * free_memory_bytes(program.device) - fixed - _used_bytes(program)["gradients"]
    fits = max(large, int(free / per_sample) if per_sample > 0 else batch_size)
    return need, _fitting_batch_size(program, fits, batch_size)


def _measure_needs(program: Program, batch_size: int) -> dict[int, int]:
    needs: dict[int, int] = {}
    for samples in (few for few in (1, 2, 4) if few <= batch_size):
        if 3 * max(needs.values(), default=0) > free_memory_bytes(program.device):
            break  # a system that overcommits memory would kill this process
        try:
            _measure_need(program, samples)  # the first step also creates the optimizer's state
            needs[samples] = _measure_need(program, samples)
        except Exception as error:
            if is_out_of_memory(error):
                break
            if samples > 1:  # a single sample can be too few, as for BatchNorm
                raise
    return needs


def _fitting_batch_size(program: Program, fits: int, batch_size: int) -> str:
    task = program.parts.task
    own_loader = task.batch_size is None and isinstance(task.data, torch.utils.data.DataLoader)
    if batch_size == 1:
        return "use a smaller model, or smaller samples"
    smaller = min(1 << (fits.bit_length() - 1), (batch_size + 1) // 2)
    by = f"about {fits} samples would fit" if fits < batch_size else "the need varies, or others took memory too"
    where = "in your DataLoader" if own_loader else f"(--batch-size {smaller})"
    return f"start again with batch_size={smaller} {where}: {by}"


def _measure_need(program: Program, samples: int) -> int:
    """Returns the peak bytes of one step on a batch of `samples` samples, without the parameters' gradients."""
    batch = to_device(first_batch(program.parts.splits, samples), program.device)
    program.optimizer.zero_grad()
    gradients = _used_bytes(program)["gradients"]
    if program.device.type in ("cuda", "xpu"):
        module = torch.get_device_module(program.device)
        before = module.memory_allocated(program.device)
        module.reset_peak_memory_stats(program.device)
        program.step(batch)
        return max(0, module.max_memory_allocated(program.device) - before - gradients)
    with PeakMemory(live_tensors(program, batch)) as peak:
        program.step(batch)
    return max(0, peak.bytes - gradients)


def live_tensors(program: Program, batch: Any) -> list[Tensor]:
    """Returns the tensors that exist before a step."""
    state = list(program.optimizer.state.values())
    return [
        *program.model.parameters(),
        *program.model.buffers(),
        *program.average.values(),
        *tree_tensors([state, batch]),
    ]


class PeakMemory(ReadOnlyDispatchMode):
    """Sums the memory of all tensors that operations create while they exist; `bytes` is the peak."""

    def __init__(self, present: list[Tensor]) -> None:
        super().__init__()
        self.bytes = self._now = 0
        self._known = {_memory_place(tensor) for tensor in present}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_tensors(result):
            if tensor.layout is torch.strided and _memory_place(tensor) not in self._known:
                self._add(tensor)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage, place = tensor.untyped_storage(), _memory_place(tensor)
        self._known.add(place)
        self._now += storage.nbytes()
        self.bytes = max(self.bytes, self._now)
        weakref.finalize(storage, self._remove, place, storage.nbytes())

    def _remove(self, place: int, number: int) -> None:
        self._known.discard(place)
        self._now -= number


def _memory_place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
