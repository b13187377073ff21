"""The written rules for compiled and recorded steps on a CUDA device: which plans are considered there, in which order, and why.

The order follows from facts of the Task alone. A race and a proof decide between the plans.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from hotloop.feasible import device_of, violations
from hotloop.hardware import Hardware
from hotloop.plan import Plan
from hotloop.records import TaskFacts
from hotloop.rules import is_long

Change = dict[str, Any]
"""Axes and their new values."""

_AT_ONCE = (32, 8)
"""Steps of one replay that are considered where an epoch has twice as many batches or more."""

LARGE_WORK = 2**29
"""Parameters times samples of a batch, from which on the libraries' convolutions take most of a step: a ResNet-18 at batch 128
has 1.4e9, a small network of images less than 2e8."""


def is_cuda(plan: Plan, hardware: Hardware) -> bool:
    device = device_of(plan, hardware)
    return device is not None and device.kind == "cuda"


def recordings(facts: TaskFacts) -> list[Change]:
    """Ways to record steps, likeliest first; several steps in one replay need data on the device, which `violations` checks."""
    several = next((count for count in _AT_ONCE if facts.batches is None or 2 * count <= facts.batches), None)
    return [*([] if several is None else [{"graphs": several}]), {"graphs": "step"}]


def auto_ways(eager: Plan, facts: TaskFacts, hardware: Hardware, fixed: Collection[str]) -> list[Plan]:
    """What `auto` considers beside an eager plan on CUDA, likeliest first; the last plans are for steps that can't be recorded.

    Args:
        eager: with the Task's own form of the update, unless the user set another form.
        fixed: axes that the user set.
    """
    if facts.recurrent or eager.compile != "none" or not is_long(facts):
        return []
    step = eager if "compile" in fixed else eager.with_axes(compile="step")
    recorded = [] if "graphs" in fixed else [step.with_axes(**change) for change in recordings(facts)]
    recorded = [way for way in recorded if not violations(way, facts, hardware)]
    found = [*(variants(recorded[0], facts, hardware, fixed) if recorded else []), *recorded[1:]]
    if step.compile != "none":
        found += variants(step, facts, hardware, fixed)
        found += [
            one for way in recorded[:1] for one in variants(way.with_axes(compile="none"), facts, hardware, fixed)
        ]
    return list(dict.fromkeys(plan for plan in found if not violations(plan, facts, hardware)))


def variants(way: Plan, facts: TaskFacts, hardware: Hardware, fixed: Collection[str]) -> list[Plan]:
    """A compiled or recorded plan with further axes, likeliest to be the fastest first; the plan as it is comes last."""
    changes = [] if facts.recurrent else list(_changes(way, facts))
    allowed = [change for change in changes if "compile" not in change or "compile" not in fixed]
    plans = [way.with_axes(**{axis: change[axis] for axis in change.keys() - fixed}) for change in allowed]
    able = [plan for plan in plans if plan != way and not violations(plan, facts, hardware)]
    return list(dict.fromkeys([*able, way]))


def _changes(way: Plan, facts: TaskFacts) -> Iterator[Change]:
    if way.compile == "none":
        yield from _recorded_eagerly(way, facts)
    elif way.compile == "step":
        yield from _compiled(way, facts)
    else:
        yield from _laid(facts)


def _compiled(way: Plan, facts: TaskFacts) -> Iterator[Change]:
    """Rewrites win where products and convolutions are small; the choice of algorithm and layout where they are large."""
    timed, laid = list(_timed(way, facts)), list(_laid(facts))
    on_tensor_cores = [{**layout, **algorithm} for layout in laid for algorithm in timed or [{}]]
    eagerly = [{"compile": "none", **change} for change in list(_recorded_eagerly(way, facts))[:1]]
    if not is_large(facts):
        yield {"rewrites": "all"}
        yield from ({"rewrites": "all", **change} for change in timed)
        yield from eagerly
        yield from on_tensor_cores
    elif way.precision == "fp32":
        yield from (*timed, *eagerly, *on_tensor_cores)
        yield {"rewrites": "all"}
    else:
        yield from (*on_tensor_cores, *eagerly, *timed)
        yield {"rewrites": "all"}


def _recorded_eagerly(way: Plan, facts: TaskFacts) -> Iterator[Change]:
    """The step as PyTorch runs it, as one graph; nothing where no graph is recorded."""
    if way.graphs == "none":
        return
    update = next(({"optimizer": how} for how in ("fused", "foreach") if how in facts.implementations), {})
    laid = list(_laid(facts))[:1] if way.precision != "fp32" and is_large(facts) else []
    best = {key: value for change in (update, *_timed(way, facts), *laid) for key, value in change.items()}
    yield best
    yield update


def _timed(way: Plan, facts: TaskFacts) -> Iterator[Change]:
    """cuDNN's timing of algorithms, for which only a recorded step chooses anew."""
    if way.graphs != "none" and facts.has_convolution_layers:
        yield {"cudnn": "benchmark"}


def _laid(facts: TaskFacts) -> Iterator[Change]:
    """Channels last for images; nobody has measured volumes."""
    if facts.convolutions and any(len(shape) == 3 for shape in facts.inputs):
        yield {"layout": "channels_last"}


def is_large(facts: TaskFacts) -> bool:
    """Whether convolutions of libraries probably take most of a step."""
    return facts.has_convolution_layers and facts.parameters * facts.batch_size >= LARGE_WORK


def reasons(plan: Plan, eager: Plan, facts: TaskFacts) -> tuple[str, ...]:
    """Why a plan on CUDA is considered beside the eager one: a sentence for each axis that differs; none on other devices."""
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
        units = "tensor cores read images with channels last" if plan.precision != "fp32" else _LAYS
        return f"{units}, and weights that lie so aren't copied in each step"
    if axis == "rewrites":
        return _REWRITES + ", and so do first convolutions and pooling" * facts.has_convolution_layers
    if axis == "optimizer":
        return _UPDATES.get(plan.optimizer, _JOINED if plan.compile != "none" else _UPDATES["foreach"])
    return _TEXTS[axis]


_JOINED = "the compiler writes the update of all parameters as one kernel"
_REWRITES = "small products become sums, which the compiler joins with what is beside them"
_LAYS = "the compiler lays images with channels last"

_UPDATES = {
    "fused": "one kernel of the graph updates all parameters",
    "foreach": "few kernels of the graph update lists of parameters",
}

_TEXTS = {
    "compile": "the compiler makes fewer kernels of what is between products and convolutions",
    "cudnn": "cuDNN times its algorithms for each convolution while the step is recorded, where a heuristic may choose worse",
}
