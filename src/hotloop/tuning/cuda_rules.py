"""Rules for compiled and recorded steps on a CUDA device: the candidate plans, their order and the reasons.

The order depends on facts of the Task alone. A race and a proof select among the candidates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from hotloop.core.feasibility import find_device, violations
from hotloop.core.records.hardware import Hardware
from hotloop.core.records.training import TaskFacts
from hotloop.plan import Plan
from hotloop.tuning.rules import is_long_run

AxisChange = dict[str, Any]
"""The changed axes of a plan and their new values."""

_STEPS_PER_REPLAY = (32, 8)
"""Candidate numbers of steps per replay. An epoch must have at least twice as many batches."""

LARGE_WORK = 2**29
"""Parameters times batch size from which library convolutions probably take most of a step. A ResNet-18 at batch 128 has
1.4e9, and a small network for images less than 2e8."""


def is_cuda(plan: Plan, hardware: Hardware) -> bool:
    device = find_device(plan, hardware)
    return device is not None and device.kind == "cuda"


def graph_changes(facts: TaskFacts) -> list[AxisChange]:
    """Returns the ways to record steps, probably fastest first; `violations` checks that the data fits."""
    several = next((count for count in _STEPS_PER_REPLAY if facts.batches is None or 2 * count <= facts.batches), None)
    return [*([] if several is None else [{"graphs": several}]), {"graphs": "step"}]


def auto_cuda_plans(eager: Plan, facts: TaskFacts, hardware: Hardware, fixed: Collection[str]) -> list[Plan]:
    """Returns the candidates of `auto` other than the eager plan on CUDA, probably fastest first.

    The last candidates are for steps that can't be recorded.

    Args:
        eager: the eager plan, with the Task's own form of the update unless the user sets another form.
        fixed: the axes that the user sets.
    """
    if facts.recurrent or eager.compile != "none" or not is_long_run(facts):
        return []
    step = eager if "compile" in fixed else eager.with_axes(compile="step")
    recorded = [] if "graphs" in fixed else [step.with_axes(**change) for change in graph_changes(facts)]
    recorded = [way for way in recorded if not violations(way, facts, hardware)]
    found = [*(cuda_variants(recorded[0], facts, hardware, fixed) if recorded else []), *recorded[1:]]
    if step.compile != "none":
        found += cuda_variants(step, facts, hardware, fixed)
        found += [
            one for way in recorded[:1] for one in cuda_variants(way.with_axes(compile="none"), facts, hardware, fixed)
        ]
    return list(dict.fromkeys(plan for plan in found if not violations(plan, facts, hardware)))


def cuda_variants(way: Plan, facts: TaskFacts, hardware: Hardware, fixed: Collection[str]) -> list[Plan]:
    """Returns variants of a compiled or recorded plan, probably fastest first; the unchanged plan is the last."""
    changes = [] if facts.recurrent else list(_changes(way, facts))
    allowed = [change for change in changes if "compile" not in change or "compile" not in fixed]
    plans = [way.with_axes(**{axis: change[axis] for axis in change.keys() - fixed}) for change in allowed]
    able = [plan for plan in plans if plan != way and not violations(plan, facts, hardware)]
    return list(dict.fromkeys([*able, way]))


def _changes(way: Plan, facts: TaskFacts) -> Iterator[AxisChange]:
    if way.compile == "none":
        yield from _eager_changes(way, facts)
    elif way.compile == "step":
        yield from _compiled_changes(way, facts)
    else:
        yield from _channels_last(facts)


def _compiled_changes(way: Plan, facts: TaskFacts) -> Iterator[AxisChange]:
    """Yields rewrites first for small products and convolutions, else the choice of algorithm and memory layout."""
    timings, layouts = list(_cudnn_timing(way, facts)), list(_channels_last(facts))
    on_tensor_cores = [{**layout, **algorithm} for layout in layouts for algorithm in timings or [{}]]
    eagerly = [{"compile": "none", **change} for change in list(_eager_changes(way, facts))[:1]]
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


def _eager_changes(way: Plan, facts: TaskFacts) -> Iterator[AxisChange]:
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


def cuda_reasons(plan: Plan, eager: Plan, facts: TaskFacts) -> tuple[str, ...]:
    """Returns one sentence for each axis in which a CUDA plan differs from the eager plan; none on other devices."""
    if not plan.device.startswith("cuda"):
        return ()
    texts = {axis: _reason(axis, plan, facts) for axis in _ORDER if getattr(plan, axis) != getattr(eager, axis)}
    if plan.compile == "none":
        texts["compile"] = _reason("compile", plan, facts)
    return tuple(f"{axis}={getattr(plan, axis)}: {texts[axis]}" for axis in _ORDER if texts.get(axis))


_ORDER = ("graphs", "compile", "rewrites", "layout", "cudnn", "optimizer")


def _reason(axis: str, plan: Plan, facts: TaskFacts) -> str:
    if axis == "graphs":
        steps = "a whole step" if plan.graphs == "step" else f"{plan.graphs} steps"
        return f"one replay runs {steps}, so the device doesn't wait for Python"
    if axis == "compile" and plan.compile == "none":
        size = (
            f"; with {facts.parameters:,} parameters and batches of {facts.batch_size} convolutions take most of a step"
        )
        return "the step is recorded as PyTorch runs it, within seconds" + size * is_large(facts)
    if axis == "layout":
        units = "tensor cores read images with channels last" if plan.precision != "fp32" else _LAYOUT_REASON
        return f"{units}, and weights in that layout aren't copied in each step"
    if axis == "rewrites":
        return _REWRITES_REASON + ", and so do first convolutions and pooling" * facts.has_convolution_layers
    if axis == "optimizer":
        return _OPTIMIZER_REASONS.get(
            plan.optimizer, _FUSED_UPDATE_REASON if plan.compile != "none" else _OPTIMIZER_REASONS["foreach"]
        )
    return _AXIS_REASONS[axis]


_FUSED_UPDATE_REASON = "the compiler writes the update of all parameters as one kernel"
_REWRITES_REASON = "small products become sums, which the compiler fuses with the operations around them"
_LAYOUT_REASON = "the compiler stores images with channels last"

_OPTIMIZER_REASONS = {
    "fused": "one kernel of the graph updates all parameters",
    "foreach": "few kernels of the graph update lists of parameters",
}

_AXIS_REASONS = {
    "compile": "the compiler fuses the operations between products and convolutions into fewer kernels",
    "cudnn": "cuDNN times its algorithms for each convolution while the step is recorded, where a heuristic may choose worse",
}
