"""Explanation of an exception from a step, an evaluation or a callback as one of hotloop's errors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.core.callback import Callback, View
from hotloop.data.batch_tree import tree_tensors
from hotloop.data.order import Order
from hotloop.distributed.world import is_rank_loss
from hotloop.errors import (
    DataError,
    DeviceError,
    DiskError,
    HotloopError,
    MemoryExhausted,
    NonFiniteError,
    PartsDifferError,
    RankLostError,
    TaskError,
    TrainingError,
    dead_dataloader_worker,
    describe_error,
    full_disk_path,
    is_out_of_memory,
)
from hotloop.lowering.checks.single_sample import SINGLE_VALUE_ERROR
from hotloop.lowering.failures.location import (
    batch_at,
    describe_checkpoint,
    local_at,
    module_at,
    module_titles,
    rank_sample_numbers,
    step_under_way,
    unregistered_module_at,
)
from hotloop.lowering.failures.out_of_memory import explain_out_of_memory
from hotloop.lowering.program import Program

_DEVICE = re.compile(r"\b(cpu|gpu|cuda|mps|xpu|meta|hpu|xla)(:\d+)?\b", re.IGNORECASE)

_TENSOR = re.compile(r"\btorch\.(?:(cuda|xpu|mps|hpu)\.)?[A-Z]\w*Tensor\b")

_DEVICE_MESSAGES = re.compile(
    r"(same|different|expected|on) device|device type|but expected (it to be )?on|type \(torch\.\S+Tensor\)"
    r"|Placeholder storage has not been allocated",
    re.IGNORECASE,
)

_MISSING = re.compile(
    r"not compiled with \w+ enabled|No (CUDA|HIP|XPU) GPUs are available|Found no NVIDIA driver|invalid device ordinal"
)


def mismatched_devices(text: str, own: str) -> list[str] | None:
    """Returns the two devices in `text`, an error of torch; None if the error has another cause.

    Args:
        own: the plan's device, which texts with a single device omit.
    """
    if not _DEVICE_MESSAGES.search(text):
        return None
    found = list(dict.fromkeys(_devices_in(text)))
    if len(found) == 1 and "same device" in text:
        found.append(own if own.partition(":")[0] != found[0].partition(":")[0] else "another device")
    return found[:2] if len(found) > 1 else None


def is_missing_device(text: str) -> bool:
    """Checks whether the user's code requests a device that this machine or this torch lacks."""
    return _MISSING.search(text) is not None


def _devices_in(text: str) -> list[str]:
    if typed := [match[1] or "cpu" for match in _TENSOR.finditer(text)]:
        return typed
    if "Placeholder storage" in text:
        return ["cpu", "mps"]
    return [match[0].lower() for match in _DEVICE.finditer(text)]


_DTYPE_MESSAGES = re.compile(
    r"same dtype|expected scalar type|following scalar types|Found dtype|target dtype|result type \w+ can't be cast"
    r"|not implemented for '|Input type \(.+\) and (bias|weight) type|does not match weight dtype|class probabilities"
)

_DTYPES = {
    "double": torch.float64,
    "float64": torch.float64,
    "float": torch.float32,
    "float32": torch.float32,
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "long": torch.int64,
    "int": torch.int32,
    "short": torch.int16,
    "byte": torch.uint8,
    "unsigned char": torch.uint8,
    "char": torch.int8,
    "bool": torch.bool,
}

_DTYPE_WORDS = re.compile(r"\b(unsigned char|" + "|".join(_DTYPES) + r")(?:Tensor)?\b", re.IGNORECASE)


def is_mismatch(text: str) -> bool:
    """Checks whether `text` is a torch error about dtypes that don't match."""
    return _DTYPE_MESSAGES.search(text) is not None


def dtypes_in(text: str) -> set[torch.dtype]:
    """Returns the dtypes in such a text."""
    return {_DTYPES[match[1].lower()] for match in _DTYPE_WORDS.finditer(text)}


def dtype_remedy(text: str, *, from_data: bool) -> str:
    """Returns the advice, as a sentence that begins with a verb."""
    if "class probabilities" in text:
        return "give class numbers of shape (batch,), or float probabilities of shape (batch, classes)"
    if "target" in text or "can't be cast" in text:
        return "give classes as y.long(), and targets of other losses as y.float()"
    if re.search(r"(expected scalar type|scalar types:) Long", text):
        return "give indices and classes as int64, such as x.long()"
    if not from_data:
        return "make tensors with dtype=x.dtype in the model and the loss"
    return "give inputs and targets in the dtype of the parameters, such as x.float()"


def explain_error(error: Exception, program: Program, saved_step: int | None, during: str = "") -> HotloopError:
    """Returns the error with what happened, where, and what to do; an error of hotloop is returned unchanged.

    After a lack of memory small batches run on the program to measure their need; it can't be used afterwards.

    Args:
        error: raised by `advance` or an evaluation.
        program: in its state at the error.
        saved_step: the step of the last good checkpoint, if there is one.
        during: `validation` or `test`; empty for a training step.
    """
    if isinstance(error, HotloopError):
        return error
    if (lost := dead_dataloader_worker(error)) is not None:
        return lost
    position = program.position
    place = f"{during} after step {position.step}" if during else step_under_way(position)
    failure = _Failure(error, program, place, saved_step, during)
    if is_out_of_memory(error):
        return explain_out_of_memory(error, program, place, training=not during)
    explained = (explanation for explain in _EXPLANATIONS if (explanation := explain(failure)))
    return next(explained, None) or _explain_user_error(failure)


@dataclass(frozen=True)
class _Failure:
    error: Exception
    program: Program
    place: str
    saved_step: int | None
    during: str

    @property
    def text(self) -> str:
        return " ".join(str(self.error).split())

    @property
    def model(self) -> nn.Module:
        return self.program.model

    @property
    def module(self) -> str:
        """Title of the module in which the error was raised; empty outside the model."""
        module = module_at(self.error, self.model)
        return module_titles(self.model)[id(module)] if module is not None else ""

    @property
    def line(self) -> str:
        """` (file.py:12)`: the innermost line of the user's code; empty if there is none."""
        found = re.search(r" \([^()]+:\d+\)$", describe_error(self.error))
        return found[0] if found else ""

    @property
    def where(self) -> str:
        return (f" in {self.module}" if self.module else "") + self.line


def _explain_user_error(failure: _Failure) -> HotloopError:
    where = f", in {failure.module}" if failure.module else ""
    given = f"{failure.place} raised {describe_error(failure.error)}{where}"
    if failure.program.position.step == 0 and not failure.during:
        return TaskError(given, fix="check that the Task's model, loss and data fit together; nothing was trained yet")
    return TrainingError(given, fix=f"correct that line; {describe_checkpoint(failure.saved_step)}")


def _explain_full_disk(failure: _Failure) -> HotloopError | None:
    full = full_disk_path(failure.error)
    if full is None:
        return None
    return DiskError(
        f"{failure.place}: the disk of {full} is full",
        expected="free space on that disk",
        fix=f"free some space there, or set TMPDIR to a folder on another disk; {describe_checkpoint(failure.saved_step)}",
    )


def _explain_devices(failure: _Failure) -> HotloopError | None:
    device = str(failure.program.device)
    if is_missing_device(failure.text):
        return DeviceError(
            f"{failure.place} names a device that this machine lacks{failure.where}: {failure.text}",
            expected=f"tensors on {device}, the plan's device",
            fix="take the device from a tensor, such as x.device, instead of naming a device",
        )
    found = mismatched_devices(failure.text, device)
    if found is None:
        return None
    stray = unregistered_module_at(failure.error, failure.model)
    advice = "keep a module's constant tensors by self.register_buffer(...), make new ones with device=x.device"
    if placed := failure.program.parts.plan.placement:
        advice = (
            f"call a placed module, use neither its weights nor other methods, or place what is around it; {advice}"
        )
    return DeviceError(
        f"{failure.place}: one operation has tensors on {' and '.join(found)}{failure.where}"
        + (f", which runs a {type(stray).__name__} that is no registered part of it" if stray is not None else ""),
        expected="all on one device" if placed else f"all on {device}",
        fix=advice if stray is None else "keep modules as attributes or in an nn.ModuleList",
    )


def _explain_label(failure: _Failure) -> HotloopError | None:
    found = re.match(r"Target (-?\d+) is out of bounds", failure.text)
    if found is None:
        return None
    output, label = local_at(failure.error, "output"), int(found[1])
    classes = output.shape[1] if isinstance(output, Tensor) and output.ndim > 1 else None
    return DataError(
        f"{failure.place}: the {' '.join([failure.during, 'data']).strip()} has label {label}"
        f"{_describe_sample(failure, label)}"
        + (f", but the model has {classes} outputs" if classes else ", which is no class of the loss"),
        expected=f"labels from 0 to {classes - 1}" if classes else "labels from 0 to the number of classes less one",
        fix="check the labels, or the width of the model's last layer",
    )


def _describe_sample(failure: _Failure, label: int) -> str:
    """Returns ` in sample 57`, by its number in the user's data; empty if unknown."""
    batch, order, position = batch_at(failure.error), failure.program.parts.splits.order, failure.program.position
    target = batch[-1] if isinstance(batch, tuple | list) else None
    if failure.during or not isinstance(order, Order) or not isinstance(target, Tensor) or target.ndim == 0:
        return ""
    rows = (target.reshape(len(target), -1) == label).any(dim=1).nonzero().flatten()
    numbers = rank_sample_numbers(failure.program, position)
    return f" in sample {int(numbers[rows[0]])}" if len(rows) and numbers is not None else ""


def _explain_single_sample(failure: _Failure) -> HotloopError | None:
    if SINGLE_VALUE_ERROR not in failure.text or failure.during:
        return None
    return DataError(
        f"{failure.place}: a batch has one value for each channel{failure.where}, which a batch norm can't normalise",
        expected="2 samples or more in each batch",
        fix=f"leave such batches out (drop_last of the Task or the DataLoader), or use another batch_size; "
        f"{describe_checkpoint(failure.saved_step)}",
    )


def _explain_index(failure: _Failure) -> HotloopError | None:
    if "device-side assert" in failure.text:
        return DataError(
            f"{failure.place}: an index or label was out of range on {failure.program.device}, which doesn't say where",
            fix="run it with --device cpu, which names the place",
        )
    module = module_at(failure.error, failure.model)
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or not isinstance(failure.error, IndexError):
        return None
    return DataError(
        f"{failure.place}: an index is out of range{failure.where}, which has {module.num_embeddings} rows",
        expected=f"indices from 0 to {module.num_embeddings - 1}",
        fix="check the indices in the data, or give the embedding more rows",
    )


def _explain_flatten(failure: _Failure) -> HotloopError | None:
    """Explains images that reach a linear layer without flattening."""
    module, given = module_at(failure.error, failure.model), _input_at(failure.error)
    if not isinstance(module, nn.Linear) or given is None or "shapes cannot be multiplied" not in failure.text:
        return None
    if given.ndim < 3 or math.prod(given.shape[1:]) != module.in_features:
        return None
    return TaskError(
        f"{failure.place}: samples of shape {tuple(given.shape[1:])} reach {failure.module}",
        expected=f"{module.in_features} numbers in one dimension for each sample",
        fix="write nn.Flatten() before that layer, or x = x.flatten(1) in forward",
    )


def _input_at(error: BaseException) -> Tensor | None:
    trace, value = error.__traceback__, None
    while trace is not None:
        if isinstance(trace.tb_frame.f_locals.get("self"), nn.Linear):
            value = trace.tb_frame.f_locals.get("input", value)
        trace = trace.tb_next
    return value if isinstance(value, Tensor) else None


def _explain_dtype(failure: _Failure) -> HotloopError | None:
    if not is_mismatch(failure.text):
        return None
    of_batch = dict.fromkeys(tensor.dtype for tensor in tree_tensors(batch_at(failure.error)))
    of_model = {parameter.dtype for parameter in failure.model.parameters()}
    from_data = bool((dtypes_in(failure.text) - of_model) & of_batch.keys())
    names = " and ".join(str(dtype).removeprefix("torch.") for dtype in of_batch)
    holds = f"; the batch holds {names}" if of_batch else ""
    kind: Callable[..., HotloopError] = DataError if from_data else TaskError
    return kind(
        f"{failure.place}: dtypes that don't go together{failure.where}: {failure.text}{holds}",
        fix=dtype_remedy(failure.text, from_data=from_data),
    )


_EXPLANATIONS: tuple[Callable[[Any], HotloopError | None], ...] = (
    _explain_full_disk,
    _explain_devices,
    _explain_single_sample,
    _explain_label,
    _explain_index,
    _explain_flatten,
    _explain_dtype,
)


def explain_callback_error(error: Exception, callback: Callback, view: View, saved: int | None) -> Exception:
    """Returns the error in one line with the callback's name; an error of hotloop is returned unchanged.

    Args:
        saved: the step of the last checkpoint, if there is one.
    """
    if isinstance(error, HotloopError) or str(callback.__module__).startswith("hotloop."):
        return error
    name = getattr(callback, "__name__", type(callback).__name__)
    trained = "what was trained is saved" if view.step else "nothing was trained yet"
    if view.step != (saved or 0):
        trained = "no checkpoint was written yet" if saved is None else f"the last checkpoint is of step {saved}"
    return TaskError(
        f"the callback {name} raised {describe_error(error)} at the event {view.event!r} after step {view.step}",
        fix=f"correct that line; {trained}",
    )


def explain_rank_error(error: Exception, program: Program, saved_step: int | None, during: str = "") -> HotloopError:
    """Returns the error of `explain_error`, with the rank if there are several."""
    world = program.parts.world
    if world.is_single:
        return explain_error(error, program, saved_step, during)
    if is_rank_loss(error):
        return RankLostError(f"rank {world.rank} lost another rank in {step_under_way(program.position)}")
    if is_out_of_memory(error):
        place = during or step_under_way(program.position)
        fix = "use a smaller batch_size, or more ranks, each of which computes a smaller part of it"
        return MemoryExhausted(f"rank {world.rank}: {place} ran out of memory: {describe_error(error)}", fix=fix)
    found = explain_error(error, program, saved_step, during)
    if isinstance(found, PartsDifferError):  # all ranks raise it together
        return found
    place = f"{during} after step {program.position.step}: " if during and during not in found.given else ""
    return type(found)(f"rank {world.rank}: {place}{found.given}", expected=found.expected, fix=found.fix)


def nonfinite_error_of_ranks(reached: int) -> NonFiniteError:
    """Returns the error for several ranks: only one process alone, with the whole batch, can find the place."""
    return NonFiniteError(
        f"by step {reached} the loss or a parameter became NaN or infinite",
        fix="go on with --set parallel=none, which names the step and the module",
    )
