"""Plans worth a try: changes of one axis each, of what can be run here; and what they come to together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from hotloop.core.feasibility.violations import device_of, read_again, violations
from hotloop.core.records.hardware import Hardware
from hotloop.core.records.race import MARGIN, Timing
from hotloop.core.records.training import TaskFacts
from hotloop.lowering.rewrites.mm_by_onednn import mkl_is_slow
from hotloop.plan import Plan
from hotloop.tuning import cuda_rules
from hotloop.tuning.cuda_rules import Change, is_cuda, recordings

SOUGHT = ("optimizer", "residency", "allocator", "layout", "threads", "compile", "graphs", "rewrites", "cudnn")
"""Axes that a search changes."""


def eager_changes(facts: TaskFacts, hardware: Hardware, base: Plan, threads: int) -> list[Change]:
    """Single axes that need no compiler, feasible with `base`; likeliest to win first.

    Args:
        threads: what torch uses where the plan says nothing.
    """
    every = [
        *_update(facts),
        {"allocator": "keep"},
        *_residency(facts, hardware, base),
        *_layout(facts),
        *_threads(hardware, base, threads),
    ]
    return _feasible(every, facts, hardware, base)


def likeliest(changes: Iterable[Change], rules: Plan | None) -> list[Change]:
    """Without those that are seldom ahead of another: foreach beside fused, and an allocator that `rules` has anyway."""
    changes = list(changes)
    unlikely: list[Change] = [] if rules is None else [{"allocator": rules.allocator}]
    if {"optimizer": "fused"} in changes:
        unlikely.append({"optimizer": "foreach"})
    return [change for change in changes if change not in unlikely]


def compiled_changes(facts: TaskFacts, hardware: Hardware, base: Plan) -> list[Change]:
    """Ways to compile, likeliest best first; a package on a CPU, where a step by itself costs more to call."""
    ways: Sequence[Change] = [{"compile": "package"}, {"compile": "step"}, {"compile": "forward"}]
    if is_cuda(base, hardware):
        recorded = recordings(facts)
        compiled = ({"compile": "step", **one} for one in recorded)
        ways = [*compiled, *recorded, {"compile": "step"}, {"compile": "forward"}]
    return _feasible(ways, facts, hardware, base)


def rewriting_changes(facts: TaskFacts, hardware: Hardware, base: Plan) -> list[Change]:
    """What may make a plan compiled for a CPU faster still: with images or dropout, or where oneDNN multiplies faster than torch's
    own library."""
    some = facts.convolutions or facts.drops or mkl_is_slow(hardware.processor.model)
    return _feasible([{"rewrites": "all"}] if some else [], facts, hardware, base)


def laying_changes(facts: TaskFacts, hardware: Hardware, base: Plan) -> list[Change]:
    """What may make a compiled plan faster on a CPU, with images: a compiler lays them with channels last for oneDNN, and weights
    that don't lie so are copied for that, and their update walks across memory."""
    device = device_of(base, hardware)
    images = any(len(shape) == 3 for shape in facts.inputs)  # nobody has measured it with volumes
    changes = [] if device is None or device.is_accelerator or not images else list(_layout(facts))
    return _feasible([change for change in changes if change["layout"] != base.layout], facts, hardware, base)


def variants(
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
        return list(dict.fromkeys([*cuda_rules.variants(usual, facts, hardware, fixed), compiled]))
    laid, rewritten = laying_changes(facts, hardware, usual), rewriting_changes(facts, hardware, usual)
    changes = without([*rewritten, *laid] if pooled else [*laid, *rewritten], fixed)
    return list(dict.fromkeys([*(usual.with_axes(**change) for change in changes), compiled]))


def thread_changes(facts: TaskFacts, hardware: Hardware, base: Plan) -> list[Change]:
    """One thread for a compiled step on a CPU, where there are more."""
    device = device_of(base, hardware)
    alone = device is None or device.is_accelerator or base.threads == 1 or hardware.processor.threads == 1
    return [] if alone else _feasible([{"threads": 1}], facts, hardware, base)


def _feasible(changes: Iterable[Change], facts: TaskFacts, hardware: Hardware, base: Plan) -> list[Change]:
    return [change for change in changes if not violations(base.with_axes(**change), facts, hardware)]


def without(changes: Iterable[Change], fixed: Collection[str]) -> list[Change]:
    """Those that leave the axes alone that the user set."""
    return [change for change in changes if change.keys().isdisjoint(fixed)]


def combined(changes: Iterable[Change], timings: Sequence[Timing | None], own: Timing | None = None) -> Change:
    """Of each axis the value that was surely faster than the baseline, and most so.

    Args:
        own: of the plan that they change, if it isn't the baseline; what is no faster than it wins nothing.
    """
    best: dict[str, tuple[float, Change]] = {}
    least = 0.0 if own is None else (own.ratio or 0.0) * (1 + MARGIN)
    for change, timing in zip(changes, timings, strict=True):
        if timing is None or timing.ratio is None or timing.verdict != "faster" or timing.ratio <= least:
            continue
        (axis,) = change
        if timing.ratio > best.get(axis, (0.0, {}))[0]:
            best[axis] = (timing.ratio, change)
    return {axis: value for _, change in best.values() for axis, value in change.items()}


def promising(plans: Iterable[Plan], timings: Sequence[Timing | None]) -> tuple[Plan, Timing] | None:
    """The plan that seemed the best of those that weren't decided; None where none seemed faster."""
    seemed = [
        (plan, timing)
        for plan, timing in zip(plans, timings, strict=True)
        if timing is not None and timing.ratio is not None and timing.ratio > 1 and timing.verdict != "faster"
    ]
    return max(seemed, key=lambda one: one[1].ratio or 0.0, default=None)


def apart(plan: Plan, base: Plan, each_axis: bool) -> str:
    """The axes in which a plan differs, whose plans may beat each other in a race; empty where it's among all others.

    Plans that differ in other axes can be put together, and compiled or recorded ones stay, since the fastest may fail its proof.

    Args:
        each_axis: whether those of other axes will be put together.
    """
    if not each_axis and plan.compile == "none" and plan.graphs == "none":
        return ""
    return " ".join(axis for axis in Plan.model_fields if getattr(plan, axis) != getattr(base, axis))


def _threads(hardware: Hardware, base: Plan, now: int) -> Iterator[Change]:
    device = device_of(base, hardware)
    if device is None or device.is_accelerator:
        return
    most = max(hardware.processor.allowed_cores, 1)
    counts = {1, most, hardware.processor.threads, *(2**power for power in range(1, 8) if 2**power < most)}
    yield from ({"threads": count} for count in sorted(counts - {now}))


def _update(facts: TaskFacts) -> Iterator[Change]:
    yield from ({"optimizer": name} for name in ("fused", "foreach") if name in facts.implementations)


def _layout(facts: TaskFacts) -> Iterator[Change]:
    if facts.convolutions:
        yield {"layout": "channels_last"}


def _residency(facts: TaskFacts, hardware: Hardware, base: Plan) -> Iterator[Change]:
    device = device_of(base, hardware)
    if facts.data == "Samples":
        if not read_again(facts):
            return
        yield {"residency": "host"}
    if device is not None and device.is_accelerator:
        yield {"residency": "device"}
