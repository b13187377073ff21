"""Candidate changes of a search, feasible here, and their combination.

Their order depends on facts of the Task alone. A race and a proof select among the candidates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from hotloop.core.feasibility import find_device, reads_data_repeatedly, violations
from hotloop.core.records.hardware import Hardware
from hotloop.core.records.race import Timing
from hotloop.core.records.training import TaskFacts
from hotloop.lowering.rewrites.mm_by_onednn import is_mkl_slow
from hotloop.margins import MARGIN
from hotloop.plan import Plan

AxisChange = dict[str, Any]
"""The changed axes of a plan and their new values."""

SEARCHED_AXES = ("optimizer", "residency", "allocator", "layout", "threads", "compile", "graphs", "rewrites", "cudnn")
"""Axes that a search changes."""

_STEPS_PER_REPLAY = (32, 8)
"""Candidate numbers of steps per replay. An epoch must have at least twice as many batches."""

LARGE_WORK = 2**29
"""Parameters times batch size from which library convolutions probably take most of a step. A ResNet-18 at batch 128 has
1.4e9, and a small network for images less than 2e8."""


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

    On CUDA see `cuda_variants`.

    Args:
        base: of the search; rewrites use its layout.
        fixed: axes that the user sets.
        pooled: whether the step has pooling that can be rewritten.
    """
    usual = compiled.with_axes(layout=base.layout)
    if is_cuda(compiled, hardware):
        return list(dict.fromkeys([*cuda_variants(usual, facts, hardware, fixed), compiled]))
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


def is_cuda(plan: Plan, hardware: Hardware) -> bool:
    device = find_device(plan, hardware)
    return device is not None and device.kind == "cuda"


def graph_changes(facts: TaskFacts) -> list[AxisChange]:
    """Returns the ways to record steps, probably fastest first; `violations` checks that the data fits."""
    several = next((count for count in _STEPS_PER_REPLAY if facts.batches is None or 2 * count <= facts.batches), None)
    return [*([] if several is None else [{"graphs": several}]), {"graphs": "step"}]


def cuda_variants(way: Plan, facts: TaskFacts, hardware: Hardware, fixed: Collection[str]) -> list[Plan]:
    """Returns variants of a compiled or recorded plan, probably fastest first; the unchanged plan is the last."""
    changes = [] if facts.recurrent else list(_changes(way, facts))
    allowed = [change for change in changes if "compile" not in change or "compile" not in fixed]
    plans = [way.with_axes(**{axis: change[axis] for axis in change.keys() - fixed}) for change in allowed]
    able = [plan for plan in plans if plan != way and not violations(plan, facts, hardware)]
    return list(dict.fromkeys([*able, way]))


def _changes(way: Plan, facts: TaskFacts) -> Iterator[AxisChange]:
    if way.compile == "none":
        yield from _recorded_changes(way, facts)
    elif way.compile == "step":
        yield from _compiled_changes(way, facts)
    else:
        yield from _channels_last(facts)


def _compiled_changes(way: Plan, facts: TaskFacts) -> Iterator[AxisChange]:
    """Yields rewrites first for small products and convolutions, else the choice of algorithm and memory layout."""
    timings, layouts = list(_cudnn_timing(way, facts)), list(_channels_last(facts))
    on_tensor_cores = [{**layout, **algorithm} for layout in layouts for algorithm in timings or [{}]]
    eagerly = [{"compile": "none", **change} for change in list(_recorded_changes(way, facts))[:1]]
    if not is_large(facts):
        yield {"rewrites": "all"}
        yield from ({"rewrites": "all", **change} for change in timings)
        yield from eagerly
        yield from on_tensor_cores
    elif way.precision == "fp32":
        yield from (*timings, *eagerly, *on_tensor_cores)
        yield {"rewrites": "all"}
    else:
        yield from (*on_tensor_cores, *eagerly, *timings)
        yield {"rewrites": "all"}


def _recorded_changes(way: Plan, facts: TaskFacts) -> Iterator[AxisChange]:
    """Yields the changes for a step that PyTorch runs and one graph records; none if the plan records no graph."""
    if way.graphs == "none":
        return
    update = next(({"optimizer": how} for how in ("fused", "foreach") if how in facts.implementations), {})
    layouts = list(_channels_last(facts))[:1] if way.precision != "fp32" and is_large(facts) else []
    best = {key: value for change in (update, *_cudnn_timing(way, facts), *layouts) for key, value in change.items()}
    yield best
    yield update


def _cudnn_timing(way: Plan, facts: TaskFacts) -> Iterator[AxisChange]:
    """Yields cuDNN's timing of algorithms; only a recorded step can select algorithms anew."""
    if way.graphs != "none" and facts.has_convolution_layers:
        yield {"cudnn": "benchmark"}


def _channels_last(facts: TaskFacts) -> Iterator[AxisChange]:
    """Yields channels last for images. Volumes are excluded because channels last is not measured for them."""
    if facts.convolutions and any(len(shape) == 3 for shape in facts.inputs):
        yield {"layout": "channels_last"}


def is_large(facts: TaskFacts) -> bool:
    """Whether library convolutions probably take most of a step."""
    return facts.has_convolution_layers and facts.parameters * facts.batch_size >= LARGE_WORK
