"""Rules that exclude plans with several ranks, or with workers and a parameter server."""

from __future__ import annotations

from collections.abc import Iterator

from hotloop.core.feasibility.forecast import FeasibilityInput, Rule, Violation, axis_violations
from hotloop.plan import AXES_OF_PARALLEL, BASELINE

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
    if plan.ranks == 1 and plan.pipeline != "interleaved":
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


RANK_RULES: tuple[Rule, ...] = (
    _check_rank_count,
    _check_axes_of_other_modes,
    _check_synchronous,
    _check_updates,
    _check_stages,
    _check_asynchronous,
)
