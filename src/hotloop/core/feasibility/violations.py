"""Rules: (Plan, TaskFacts, Hardware) -> violations with reasons and fixes. Rules choose nothing.

`RULES` lists the rules, the most fundamental first. Rules of ranks are in `rank_plans.py`, rules of compiled and
recorded steps in `captured_plans.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from hotloop.core.feasibility.captured_plans import CAPTURE_RULES
from hotloop.core.feasibility.forecast import FeasibilityInput, InfeasibleValue, Rule, Violation, axis_violations
from hotloop.core.feasibility.rank_plans import RANK_RULES
from hotloop.core.format import format_digits
from hotloop.core.number_formats import REDUCED
from hotloop.core.records.hardware import Device, Hardware
from hotloop.core.records.training import TaskFacts
from hotloop.errors import DeviceError, InsufficientMemoryError, PlanError
from hotloop.plan import BASELINE, Plan

_MAX_SHOWN = 3
"""Violations in an error message, which is one line."""


def violations(plan: Plan, facts: TaskFacts, hardware: Hardware) -> list[Violation]:
    """Returns everything that prevents the plan from running for this Task on this machine."""
    device = find_device(plan, hardware)
    if device is None:
        names = ", ".join(device.name for device in hardware.devices)
        return [Violation(("device",), f"this machine has {names}", f"use --device {hardware.devices[0].name}")]
    case = FeasibilityInput(plan, facts, hardware, device)
    return [violation for rule in RULES for violation in rule(case)]


def check(plan: Plan, facts: TaskFacts, hardware: Hardware) -> None:
    """Rejects a plan that can't run.

    Raises:
        PlanError: with the first violations and their fixes; DeviceError for a missing device; InsufficientMemoryError
            if the plan may run later.
    """
    found = violations(plan, facts, hardware)
    if found:
        passing = all(violation.passing for violation in found)
        kind = DeviceError if found[0].axes == ("device",) else InsufficientMemoryError if passing else PlanError
        shown = found[:_MAX_SHOWN]
        reasons = [f"{describe_axes(plan, violation)} can't be run here: {violation.reason}" for violation in shown]
        raise kind("; ".join(reasons), fix="; ".join(dict.fromkeys(violation.fix for violation in shown)))


def describe_axes(plan: Plan, violation: Violation) -> str:
    """Returns the values of a violation, such as `precision=fp16 with device=cpu`."""
    return " with ".join(f"{axis}={getattr(plan, axis)}" for axis in violation.axes)


def is_plain(plan: Plan) -> bool:
    """Returns whether the plan is the baseline except for device, workers and threads."""
    where = ("device", "workers", "threads")
    return plan.with_axes(**{axis: getattr(BASELINE, axis) for axis in where}) == BASELINE


def infeasible_values(plan: Plan, facts: TaskFacts, hardware: Hardware) -> list[InfeasibleValue]:
    """Returns the values of each axis that can't run with the plan's other axes."""
    found = []
    for axis, values in _alternatives(hardware).items():
        for value in values:
            other = plan.with_axes(**{axis: value})
            about = [violation for violation in violations(other, facts, hardware) if axis in violation.axes]
            found += [InfeasibleValue(axis, value, violation) for violation in about[:1]]
    return found


def _alternatives(hardware: Hardware) -> dict[str, tuple[Any, ...]]:
    """Returns the values to check per axis; one value stands for all numbers."""
    kinds = {device.kind for device in hardware.devices}
    named = {
        axis: get_args(Plan.model_fields[axis].annotation)
        for axis in ("precision", "layout", "residency", "compile", "optimizer", "allocator", "cudnn")
    }
    missing = tuple(kind for kind in ("cuda", "mps", "xpu") if kind not in kinds)
    return {"device": missing, **named, "rewrites": ("all",), "graphs": ("step", 8), "accumulation": (2,)}


def find_device(plan: Plan, hardware: Hardware) -> Device | None:
    return _find_by_name(plan.device, hardware)


def _find_by_name(name: str, hardware: Hardware) -> Device | None:
    return hardware.device(name) or next((device for device in hardware.devices if name == device.kind), None)


# --- numbers of threads and processes

_THREADS_PER_CORE = 4
_WORKERS_PER_CORE = 16


def _check_core_count(case: FeasibilityInput) -> Iterator[Violation]:
    cores = case.hardware.processor.logical_cores or case.hardware.processor.allowed_cores
    for axis, most, kind in (
        ("threads", _THREADS_PER_CORE * cores, "threads of one operation"),
        ("workers", _WORKERS_PER_CORE * cores, "processes that load data"),
    ):
        if (getattr(case.plan, axis) or 0) > most:
            yield Violation(
                (axis,),
                f"this machine has {cores} logical core{'' if cores == 1 else 's'}, and more than {most} "
                f"{kind} overload it",
                f"use {axis}={cores}",
            )


# --- placement


_IN_ONE_PLACE = {
    "compile": "a compiled step runs on one device",
    "graphs": "a recorded step runs on one device",
    "parallel": "a rank has one device",
}
"""Reasons against axes with modules on several devices."""


def _check_placement(case: FeasibilityInput) -> Iterator[Violation]:
    plan, hardware = case.plan, case.hardware
    if plan.placement is None:
        return
    yield from axis_violations(plan, _IN_ONE_PLACE, "placement", "placement=none")
    names = ", ".join(device.name for device in hardware.devices)
    for module, name in plan.placement.items():
        if _find_by_name(name, hardware) is None:
            reason = f"there is no {name} for {module!r}: this machine has {names}"
            yield Violation(("placement",), reason, "use one of these")
    kinds = {name.partition(":")[0] for name in (case.device.name, *plan.placement.values())}
    if plan.precision in ("bf16", "fp16") and len(kinds) > 1:
        reason = f"autocast would have to be the same on {' and '.join(sorted(kinds))}"
        fix = "use precision=default or precision=fp32, or devices of one kind"
        yield Violation(("precision", "placement"), reason, fix)
    if case.facts.closure:
        reason = f"{case.facts.optimizer} treats all parameters as one vector, on one device"
        yield Violation(("placement",), reason, "use placement=none, or another optimizer")


# --- several optimizers


_IN_ONE_UPDATE = ("compile", "rewrites", "graphs", "accumulation", "parallel")
"""Axes whose steps compute all gradients before a single update."""


def _check_alternating_updates(case: FeasibilityInput) -> Iterator[Violation]:
    if not case.facts.optimizers:
        return
    names = ", ".join(map(repr, case.facts.optimizers))
    reason = (
        f"the step updates the optimizers {names} in turn, and such steps run eagerly, in one process, on whole batches"
    )
    for axis in _IN_ONE_UPDATE:
        plain = getattr(BASELINE, axis)
        if getattr(case.plan, axis) != plain:
            yield Violation((axis,), reason, f"use {axis}={plain}")
    if case.plan.precision == "fp16":
        reason = f"fp16 scales one loss, and the step has one for each of the optimizers {names}"
        yield Violation(("precision",), reason, "use precision=bf16 or precision=fp32")


# --- precision, layout


def _check_arithmetic(case: FeasibilityInput) -> Iterator[Violation]:
    plan, device, axes = case.plan, case.device, ("precision", "device")
    fix = "use precision=default or precision=fp32"
    if plan.precision == "fp16" and device.kind == "cpu":
        yield Violation(axes, "a CPU has no loss scaling, and no faster fp16 arithmetic", fix)
    elif plan.precision in REDUCED and plan.precision not in device.precisions:
        yield Violation(axes, _MISSING_ARITHMETIC[plan.precision].format(device=device.name), fix)


_MISSING_ARITHMETIC = {
    "tf32": "{device} has no tf32 arithmetic, which GPUs of NVIDIA have from Ampere on",
    "bf16": "{device} has no bf16 instructions (a CPU: avx512_bf16, amx_bf16 or ARM's bf16), so bf16 would be slower than fp32",
    "fp16": "{device} has no fp16 arithmetic",
}


def _check_image_layout(case: FeasibilityInput) -> Iterator[Violation]:
    if case.plan.layout == "channels_last" and not case.facts.images:
        reason = "no input and no parameter has the 4 or 5 dimensions of images"
        yield Violation(("layout",), reason, "use layout=contiguous")


# --- data


def _check_residency(case: FeasibilityInput) -> Iterator[Violation]:
    residency, facts, free = case.plan.residency, case.facts, case.device.memory_free
    if residency != "stream" and facts.data == "Stream":
        reason = "the data is a stream with an order of its own, which can't be read once and stored"
        yield Violation(("residency",), reason, "use residency=stream, or give a map-style data set or arrays")
    wanted = (facts.data_bytes or 0) if residency == "device" and case.device.is_accelerator else 0
    if free is not None and wanted > free.value:
        sizes = f"the data takes {_format_gib(wanted)} and {case.device.name} has {_format_gib(free.value)} free"
        yield Violation(("residency", "device"), sizes, "use residency=host", passing=True)


def _format_gib(count: float) -> str:
    return f"{format_digits(count / 2**30)} GiB"


# --- memory


def _check_allocator(case: FeasibilityInput) -> Iterator[Violation]:
    if case.plan.allocator == "keep" and case.hardware.allocator is None:
        reason = (
            "only glibc's allocator has this setting, and here another allocator is in use, or the environment "
            "sets it already"
        )
        yield Violation(("allocator",), reason, "use allocator=default")


# --- cudnn


def _check_cudnn(case: FeasibilityInput) -> Iterator[Violation]:
    if case.plan.cudnn == "default":
        return
    fix = "use cudnn=default"
    if case.device.kind != "cuda":
        yield Violation(("cudnn", "device"), f"cuDNN is for CUDA devices, not for {case.device.name}", fix)
    if not case.facts.has_convolution_layers:
        yield Violation(("cudnn",), "the model has no convolution, and cuDNN chooses algorithms of convolutions", fix)


# --- update


def _check_optimizer(case: FeasibilityInput) -> Iterator[Violation]:
    wanted, facts = case.plan.optimizer, case.facts
    if wanted == "default" or wanted in facts.implementations:
        return
    reason = f"{facts.optimizer} has no such implementation"
    if wanted == "fused" and facts.not_fused:
        reason += f" for this model: {facts.not_fused}"
    if facts.implementations:
        yield Violation(("optimizer",), reason, f"use one of: default, {', '.join(facts.implementations)}")
    else:
        yield Violation(("optimizer",), f"{reason}, and no other to choose from", "use optimizer=default")


def _check_accumulation(case: FeasibilityInput) -> Iterator[Violation]:
    pieces, facts = case.plan.accumulation, case.facts
    if pieces > facts.batch_size:
        reason = f"a batch of {facts.batch_size} can't be cut into {pieces} pieces"
        yield Violation(("accumulation",), reason, f"use at most accumulation={facts.batch_size}")
    if pieces > 1 and facts.closure:
        reason = f"{facts.optimizer} calls the loss itself, and needs the loss of the whole batch"
        yield Violation(("accumulation",), reason, "use accumulation=1")


RULES: tuple[Rule, ...] = (
    _check_core_count,
    *RANK_RULES,
    _check_placement,
    _check_alternating_updates,
    _check_arithmetic,
    _check_image_layout,
    _check_residency,
    *CAPTURE_RULES,
    _check_allocator,
    _check_cudnn,
    _check_optimizer,
    _check_accumulation,
)


def read_stored_plan(facts: TaskFacts) -> bool:
    """Returns whether training reads samples more than once; a single epoch streams its data better."""
    return facts.steps is None or facts.batches is None or facts.steps > facts.batches
