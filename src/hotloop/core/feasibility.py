"""Rules: (Plan, TaskFacts, Hardware) -> violations with reasons and fixes. Rules choose nothing.

`RULES` lists the rules, the most fundamental first: of one process, of captured steps, and of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from hotloop.core.format import format_digits
from hotloop.core.number_formats import REDUCED
from hotloop.core.records.hardware import Device, Hardware
from hotloop.core.records.training import TaskFacts
from hotloop.errors import DeviceError, InsufficientMemoryError, PlanError
from hotloop.plan import AXES_OF_PARALLEL, BASELINE, Plan


@dataclass(frozen=True)
class Violation:
    """A reason why a plan can't run.

    Attributes:
        axes: axes whose values conflict with the Task, the machine or each other; the axis to change comes first.
        reason: a clause.
        fix: an instruction, beginning with a verb.
        passing: whether the plan may run later, with more free memory.
    """

    axes: tuple[str, ...]
    reason: str
    fix: str
    passing: bool = False


@dataclass(frozen=True)
class FeasibilityInput:
    """The input of a rule; `device` is the plan's."""

    plan: Plan
    facts: TaskFacts
    hardware: Hardware
    device: Device


Rule = Callable[[FeasibilityInput], Iterator[Violation]]


def axis_violations(
    plan: Plan, reasons: Mapping[str, str], other: str, alternative: str, *allowed: object
) -> Iterator[Violation]:
    """Yields a violation with the axis `other` for each axis with neither the baseline's nor an allowed value."""
    for axis, reason in reasons.items():
        default = getattr(BASELINE, axis)
        if getattr(plan, axis) not in (default, *allowed):
            value = "none" if default is None else default
            yield Violation((axis, other), reason, f"use {axis}={value}, or {alternative}")


@dataclass(frozen=True)
class PlanForecast:
    """The expected choice of a training under `auto`.

    Attributes:
        remembered: the proven fastest plan of an earlier race; else None.
        choice: the plan of the rules and of earlier races, used without `remembered`.
        compiled: compiled plans that a search beside the training tries if timed steps show that a compilation pays.
        passed_over, left_open, refused, device: see `PlanOptions`.
    """

    remembered: Plan | None
    choice: RankedPlan
    compiled: list[Plan]
    passed_over: list[str]
    left_open: list[str]
    refused: list[InfeasibleValue]
    device: Device

    @property
    def plan(self) -> Plan:
        """The plan at the start of the training."""
        return self.remembered or self.choice.plan


@dataclass(frozen=True)
class InfeasibleValue:
    axis: str
    value: Any
    violation: Violation


@dataclass(frozen=True)
class RankedPlan:
    """A feasible plan, and a sentence for each of its advantages."""

    plan: Plan
    why: tuple[str, ...]


# --- compile


def _check_compiler(case: FeasibilityInput) -> Iterator[Violation]:
    if case.plan.compile != "none" and case.device.kind == "cpu" and case.hardware.compiler is None:
        reason = "compiling for the CPU needs a C++ compiler, and there is none"
        yield Violation(("compile",), reason, f"{case.hardware.compiler_remedy}, or use compile=none")


def _check_compiled_step(case: FeasibilityInput) -> Iterator[Violation]:
    plan, facts = case.plan, case.facts
    if plan.compile == "none":
        return
    fix = "use compile=none"
    if facts.closure:
        yield Violation(("compile",), f"{facts.optimizer} calls the loss itself, any number of times", fix)
    if plan.compile == "package" and case.device.kind != "cpu":
        reason = "a package is made for the CPU: packages for other devices are untested"
        yield Violation(("compile", "device"), reason, "use compile=step")
    if plan.precision == "fp16" and plan.compile != "forward":
        reason = "fp16 skips a step whose gradients overflow, and that decision is outside of the compiled step"
        yield Violation(("compile", "precision"), reason, "use compile=forward, or precision=bf16")


_KIND_NAMES = {"cpu": "the CPU", "cuda": "CUDA devices"}

_REWRITES_BY_DEVICE = {"mm_by_onednn": "cpu", "draw_by_words": "cpu", "mm_as_sum": "cuda", "mm_in_parts": "cuda"}
"""Rewrites that exist for one kind of device."""


def _check_rewrites(case: FeasibilityInput) -> Iterator[Violation]:
    plan = case.plan
    if plan.rewrites == "none":
        return
    if plan.compile == "none":
        reason = "only a captured step can be rewritten"
        yield Violation(("rewrites", "compile"), reason, "use compile=step, or rewrites=none")
    if plan.rewrites in _REWRITES_BY_DEVICE and case.device.kind != (kind := _REWRITES_BY_DEVICE[plan.rewrites]):
        yield Violation(("rewrites", "device"), f"{plan.rewrites} is for {_KIND_NAMES[kind]}", "use rewrites=none")
    elif case.device.kind not in _KIND_NAMES:
        reason = "rewrites are measured on CPUs and CUDA devices alone"
        yield Violation(("rewrites", "device"), reason, "use rewrites=none")
    if plan.rewrites == "conv_in_pool" and not case.facts.convolutions:
        yield Violation(("rewrites",), "the model has no convolution", "use rewrites=none")
    if plan.rewrites == "draw_by_words" and plan.accumulation > 1:
        reason = "a proof replays the random numbers of whole batches, and with accumulation each piece draws its own"
        yield Violation(("rewrites", "accumulation"), reason, "use accumulation=1, or rewrites=none")


# --- graphs


def _check_cuda_graphs(case: FeasibilityInput) -> Iterator[Violation]:
    plan, facts = case.plan, case.facts
    if plan.graphs == "none":
        return
    fix = "use graphs=none"
    if case.device.kind != "cuda":
        yield Violation(("graphs", "device"), f"graphs are for CUDA devices, not for {case.device.name}", fix)
    if plan.graphs != "step" and plan.residency != "device":
        reason = "several steps in one replay cut their batches on the device, so the data must be stored there"
        yield Violation(("graphs", "residency"), reason, "use residency=device, or graphs=step")
    if plan.compile == "forward":
        reason = "a graph contains the whole step, and compile=forward leaves the update out"
        yield Violation(("graphs", "compile"), reason, "use compile=step, or compile=none")
    if plan.compile == "package":
        yield Violation(
            ("graphs", "compile"), "a package is for the CPU, and graphs are for CUDA devices", "use compile=step"
        )
    if plan.precision == "fp16":
        reason = "fp16 skips a step whose gradients overflow, and the host decides which"
        yield Violation(("graphs", "precision"), reason, "use precision=bf16, or graphs=none")
    if facts.closure:
        yield Violation(("graphs",), f"{facts.optimizer} calls the loss itself, any number of times", fix)


JOINT_MODES = ("tensor", "stages")
"""Modes in which each rank has a part of the model, and all ranks compute each batch together."""

_IN_STEP = ("data", "sharded", "towers", "local", *JOINT_MODES)
"""Modes in which all ranks process the batches together."""

_SINGLE_RANK_AXES = {
    "compile": "compiled steps on several ranks are untested",
    "graphs": "graphs of a step that ranks share are untested",
    "accumulation": "the ranks cut each batch into parts already",
}
"""Reasons against axes in the modes of `_IN_STEP`."""


def _check_rank_count(case: FeasibilityInput) -> Iterator[Violation]:
    plan = case.plan
    if plan.parallel == "none" and plan.ranks not in (None, 1):
        reason = "no axis says how the ranks share the training"
        yield Violation(("ranks", "parallel"), reason, "use parallel=data, or leave ranks out")
    if plan.parallel == "none" and plan.workforce != BASELINE.workforce:
        reason = "a single process runs on the machine that started it"
        yield Violation(("workforce", "parallel"), reason, "use parallel=data, or leave workforce out")


_SINGLE_MODE_AXES = {
    "local": "only the ranks of parallel=local average their weights",
    "stages": "only parallel=stages passes microbatches from rank to rank",
    "async": "only the workers of parallel=async can have old parameters",
}
"""Reasons against axes that belong to another value of `parallel`."""


def _check_axes_of_other_modes(case: FeasibilityInput) -> Iterator[Violation]:
    plan = case.plan
    for parallel, reason in _SINGLE_MODE_AXES.items():
        for axis in AXES_OF_PARALLEL[parallel]:
            if plan.parallel != parallel and getattr(plan, axis) != getattr(BASELINE, axis):
                yield Violation((axis, "parallel"), reason, f"leave {axis} out, or use parallel={parallel}")


def _check_synchronous(case: FeasibilityInput) -> Iterator[Violation]:
    plan, facts = case.plan, case.facts
    if plan.parallel not in _IN_STEP:
        return
    yield from axis_violations(plan, _SINGLE_RANK_AXES, "parallel", "parallel=none")
    if facts.data == "Stream":
        reason = "the data is a stream with an order of its own, which may differ between ranks"
        yield Violation(("parallel",), reason, "use parallel=none, or give a map-style data set or arrays")
    if plan.ranks is not None and plan.ranks > facts.batch_size and plan.parallel not in JOINT_MODES:
        reason = f"a batch of {facts.batch_size} has no part for each of {plan.ranks} ranks"
        yield Violation(("ranks", "parallel"), reason, f"use at most ranks={facts.batch_size}")
    if case.device.kind not in ("cpu", "cuda"):
        reason = f"ranks communicate by gloo or NCCL, and neither supports {case.device.name}"
        yield Violation(("parallel", "device"), reason, "use --device cpu, or parallel=none")


def _check_updates(case: FeasibilityInput) -> Iterator[Violation]:
    plan, facts = case.plan, case.facts
    if plan.parallel not in ("towers", "local", "tensor"):
        return
    if plan.precision == "fp16":
        reason = "all ranks would have to skip the same steps, those whose scaled gradients overflow"
        yield Violation(("precision", "parallel"), reason, "use precision=bf16, or parallel=data")
    if facts.closure:
        reason = f"{facts.optimizer} calls the loss itself, any number of times"
        yield Violation(("parallel",), reason, "use parallel=data, or another optimizer")
    if plan.parallel == "tensor" and plan.optimizer in ("foreach", "fused"):
        reason = "some parameters are sharded and some are whole, and one list of parameters can't contain both"
        yield Violation(("optimizer", "parallel"), reason, "use optimizer=default")


def _check_stages(case: FeasibilityInput) -> Iterator[Violation]:
    plan, facts = case.plan, case.facts
    if plan.parallel != "stages":
        return
    if plan.ranks == 1:
        yield Violation(("ranks", "parallel"), "a single stage is the whole model", "use --ranks 2, or parallel=none")
    if plan.layout != "contiguous":
        reason = "an exported graph has a fixed memory layout"
        yield Violation(("layout", "parallel"), reason, "use layout=contiguous")
    if plan.precision == "fp16":
        reason = "all ranks would have to skip a step whose gradients overflow on one rank"
        yield Violation(("precision", "parallel"), reason, "use precision=bf16")
    if facts.closure:
        reason = f"{facts.optimizer} calls the loss itself, any number of times"
        yield Violation(("parallel",), reason, "use parallel=data, or another optimizer")
    if plan.microbatches is not None and plan.microbatches > facts.batch_size:
        reason = f"a batch of {facts.batch_size} can't be cut into {plan.microbatches} microbatches"
        yield Violation(("microbatches", "parallel"), reason, f"use at most microbatches={facts.batch_size}")


# --- asynchronous


_UPDATE_AXES = {
    "compile": "a worker computes the gradient and the server the update, and a compiled step contains both",
    "graphs": "a worker computes the gradient and the server the update, and a graph contains both",
    "residency": "workers read their batches themselves",
    "workers": "a worker of parallel=async loads its samples itself",
}
"""Reasons against axes for a parameter server and its workers."""


def _check_asynchronous(case: FeasibilityInput) -> Iterator[Violation]:
    plan, facts = case.plan, case.facts
    if plan.parallel != "async":
        return
    yield from axis_violations(plan, _UPDATE_AXES, "parallel", "parallel=none", 0)
    if plan.precision == "fp16":
        reason = "the scale of fp16's loss would have to be the same on all workers"
        yield Violation(("precision", "parallel"), reason, "use precision=bf16, or parallel=none")
    if facts.data == "Stream":
        reason = "the data is a stream with an order of its own, which can't be handed out batch by batch"
        yield Violation(("parallel",), reason, "use parallel=none, or give a map-style data set or arrays")
    if facts.closure:
        reason = f"{facts.optimizer} calls the loss itself, which the server can't compute"
        yield Violation(("parallel",), reason, "use parallel=none, or another optimizer")


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
    _check_rank_count,
    _check_axes_of_other_modes,
    _check_synchronous,
    _check_updates,
    _check_stages,
    _check_asynchronous,
    _check_placement,
    _check_alternating_updates,
    _check_arithmetic,
    _check_image_layout,
    _check_residency,
    _check_compiler,
    _check_compiled_step,
    _check_rewrites,
    _check_cuda_graphs,
    _check_allocator,
    _check_cudnn,
    _check_optimizer,
    _check_accumulation,
)


def reads_data_repeatedly(facts: TaskFacts) -> bool:
    """Returns whether training reads samples more than once; a single epoch streams its data better."""
    return facts.steps is None or facts.batches is None or facts.steps > facts.batches
