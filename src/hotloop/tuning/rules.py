"""The rules of `--plan auto`: plans for a Task, best first, without measurements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from hotloop.core.feasibility import RankedPlan, Violation, find_device, reads_data_repeatedly, violations
from hotloop.core.records.hardware import Hardware
from hotloop.core.records.training import TaskFacts
from hotloop.plan import BASELINE, Plan

MIN_COMPILED_STEPS = 600
"""Steps below which no compilation pays: its proof alone takes as long as 250 steps."""

_MEMORY_SHARE = 0.5
"""Share of a device's free memory for the data; the rest is for model, activations and workspaces."""


@dataclass(frozen=True)
class PlanHint:
    """A change to the baseline that should pay."""

    axis: str
    value: str
    why: str


def rank_plans(facts: TaskFacts, hardware: Hardware, base: Plan) -> list[RankedPlan]:
    """Returns the feasible plans of the rules, best first; the last is the baseline on its device.

    Axes that are set in `base` stay; the list is empty if these can't be run. No rule reduces the precision.
    """
    plain, reasons = _base_on_device(hardware, base), tuple(_baseline_reasons(facts, hardware, base))
    if violations(plain, facts, hardware):
        return []
    wishes = [
        wish for wish in _hints(facts, hardware, base) if not violations(_with_hints(plain, wish), facts, hardware)
    ]
    choices = []
    # The last hint is the most likely to fail in lowering, so it is dropped first.
    for given_up in range(len(wishes) + 1):
        for dropped in combinations(reversed(wishes), given_up):
            kept = [wish for wish in wishes if wish not in dropped]
            plan = _with_hints(plain, *kept)
            if not violations(plan, facts, hardware):
                choices.append(RankedPlan(plan, (*reasons, *(wish.why for wish in kept))))
    return choices


def skipped_hints(facts: TaskFacts, hardware: Hardware, base: Plan) -> list[tuple[PlanHint, Violation]]:
    """Returns hints that can't be run here, each with its first reason."""
    plain = _base_on_device(hardware, base)
    found = ((wish, violations(_with_hints(plain, wish), facts, hardware)) for wish in _hints(facts, hardware, base))
    return [(wish, problems[0]) for wish, problems in found if problems]


def open_questions(facts: TaskFacts, plan: Plan) -> list[str]:
    """Returns what only lowering finds out, from data and model."""
    found = []
    if plan.residency != "stream" and facts.data == "Samples":
        found.append(f"residency={plan.residency}: whether the data set fits, and gives the same sample each time")
    if plan.compile != "none":
        found.append(
            f"compile={plan.compile}: whether the step can be captured as one graph, compiling it pays, and what comes out"
            " is faster and proven equal"
        )
    if plan.accumulation > 1:
        found.append(f"accumulation={plan.accumulation}: whether the pieces of a batch add up to the whole")
    return found


def _base_on_device(hardware: Hardware, base: Plan) -> Plan:
    """Returns the baseline with the axes that are set, by default on the accelerator."""
    kept = {axis: getattr(base, axis) for axis in base.model_fields_set}
    accelerator = next((device.name for device in hardware.devices if device.is_accelerator), "cpu")
    return BASELINE.with_axes(**{"device": accelerator, **kept})


def _with_hints(plan: Plan, *wishes: PlanHint) -> Plan:
    return plan.with_axes(**{wish.axis: wish.value for wish in wishes})


def _hints(facts: TaskFacts, hardware: Hardware, base: Plan) -> Iterator[PlanHint]:
    """Yields hints for axes that aren't set, feasible or not."""
    plain = _base_on_device(hardware, base)
    every = (
        *_allocator_hints(hardware, plain),
        *_optimizer_hints(facts, hardware, plain),
        *_residency_hints(facts, hardware, plain),
        *_compile_hints(facts, hardware, plain),
    )
    yield from (wish for wish in every if wish.axis not in base.model_fields_set)


def _allocator_hints(hardware: Hardware, plan: Plan) -> Iterator[PlanHint]:
    device = find_device(plan, hardware)
    if device is not None and not device.is_accelerator and hardware.allocator is not None:
        why = "allocator=keep: memory that a step frees is reused by the next step, instead of going back to the system"
        yield PlanHint("allocator", "keep", why)


def _optimizer_hints(facts: TaskFacts, hardware: Hardware, plan: Plan) -> Iterator[PlanHint]:
    """Yields an optimizer implementation.

    On a CPU, lists of parameters win with hundreds of small parameters, and lose to caches otherwise. The fused kernel
    is slower than plain SGD's single operation.
    """
    device = find_device(plan, hardware)
    ways = [("fused", "one kernel")]
    if device is not None and device.is_accelerator:
        ways.append(("foreach", "operations over lists of parameters"))
    elif facts.one_operation:
        return
    for name, how in ways:
        if name in facts.implementations:
            yield PlanHint("optimizer", name, f"optimizer={name}: the update of {facts.optimizer} as {how}")
            return


def _residency_hints(facts: TaskFacts, hardware: Hardware, plan: Plan) -> Iterator[PlanHint]:
    device = find_device(plan, hardware)
    free = device.memory_free if device is not None and device.is_accelerator else None
    if facts.data == "Samples":
        if reads_data_repeatedly(facts):
            yield PlanHint("residency", "host", "residency=host: samples are loaded once, and not again in each epoch")
    elif free is not None and facts.data_bytes is not None and facts.data_bytes <= _MEMORY_SHARE * free.value:
        yield PlanHint("residency", "device", f"residency=device: the data fits into the memory of {plan.device}")


def _compile_hints(facts: TaskFacts, hardware: Hardware, plan: Plan) -> Iterator[PlanHint]:
    device = find_device(plan, hardware)
    if device is not None and device.kind == "cpu" and is_long_run(facts) and not facts.recurrent:
        why = f"with {facts.steps:,} steps a compilation may pay, and train times some steps to decide"
        yield PlanHint("compile", "package", f"compile=package: {why}")


def why_not_compiled(facts: TaskFacts, kind: str) -> str:
    """Returns why a long run is never compiled on this kind of device; empty if it may be."""
    if not (is_long_run(facts) and facts.recurrent):
        return ""
    if kind == "cuda":
        return "cuDNN reads the weights of recurrent layers as one piece of memory, which a captured step can't"
    return "a captured step unrolls recurrent layers over the time steps, which takes very long to compile"


def is_long_run(facts: TaskFacts) -> bool:
    """Whether a run has enough steps for a proof of compiled or recorded steps."""
    return facts.steps is not None and facts.steps >= MIN_COMPILED_STEPS


def _baseline_reasons(facts: TaskFacts, hardware: Hardware, base: Plan) -> Iterator[str]:
    plan, kept = _base_on_device(hardware, base), base.model_fields_set
    if kept:
        yield "as set: " + ", ".join(f"{axis}={getattr(base, axis)}" for axis in Plan.model_fields if axis in kept)
    if "device" not in kept:
        found = "there is no accelerator" if plan.device == "cpu" else "the accelerator of this machine"
        yield f"device={plan.device}: {found}"
    if "precision" not in kept:
        device = find_device(plan, hardware)
        tf32 = device is not None and device.kind == "cuda" and facts.convolutions
        loop = ", which compute convolutions in tf32 here, where precision=fp32 computes in fp32" if tf32 else ""
        yield (
            f"precision=default: torch's own settings{loop}; fewer bits change the result, so the plan has to name them"
        )
    if "compile" not in kept and not is_long_run(facts):
        run = "a stream doesn't say how many steps there are" if facts.steps is None else f"{facts.steps:,} steps"
        yield f"compile=none: a compilation is tried from {MIN_COMPILED_STEPS:,} steps on ({run})"
    device = find_device(plan, hardware)
    if "compile" in kept or device is None:
        return
    if why := why_not_compiled(facts, device.kind):
        yield f"compile=none: {why}"
    elif is_long_run(facts) and device.kind != "cpu":
        yield "compile=none: a search beside the training compiles for a CPU alone; --tune searches before the training"
