"""The predicted time and memory of a training step on a chip, from the record of the step's costs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hotloop.advisor.chips import PRECISIONS, Chip, find_chip
from hotloop.advisor.parallel_ways import (
    DEFAULT_PCIE_BYTES_PER_S,
    Interconnect,
    Split,
    Way,
    communication_s,
    memory_of,
    share_of,
)
from hotloop.advisor.rates import PRODUCTS, Coefficients, operator_time, product_class, shipped
from hotloop.core.records.advice import NORMAL_90
from hotloop.core.records.step_costs import OperatorCost, StepCosts, StepPhase
from hotloop.errors import HotloopError
from hotloop.plan import BASELINE, Plan

_WIDTHS = {"fp32": 1.0, "tf32": 1.0, "fp16": 0.5, "bf16": 0.5, "fp8": 0.5}
"""Bytes of an activation in the precision, as a share of fp32."""

_PHASES: tuple[StepPhase, ...] = ("forward", "backward", "update")

_FUSIBLE = ("elementwise", "random", "normalization", "softmax", "reduction", "copy")


@dataclass(frozen=True)
class Host:
    """The processor that issues a GPU's work.

    Attributes:
        speed: speed of one core as a multiple of the host of the coefficients, by clock or measured dispatch.
        loading_s: seconds per step that the data needs, overlapped with the step where `overlap`.
        overlap: whether worker processes load the next batch during the step.
    """

    speed: float = 1.0
    loading_s: float = 0.0
    overlap: bool = False


@dataclass(frozen=True)
class Estimate:
    """A predicted step.

    Attributes:
        chip: name of the chip.
        gpus: number of chips.
        way: how they share the step: `none`, `data`, `sharded`, `tensor` or `stages`.
        step_ms: median of the prediction in milliseconds.
        low_ms, high_ms: ends of the 90 % interval.
        memory_bytes: peak of tensors' bytes on each chip.
        parts: milliseconds by `compute`, `memory`, `launches`, `communication` and `data loading`; overlapping parts
            are counted where they bound the step, so that the parts sum to `step_ms`.
        bound: the largest part.
        source: what the prediction rests on.
    """

    chip: str
    gpus: int
    way: str
    step_ms: float
    low_ms: float
    high_ms: float
    memory_bytes: int
    parts: dict[str, float] = field(default_factory=dict)
    bound: str = ""
    source: str = ""


def estimate(
    costs: StepCosts,
    chip: Chip | str,
    precision: str = "fp32",
    plan: Plan | str = "baseline",
    gpus: int = 1,
    host: Host | None = None,
    *,
    way: Way = "data",
    network: Interconnect | None = None,
    microbatches: int | None = None,
    split: Split | None = None,
    coefficients: Coefficients | None = None,
) -> Estimate:
    """Returns the predicted step of a batch on one or several chips.

    Args:
        costs: record of the step for the whole batch.
        chip: a chip or its name.
        precision: of products: fp32, tf32, fp16, bf16 or fp8. A plan's own precision goes before.
        plan: `baseline`, axes such as `compile=step graphs=32`, or a Plan.
        gpus: chips that share the batch.
        host: processor that issues the work; a typical server by default.
        way: how several chips share the step.
        network: links between nodes.
        microbatches: pieces of a batch that a chip computes in turn; for `stages`, four per chip by default.
        split: several ways at once, in place of `gpus`, `way` and `microbatches`.
        coefficients: fitted factors; those of the package by default.

    Raises:
        HotloopError: unknown chip, precision, way or number of chips.
        PlanError: unknown axis or value.
    """
    chip = find_chip(chip) if isinstance(chip, str) else chip
    coefficients = coefficients or shipped()
    plan = parse_plan(plan)
    host = host or Host()
    precision = plan.precision if plan.precision != "default" else precision
    if precision not in PRECISIONS:
        raise HotloopError(f"precision {precision!r}", expected="one of " + ", ".join(PRECISIONS))
    if gpus < 1:
        raise HotloopError(f"{gpus} chips", expected="1 or more")
    way = "none" if gpus == 1 else way
    split = split or Split.of(way, gpus, microbatches)
    own = share_of(costs, split)
    phases = {phase: _phase(own.in_phase(phase), chip, precision, plan, host, coefficients) for phase in _PHASES}
    parts, round_s, spread = _combine(phases, own, chip, coefficients, host, plan)
    parts = {name: value * split.rounds for name, value in parts.items()}
    waiting = communication_s(costs, split, chip, coefficients, network, round_s, precision)
    parts["communication"] = waiting
    seconds = round_s * split.rounds + waiting
    loading = host.loading_s if not host.overlap else max(0.0, host.loading_s - seconds)
    if chip.kind == "gpu" and plan.residency != "device":
        loading += 0.25 * costs.input_bytes / split.data / ((chip.pcie_bytes_per_s or DEFAULT_PCIE_BYTES_PER_S) * 0.7)
    parts["data loading"] = loading
    seconds += loading
    factor = math.exp(NORMAL_90 * spread)
    measured = coefficients.is_measured(chip) or chip.is_measured
    return Estimate(
        chip=chip.name,
        gpus=split.gpus,
        way=way,
        step_ms=seconds * 1e3,
        low_ms=seconds * 1e3 / factor,
        high_ms=seconds * 1e3 * factor,
        memory_bytes=memory_of(costs, split, _WIDTHS[precision]),
        parts={name: value * 1e3 for name, value in parts.items()},
        bound=max(parts, key=lambda name: parts[name]),
        source="rates measured on this chip" if measured else "published rates and the factors of similar chips",
    )


def parse_plan(plan: Plan | str) -> Plan:
    """Returns the plan of a text such as `compile=step graphs=32`."""
    if isinstance(plan, Plan):
        return plan
    words = [word for word in plan.split() if word != "baseline"]
    if not all("=" in word for word in words):
        raise HotloopError(f"plan {plan!r}", expected="'baseline' or axes such as 'compile=step graphs=32'")
    axes: dict[str, str] = dict(word.split("=", 1) for word in words)
    return (
        Plan(**{name: int(value) if str(value).isdigit() else value for name, value in axes.items()})
        if axes
        else BASELINE
    )


@dataclass
class _Phase:
    compute_s: float = 0.0
    memory_s: float = 0.0
    launch_s: float = 0.0
    host_s: float = 0.0
    by_class: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    doubt_s: float = 0.0  # seconds of kernels times the spread that their shortness adds


def _phase(
    operators: Iterable[OperatorCost], chip: Chip, precision: str, plan: Plan, host: Host, coefficients: Coefficients
) -> _Phase:
    found = _Phase()
    launches: float
    fused = plan.compile != "none"
    facts = coefficients.host
    for operator in operators:
        is_own_precision = operator.kind == "update" or (
            operator.kind in PRODUCTS and product_class(chip, precision) == "fp32"
        )
        width = 1.0 if is_own_precision or operator.dtype != "float32" else _WIDTHS[precision]
        launches = operator.count * operator.launches
        if fused and operator.kind in _FUSIBLE:
            width *= facts["fused_bytes"]
            launches *= facts["fused_launches"]
        elif width < 1:
            width *= facts["cast_bytes"]
        time = operator_time(operator, chip, precision, coefficients, width)
        is_compute = operator.kind in PRODUCTS and time.compute_s >= time.memory_s
        if is_compute:
            found.compute_s += time.seconds
        else:
            found.memory_s += time.seconds
        found.by_class[time.factor_class] += time.seconds
        if chip.kind != "cpu":
            found.doubt_s += time.seconds * _short_spread(time.seconds / max(1, operator.count), coefficients)
            found.launch_s += launches * facts["launch_s"]
        dispatches = operator.count * (
            operator.tensors if operator.kind == "update" and plan.optimizer == "forloop" else 1
        )
        if fused:
            found.host_s += launches * facts["compiled_s"] / host.speed
        else:
            found.host_s += dispatches * facts[f"{operator.phase}_s"] / host.speed
    if chip.kind == "cpu":
        found.host_s *= facts["cpu_dispatch"]
    if plan.graphs != "none":
        found.host_s *= 0.02
        found.launch_s *= facts["graph_launch"]
    return found


def _short_spread(kernel_s: float, coefficients: Coefficients) -> float:
    """Returns the spread that the prediction of a short kernel has in addition: tails and latencies aren't modelled."""
    scale, most = coefficients.shapes.get("short_spread", (0.0, 0.0))
    return float(min(most, scale * kernel_s**-0.5)) if kernel_s > 0 else 0.0


def _combine(
    phases: Mapping[StepPhase, _Phase], costs: StepCosts, chip: Chip, coefficients: Coefficients, host: Host, plan: Plan
) -> tuple[dict[str, float], float, float]:
    """Returns parts and seconds of a step on one chip, and the spread of the prediction's logarithm."""
    facts = coefficients.host
    parts = dict.fromkeys(("compute", "memory", "launches"), 0.0)
    device = issue = 0.0
    by_class: dict[str, float] = defaultdict(float)
    whole = coefficients.whole["compiled" if plan.compile != "none" else "eager"]
    for phase in phases.values():
        parts["compute"] += phase.compute_s * whole[0]
        parts["memory"] += phase.memory_s * whole[0]
        parts["launches"] += phase.launch_s
        device += (phase.compute_s + phase.memory_s) * whole[0] + phase.launch_s
        issue += phase.host_s
        for name, value in phase.by_class.items():
            by_class[name] += value
    host_step = facts["step_s"] / host.speed * (0.05 if plan.graphs != "none" else 1.0) + costs.module_calls * (
        0.0 if plan.compile != "none" else facts["module_s"] / host.speed
    )
    issue += host_step
    if chip.kind == "cpu":
        parts["launches"] = issue
        seconds = device + issue
    else:
        power = facts["overlap_power"]
        seconds = (device**power + issue**power) ** (1 / power)
        parts["launches"] += max(0.0, seconds - device)
        scale = seconds / sum(parts.values()) if sum(parts.values()) else 1.0
        parts = {name: value * scale for name, value in parts.items()}
    total = sum(by_class.values()) or 1.0
    device_share = min(1.0, device / seconds) if seconds else 0.0
    variance = whole[1] ** 2 + sum(
        (coefficients.factor(chip, name).spread * value / total * device_share) ** 2 for name, value in by_class.items()
    )
    doubt_s = sum(phase.doubt_s for phase in phases.values())
    variance += (doubt_s / total * device_share) ** 2
    variance += (facts["spread"] * (1 - device_share)) ** 2
    return parts, seconds, math.sqrt(variance)
