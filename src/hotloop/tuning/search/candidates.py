"""Candidate changes of a search, feasible here, and their combination."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from hotloop.core.feasibility import find_device, reads_data_repeatedly, violations
from hotloop.core.records.hardware import Hardware
from hotloop.core.records.race import Timing
from hotloop.core.records.training import TaskFacts
from hotloop.lowering.rewrites.mm_by_onednn import is_mkl_slow
from hotloop.margins import MARGIN
from hotloop.plan import Plan
from hotloop.tuning import cuda_rules
from hotloop.tuning.cuda_rules import AxisChange, graph_changes, is_cuda

SEARCHED_AXES = ("optimizer", "residency", "allocator", "layout", "threads", "compile", "graphs", "rewrites", "cudnn")
"""Axes that a search changes."""


def eager_changes(facts: TaskFacts, hardware: Hardware, base: Plan, threads: int) -> list[AxisChange]:
    """Returns feasible changes of single axes without a compiler, most promising first.

    Args:
        threads: torch's number of threads without a plan's.
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
    """Returns the changes without those that are rarely best: foreach beside fused, and the allocator of `rules`."""
    changes = list(changes)
    unlikely: list[AxisChange] = [] if rules is None else [{"allocator": rules.allocator}]
    if {"optimizer": "fused"} in changes:
        unlikely.append({"optimizer": "foreach"})
    return [change for change in changes if change not in unlikely]


def compiled_changes(facts: TaskFacts, hardware: Hardware, base: Plan) -> list[AxisChange]:
    """Returns the ways to compile, most promising first; on a CPU a package, whose calls are the cheapest."""
    ways: Sequence[AxisChange] = [{"compile": "package"}, {"compile": "step"}, {"compile": "forward"}]
    if is_cuda(base, hardware):
        recorded = graph_changes(facts)
        compiled = ({"compile": "step", **one} for one in recorded)
        ways = [*compiled, *recorded, {"compile": "step"}, {"compile": "forward"}]
    return _feasible_changes(ways, facts, hardware, base)


def rewrite_changes(facts: TaskFacts, hardware: Hardware, base: Plan) -> list[AxisChange]:
    """Returns rewrites for a compiled plan: for images or dropout, or if oneDNN multiplies faster than MKL."""
    some = facts.convolutions or facts.drops or is_mkl_slow(hardware.processor.model)
    return _feasible_changes([{"rewrites": "all"}] if some else [], facts, hardware, base)


def layout_changes(facts: TaskFacts, hardware: Hardware, base: Plan) -> list[AxisChange]:
    """Returns channels last for a plan compiled for a CPU, with images.

    A compiler uses channels last for oneDNN, and would copy weights of another layout in each step.
    """
    device = find_device(base, hardware)
    images = any(len(shape) == 3 for shape in facts.inputs)  # volumes aren't measured
    changes = [] if device is None or device.is_accelerator or not images else list(_layout_candidates(facts))
    return _feasible_changes([change for change in changes if change["layout"] != base.layout], facts, hardware, base)


def compiled_variants(
    compiled: Plan, facts: TaskFacts, hardware: Hardware, base: Plan, fixed: Collection[str], pooled: bool
) -> list[Plan]:
    """Returns variants of a compiled plan, most promising first, and the plan itself last: channels last, and rewrites.

    On CUDA the variants come from `cuda_rules`.

    Args:
        base: of the search; rewrites use its layout.
        fixed: axes that the user sets.
        pooled: whether the step has pooling that can be rewritten.
    """
    usual = compiled.with_axes(layout=base.layout)
    if is_cuda(compiled, hardware):
        return list(dict.fromkeys([*cuda_rules.cuda_variants(usual, facts, hardware, fixed), compiled]))
    laid, rewritten = layout_changes(facts, hardware, usual), rewrite_changes(facts, hardware, usual)
    changes = not_fixed([*rewritten, *laid] if pooled else [*laid, *rewritten], fixed)
    return list(dict.fromkeys([*(usual.with_axes(**change) for change in changes), compiled]))


def eager_variants(facts: TaskFacts, hardware: Hardware, eager: Plan, fixed: Collection[str]) -> list[Plan]:
    """Returns an eager plan for a CPU with channels last, for images that are normalised over the batch.

    Measured on a CPU: 1.24 and 1.12 times as fast for a small U-Net and a small ResNet; 0.91 without normalisation.
    """
    changes = not_fixed(layout_changes(facts, hardware, eager), fixed) if facts.normed else []
    return [eager.with_axes(**change) for change in changes]


def thread_changes(facts: TaskFacts, hardware: Hardware, base: Plan) -> list[AxisChange]:
    """Returns one thread for a compiled step on a CPU with several threads."""
    device = find_device(base, hardware)
    alone = device is None or device.is_accelerator or base.threads == 1 or hardware.processor.threads == 1
    return [] if alone else _feasible_changes([{"threads": 1}], facts, hardware, base)


def _feasible_changes(
    changes: Iterable[AxisChange], facts: TaskFacts, hardware: Hardware, base: Plan
) -> list[AxisChange]:
    return [change for change in changes if not violations(base.with_axes(**change), facts, hardware)]


def not_fixed(changes: Iterable[AxisChange], fixed: Collection[str]) -> list[AxisChange]:
    """Returns the changes without an axis that the user sets."""
    return [change for change in changes if change.keys().isdisjoint(fixed)]


def combine_changes(
    changes: Iterable[AxisChange], timings: Sequence[Timing | None], own: Timing | None = None
) -> AxisChange:
    """Returns for each axis the fastest value that is surely faster than the baseline.

    Args:
        own: the Timing of the changed plan, if this isn't the baseline; changes must be faster than this plan.
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
    """Returns the best of the undecided plans; None if none seems faster."""
    seemed = [
        (plan, timing)
        for plan, timing in zip(plans, timings, strict=True)
        if timing is not None and timing.ratio is not None and timing.ratio > 1 and timing.verdict != "faster"
    ]
    return max(seemed, key=lambda one: one[1].ratio or 0.0, default=None)


def race_group(plan: Plan, base: Plan, each_axis: bool) -> str:
    """Returns the axes in which a plan differs: plans of one group exclude each other; empty for one common group.

    Plans of other axes can be combined; compiled and recorded plans stay, since the fastest may fail its proof.

    Args:
        each_axis: whether plans of different axes will be combined.
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
        if not reads_data_repeatedly(facts):
            return
        yield {"residency": "host"}
    if device is not None and device.is_accelerator:
        yield {"residency": "device"}
