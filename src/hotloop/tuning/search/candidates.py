"""Plans worth a try: changes of one axis each, of what can be run here; and what they come to together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from hotloop.core.feasibility.violations import find_device, read_stored_plan, violations
from hotloop.core.records.hardware import Hardware
from hotloop.core.records.race import MARGIN, Timing
from hotloop.core.records.training import TaskFacts
from hotloop.lowering.rewrites.mm_by_onednn import is_mkl_slow
from hotloop.plan import Plan
from hotloop.tuning import cuda_rules
from hotloop.tuning.cuda_rules import AxisChange, graph_changes, is_cuda

SEARCHED_AXES = ("optimizer", "residency", "allocator", "layout", "threads", "compile", "graphs", "rewrites", "cudnn")
"""Axes that a search changes."""


def eager_changes(facts: TaskFacts, hardware: Hardware, base: Plan, threads: int) -> list[AxisChange]:
    """Single axes that need no compiler, feasible with `base`; likeliest to win first.

    Args:
        threads: what torch uses where the plan says nothing.
    """
    every = [
        *_optimizer_candidates(facts),
        {"allocator": "keep"},
        *_residency_candidates(facts, hardware, base),
        *_layout_candidates(facts),
        *_thread_candidates(hardware, base, threads),
    ]
    return _feasible_changes(every, facts, hardware, base)


def likely(changes: Iterable[AxisChange], rules: Plan | None) -> list[AxisChange]:
    """Without those that are seldom ahead of another: foreach beside fused, and an allocator that `rules` has anyway."""
    changes = list(changes)
    unlikely: list[AxisChange] = [] if rules is None else [{"allocator": rules.allocator}]
    if {"optimizer": "fused"} in changes:
        unlikely.append({"optimizer": "foreach"})
    return [change for change in changes if change not in unlikely]


def compiled_changes(facts: TaskFacts, hardware: Hardware, base: Plan) -> list[AxisChange]:
    """Ways to compile, likeliest best first; a package on a CPU, where a step by itself costs more to call."""
    ways: Sequence[AxisChange] = [{"compile": "package"}, {"compile": "step"}, {"compile": "forward"}]
    if is_cuda(base, hardware):
        recorded = graph_changes(facts)
        compiled = ({"compile": "step", **one} for one in recorded)
        ways = [*compiled, *recorded, {"compile": "step"}, {"compile": "forward"}]
    return _feasible_changes(ways, facts, hardware, base)


def rewrite_changes(facts: TaskFacts, hardware: Hardware, base: Plan) -> list[AxisChange]:
    """What may make a plan compiled for a CPU faster still: with images or dropout, or where oneDNN multiplies faster than torch's
    own library."""
    some = facts.convolutions or facts.drops or is_mkl_slow(hardware.processor.model)
    return _feasible_changes([{"rewrites": "all"}] if some else [], facts, hardware, base)


def layout_changes(facts: TaskFacts, hardware: Hardware, base: Plan) -> list[AxisChange]:
    """What may make a compiled plan faster on a CPU, with images: a compiler lays them with channels last for oneDNN, and weights
    that don't lie so are copied for that, and their update walks across memory."""
    device = find_device(base, hardware)
    images = any(len(shape) == 3 for shape in facts.inputs)  # nobody has measured it with volumes
    changes = [] if device is None or device.is_accelerator or not images else list(_layout_candidates(facts))
    return _feasible_changes([change for change in changes if change["layout"] != base.layout], facts, hardware, base)


def compiled_variants(
    compiled: Plan, facts: TaskFacts, hardware: Hardware, base: Plan, fixed: Collection[str], pooled: bool
) -> list[Plan]:
    """A compiled plan with images laid with channels last, and rewritten, for which they lie as usual; the likeliest first, and last
    the plan as it is. On CUDA the rules of `cuda_rules` propose the variants.

    Args:
        base: of the search, in whose layout images lie as usual.
        fixed: axes that the user set.
        pooled: whether the step has pooling that can be rewritten.
    """
    usual = compiled.with_axes(layout=base.layout)
    if is_cuda(compiled, hardware):
        return list(dict.fromkeys([*cuda_rules.cuda_variants(usual, facts, hardware, fixed), compiled]))
    laid, rewritten = layout_changes(facts, hardware, usual), rewrite_changes(facts, hardware, usual)
    changes = not_fixed([*rewritten, *laid] if pooled else [*laid, *rewritten], fixed)
    return list(dict.fromkeys([*(usual.with_axes(**change) for change in changes), compiled]))


def thread_changes(facts: TaskFacts, hardware: Hardware, base: Plan) -> list[AxisChange]:
    """One thread for a compiled step on a CPU, where there are more."""
    device = find_device(base, hardware)
    alone = device is None or device.is_accelerator or base.threads == 1 or hardware.processor.threads == 1
    return [] if alone else _feasible_changes([{"threads": 1}], facts, hardware, base)


def _feasible_changes(
    changes: Iterable[AxisChange], facts: TaskFacts, hardware: Hardware, base: Plan
) -> list[AxisChange]:
    return [change for change in changes if not violations(base.with_axes(**change), facts, hardware)]


def not_fixed(changes: Iterable[AxisChange], fixed: Collection[str]) -> list[AxisChange]:
    """Those that leave the axes alone that the user set."""
    return [change for change in changes if change.keys().isdisjoint(fixed)]


def combine_changes(
    changes: Iterable[AxisChange], timings: Sequence[Timing | None], own: Timing | None = None
) -> AxisChange:
    """Of each axis the value that was surely faster than the baseline, and most so.

    Args:
        own: of the plan that they change, if it isn't the baseline; what is no faster than it wins nothing.
    """
    best: dict[str, tuple[float, AxisChange]] = {}
    least = 0.0 if own is None else (own.ratio or 0.0) * (1 + MARGIN)
    for change, timing in zip(changes, timings, strict=True):
        if timing is None or timing.ratio is None or timing.verdict != "faster" or timing.ratio <= least:
            continue
        (axis,) = change
        if timing.ratio > best.get(axis, (0.0, {}))[0]:
            best[axis] = (timing.ratio, change)
    return {axis: value for _, change in best.values() for axis, value in change.items()}


def most_promising(plans: Iterable[Plan], timings: Sequence[Timing | None]) -> tuple[Plan, Timing] | None:
    """The plan that seemed the best of those that weren't decided; None where none seemed faster."""
    seemed = [
        (plan, timing)
        for plan, timing in zip(plans, timings, strict=True)
        if timing is not None and timing.ratio is not None and timing.ratio > 1 and timing.verdict != "faster"
    ]
    return max(seemed, key=lambda one: one[1].ratio or 0.0, default=None)


def race_group(plan: Plan, base: Plan, each_axis: bool) -> str:
    """The axes in which a plan differs, whose plans may beat each other in a race; empty where it's among all others.

    Plans that differ in other axes can be put together, and compiled or recorded ones stay, since the fastest may fail its proof.

    Args:
        each_axis: whether those of other axes will be put together.
    """
    if not each_axis and plan.compile == "none" and plan.graphs == "none":
        return ""
    return " ".join(axis for axis in Plan.model_fields if getattr(plan, axis) != getattr(base, axis))


def _thread_candidates(hardware: Hardware, base: Plan, now: int) -> Iterator[AxisChange]:
    device = find_device(base, hardware)
    if device is None or device.is_accelerator:
        return
    most = max(hardware.processor.allowed_cores, 1)
    counts = {1, most, hardware.processor.threads, *(2**power for power in range(1, 8) if 2**power < most)}
    yield from ({"threads": count} for count in sorted(counts - {now}))


def _optimizer_candidates(facts: TaskFacts) -> Iterator[AxisChange]:
    yield from ({"optimizer": name} for name in ("fused", "foreach") if name in facts.implementations)


def _layout_candidates(facts: TaskFacts) -> Iterator[AxisChange]:
    if facts.convolutions:
        yield {"layout": "channels_last"}


def _residency_candidates(facts: TaskFacts, hardware: Hardware, base: Plan) -> Iterator[AxisChange]:
    device = find_device(base, hardware)
    if facts.data == "Samples":
        if not read_stored_plan(facts):
            return
        yield {"residency": "host"}
    if device is not None and device.is_accelerator:
        yield {"residency": "device"}
