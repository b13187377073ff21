"""Advice for a script: its recorded operators become the costs of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hotloop.advisor.parallel_ways import at_batch
from hotloop.core.records.advice import HardwareAdvice, MeasuredStep
from hotloop.core.records.profile import OperatorTime, Profile
from hotloop.core.records.step_costs import Kind, OperatorCost, StepCosts, StepPhase
from hotloop.core.reporter import Progress, Report
from hotloop.errors import TaskError
from hotloop.hardware_advice.task_advice import AdviceRequest, Subject, advise_subject, request_machines_here
from hotloop.profiler.script import profile_script
from hotloop.profiler.step_costs.operator_kinds import operator_kind

_PRODUCTS = ("linear", "batched_product", "convolution", "attention", "recurrent")
_PHASES: dict[str, StepPhase] = {"forward": "forward", "loss": "forward", "backward": "backward", "update": "update"}
_UNKNOWN_BATCHES = 1000
_FLOAT_BYTES = 4
_STATE_COPIES = {"SGD": 1, "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "RMSprop": 1, "Adagrad": 1}
"""Tensors of the size of a parameter that an optimizer stores, at most."""


def advise_script(
    path: Path | str,
    arguments: Sequence[str],
    steps: int,
    epochs: int,
    request: AdviceRequest,
    *,
    stdout: int | None = None,
    say: Report = lambda line: None,
    progress: Progress = lambda doing, share: None,
) -> HardwareAdvice:
    """Returns the advice for a script, which is stopped as by Ctrl-C after `steps` measured steps.

    Args:
        epochs: complete rounds of the script's DataLoader in the whole run.
        stdout: a file number for the script's output.

    Raises:
        TaskError: no training step was recognised.
    """
    request.machines()
    here, busy = request_machines_here(request, progress)
    profile = profile_script(path, arguments, steps=steps, stdout=stdout, ends=True)
    costs = costs_of_profile(profile)
    size = costs.batch_size
    batches = next((loader.batches for loader in profile.loaders if loader.batches), None)
    notes = [
        "the memory of activations is estimated from the operators' outputs",
        f"{profile.steps} steps of the script were recorded, then it was stopped",
    ]
    if batches is None:
        notes.append(f"the length of the data is unknown: an epoch is taken as {_UNKNOWN_BATCHES:,} batches")
    sizes = list(dict.fromkeys(request.batch_sizes)) or [size]
    sizes.sort(key=lambda one: (one != size, one))
    device = "cpu" if profile.device == "cpu" else profile.device
    measured = {(size, device): _measured(profile.step_ms)} if profile.step_ms and size in sizes else {}
    subject = Subject(
        name=Path(str(path)).name,
        costs={one: at_batch(costs, one) for one in sizes},
        steps={one: epochs * math.ceil((batches or _UNKNOWN_BATCHES) * size / one) for one in sizes},
        epochs=epochs,
        measured={} if profile.busy else measured,
        notes=tuple(notes),
        busy=profile.busy or busy,
    )
    return advise_subject(subject, here, request, say=say)


def _measured(step_ms: float) -> MeasuredStep:
    """Returns the profile's median step, with 10 % on each side: a profile stores no single steps."""
    return MeasuredStep(step_ms=step_ms, low_ms=0.9 * step_ms, high_ms=1.1 * step_ms)


def costs_of_profile(profile: Profile) -> StepCosts:
    """Returns the costs of a recorded step; FLOPs and bytes are the profiler's.

    Raises:
        TaskError: the profile has no step with operators.
    """
    operators = _as_lists([_cost(one) for one in profile.operators if one.calls > 0])
    if not profile.steps or not operators:
        reason = profile.notes[0] if profile.notes else f"exit code {profile.exit_code}"
        raise TaskError(
            f"no training step of {profile.source} was recognised ({reason})",
            expected="a script that trains a torch model: a backward pass and an optimizer's step",
        )
    numbers = sum(group.numbers for optimizer in profile.optimizers for group in optimizer.groups)
    states = sum(
        _STATE_COPIES.get(optimizer.kind, 2) * group.numbers
        for optimizer in profile.optimizers
        for group in optimizer.groups
    )
    tensors = sum(group.tensors for optimizer in profile.optimizers for group in optimizer.groups)
    saved = sum(one.written_bytes * one.count for one in operators if one.phase == "forward" and one.kind != "view")
    largest = max((one.written_bytes for one in operators), default=0)
    fixed = (2 * numbers + states) * _FLOAT_BYTES
    return StepCosts(
        operators=operators,
        batch_size=max(1, round(profile.samples_per_step or 1)),
        parameters=numbers,
        parameter_bytes=numbers * _FLOAT_BYTES,
        buffer_bytes=0,
        gradient_bytes=numbers * _FLOAT_BYTES,
        optimizer_bytes=states * _FLOAT_BYTES,
        input_bytes=sum(_elements(shape) * _FLOAT_BYTES for shape in profile.batch),
        activation_peak_bytes=saved + largest,
        peak_bytes=fixed + saved + largest,
        saved_bytes=saved,
        module_calls=round(sum(module.calls for module in profile.modules)),
        parameter_tensors=tensors,
    )


def _as_lists(operators: Sequence[OperatorCost]) -> tuple[OperatorCost, ...]:
    """Returns the operators with the update's as one call over all parameters, which is torch's default on GPUs."""
    found: dict[str, OperatorCost] = {}
    others = []
    for one in operators:
        if one.phase != "update" or one.kind == "view":
            others.append(one)
            continue
        before = found.get(one.name)
        found[one.name] = replace(
            before or one,
            kind="update",
            flops=(before.flops if before else 0) + one.flops * one.count,
            read_bytes=(before.read_bytes if before else 0) + one.read_bytes * one.count,
            written_bytes=(before.written_bytes if before else 0) + one.written_bytes * one.count,
            count=1,
        )
    return (*others, *found.values())


def _cost(operator: OperatorTime) -> OperatorCost:
    name = operator.name.partition("::")[2] or operator.name
    phase = _PHASES.get(operator.phase, "update" if operator.within else "forward")
    kind: Kind = operator_kind(name, phase)
    if kind == "other" and not operator.bytes:
        kind = "view"
    calls = max(1, round(operator.calls))
    flops, moved = (operator.flops or 0) / calls, (operator.bytes or 0) / calls
    shapes = [tuple(map(int, shape.split("x"))) for shape in operator.shapes if _is_shape(shape)]
    return OperatorCost(
        name=f"aten.{name}",
        kind=kind,
        phase=phase,
        flops=round(flops),
        read_bytes=round(moved * 2 / 3),
        written_bytes=round(moved / 3),
        shape=_product_shape(kind, name, shapes, flops),
        dtype=operator.dtype or "float32",
        launches=0 if kind == "view" else 1,
        count=calls,
    )


def _product_shape(kind: Kind, name: str, shapes: list[tuple[int, ...]], flops: float) -> tuple[int, ...]:
    """Returns (batch, m, n, k) of a product; sizes that shapes don't show follow from the FLOPs."""
    if kind not in _PRODUCTS or not flops:
        return (max((math.prod(shape) for shape in shapes), default=1),)
    matrices = [shape for shape in shapes if len(shape) >= 2]
    if name.startswith(("add", "badd")) and len(matrices) > 2:
        matrices = matrices[1:]
    if kind in ("linear", "batched_product") and matrices:
        *batch, m, k = matrices[0]
        rows = math.prod(batch) if kind == "batched_product" else 1
        m = m if kind == "batched_product" else m * math.prod(batch)
        return rows, max(1, m), max(1, round(flops / (2 * rows * max(1, m) * max(1, k)))), max(1, k)
    return ()


def _is_shape(text: str) -> bool:
    return bool(text) and all(part.isdecimal() for part in text.split("x"))


def _elements(text: str) -> int:
    return math.prod(map(int, text.split("x"))) if _is_shape(text) else 0
