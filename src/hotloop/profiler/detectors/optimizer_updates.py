"""Updates that process parameters one by one, and other costs of optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from hotloop.core.records.profile import COUNTS, OperatorTime, OptimizerUse, Remedy
from hotloop.profiler.detectors.step import BY_HAND, OFTEN, ProfiledStep, group_by, percent

_FUSED_OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adagrad")  # optimizers with `fused=True` on the CPU and on CUDA

_TRAFFIC = {"SGD": 4, "Adagrad": 5, "Adam": 7, "AdamW": 7}
"""Passes of an update over memory of the parameters' size: parameter, gradient and state, read or written."""

_MAX_TRAFFIC = 7

_PER_TENSOR = {"SGD": 1.0, "Adagrad": 2.5, "Adam": 3.2, "AdamW": 3.2}
"""Python time of a fused optimizer per tensor, in launches, measured in trainings on a CPU (torch 2.13)."""

_PER_UPDATE = {"SGD": 40.0, "Adagrad": 40.0, "Adam": 40.0, "AdamW": 40.0}
"""Time of `step()` beside the tensors, in launches, measured likewise."""

_SPARSE_OPTIMIZERS = ("SGD", "Adagrad")  # fused optimizers that also accept sparse gradients, but not with `fused=True`

_SLOW_FOREACH = ("ASGD", "Rprop")
"""Optimizers whose foreach took 0.9 to 2 times as long as the loop on a CPU, with 40 and 200 tensors."""

_LIST_OPS = ("aten::_foreach", "aten::_fused")

_SINGLE_IMPLEMENTATION = ("LBFGS", "Muon", "SparseAdam")  # torch's optimizers without another implementation

_STATE_MAKING_OPS = frozenset(
    {"aten::empty_like", "aten::zeros_like", "aten::empty", "aten::zeros", "aten::zero_", "aten::fill_"}
)
"""Operators that create optimizer state."""

_MIN_LOOP_TENSORS = 8  # least number of tensors of a loop


def per_parameter_update(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields remedies for loops over parameters, groups or optimizers."""
    for use in merge_alike_optimizers(step.profile.optimizers):
        if use.implementation == "forloop":
            yield from _implementation_remedy(step, use)
        elif use.implementation:
            yield from _group_remedy(step, use)
        else:
            yield from _custom_optimizer_remedy(step, use)


def recreated_optimizer(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields remedies for optimizers that the script creates at each step, without the state of earlier steps."""
    for use in merge_alike_optimizers(step.profile.optimizers):
        if use.made < OFTEN:
            continue
        making = [
            one
            for one in step.operators_by_line.get(use.where, [])
            if one.phase == "update" and one.name in _STATE_MAKING_OPS
        ]
        paged = step.profile.paging.system_ms if step.profile.paging else 0.0
        won = min(step.phase("update"), sum(map(step.cost_ms, making)) + paged)
        gain = step.share(won)
        yield Remedy(
            cause=f"an optimizer is made anew at each step: {use.kind} loses its state",
            where=use.where,
            remedy="make it once, before the loop; for another learning rate set group['lr'] of its param_groups, or take a "
            "scheduler of torch.optim.lr_scheduler",
            gain=gain,
            evidence=f"making its state takes up to {step.part(won)}",
            note=gain < COUNTS,
        )


def merge_alike_optimizers(uses: Sequence[OptimizerUse]) -> list[OptimizerUse]:
    """Merges equal optimizers that step at one line."""
    alike = group_by(uses, lambda one: (one.kind, one.where, one.implementation))
    return [_merge_uses(ones) if len(ones) > 1 else ones[0] for ones in alike.values()]


def _merge_uses(uses: Sequence[OptimizerUse]) -> OptimizerUse:
    together = {
        "groups": [group for one in uses for group in one.groups],
        "steps": sum(one.steps for one in uses) / len(uses),
        "ms": sum(one.ms for one in uses),
    }
    return uses[0].model_copy(update=together)


def _group_remedy(step: ProfiledStep, use: OptimizerUse) -> Iterator[Remedy]:
    """Groups of different settings stay. The gain is the Python between groups that isn't per tensor."""
    groups, tensors, spared = len(use.groups), sum(group.tensors for group in use.groups), _spare_groups(use)
    if spared < _MIN_LOOP_TENSORS:
        return
    part = use.ms / whole if (whole := step.phase("update")) else 0.0
    calls = part * sum(one.calls for one in step.operators(lambda one: one.phase == "update"))
    won = spared / groups * (calls * step.between_ms("update") - use.steps * _per_tensor_ms(step, use))
    yield Remedy(
        cause=f"{use.kind} updates {tensors} parameters in {groups} groups, one after the other",
        where=use.where,
        remedy="one optimizer, and one group for all parameters that have the same settings",
        gain=step.share(won),
        evidence=f"the update takes {use.ms:.2f} ms, {percent(step.share(use.ms))} of the step; {won:.2f} ms of the "
        "update are Python between the groups",
    )


def _spare_groups(use: OptimizerUse) -> int:
    """Returns how many groups repeat the settings of another group."""
    return len(use.groups) - len({group.settings for group in use.groups})


def _implementation_remedy(step: ProfiledStep, use: OptimizerUse) -> Iterator[Remedy]:
    cause = _cause(use)
    if use.kind not in _FUSED_OPTIMIZERS:
        remedy, axes = f"give {use.kind} foreach=True", {"optimizer": "foreach"}
        if not step.on_cpu:
            yield _per_parameter_remedy(step, use, cause=cause, where=use.where, remedy=remedy, axes=axes)
        elif use.kind not in _SLOW_FOREACH:
            yield _foreach_remedy(step, use, cause=cause, where=use.where, remedy=remedy, axes=axes)
    elif use.kind in _SPARSE_OPTIMIZERS and step.operators(
        lambda one: "embedding" in one.name and one.name.endswith("sparse_backward")
    ):
        remedy = (
            f"fused=True for {use.kind} of the parameters with dense gradients, and another optimizer for "
            "parameters with sparse gradients"
        )
        yield _per_parameter_remedy(step, use, cause=cause, where=use.where, remedy=remedy)
    else:
        groups = (
            ", and all parameters with the same settings in one group"
            if _spare_groups(use) >= _MIN_LOOP_TENSORS
            else ""
        )
        remedy, axes = f"give {use.kind} fused=True{groups}", {"optimizer": "fused"}
        yield _per_parameter_remedy(step, use, cause=cause, where=use.where, remedy=remedy, axes=axes)


def _cause(use: OptimizerUse) -> str:
    tensors = sum(group.tensors for group in use.groups)
    return f"a for-loop optimizer: {use.kind} updates {tensors} parameters one by one"


def _foreach_remedy(step: ProfiledStep, use: OptimizerUse, **fields: Any) -> Remedy:
    """On a CPU torch computes lists tensor by tensor; the gain is the Python between operators."""
    spent, whole = min(use.ms, step.phase("update")), step.phase("update")
    ones = step.operators(lambda one: one.phase == "update")
    part = spent / whole if whole else 0.0
    won = part * sum(step.python_around_ms(one) for one in ones)
    calls = part * sum(one.calls for one in ones)
    return Remedy(
        gain=step.share(won),
        evidence=f"the update takes {spent:.2f} ms, {percent(step.share(spent))} of the step; {won:.2f} ms of the "
        f"update are Python around {calls:.0f} operations, whose number stays the same on a CPU",
        **fields,
    )


def _custom_optimizer_remedy(step: ProfiledStep, use: OptimizerUse) -> Iterator[Remedy]:
    """Only the calls of operators per tensor are a gain: the work of an unknown update may be large.

    The number of tensors of a manual update is unknown; a line that runs as often as a loop counts.
    """
    by_hand = use.kind == BY_HAND
    tensors = _MIN_LOOP_TENSORS if by_hand else sum(group.tensors for group in use.groups)
    loops = (
        _tensor_loops(step, use.steps * tensors)
        if tensors >= _MIN_LOOP_TENSORS and use.kind not in _SINGLE_IMPLEMENTATION
        else {}
    )
    if not loops:
        return
    where = max(loops, key=lambda where: sum(step.cost_ms(one) for one in loops[where]))
    spent, part = min(use.ms, step.phase("update")), _time_share(step, use)
    won = min(spent, part * sum(step.reclaimable_ms(one) for ones in loops.values() for one in ones))
    calls = part * sum(one.calls for ones in loops.values() for one in ones)
    yield Remedy(
        cause="an update by hand, in a loop over parameters" if by_hand else _cause(use),
        where=where,
        remedy="an optimizer of torch.optim with fused=True or foreach=True if there is an equivalent, else "
        "torch._foreach_ operations over the list of parameters",
        gain=step.share(won),
        evidence=f"the update takes {spent:.2f} ms, {percent(step.share(spent))} of the step; {won:.2f} ms of the "
        f"update are the start of {calls:.0f} operations",
    )


def _time_share(step: ProfiledStep, use: OptimizerUse) -> float:
    """Optimizers of one kind share their lines."""
    together = sum(one.ms for one in step.profile.optimizers if one.kind == use.kind)
    return use.ms / together if together else 1.0


def _tensor_loops(step: ProfiledStep, tensors: float) -> dict[str, list[OperatorTime]]:
    """Returns lines that run an operator per tensor, themselves or through a library, with these operators."""
    return {
        where: ones
        for where, there in step.operators_by_line.items()
        if where and (ones := _per_tensor_operators(there, tensors))
    }


def _per_tensor_operators(there: Sequence[OperatorTime], tensors: float) -> list[OperatorTime]:
    """Returns a line's operators in the update if the line runs an operator for each tensor.

    The operators that torch itself runs for the tensors of a `_foreach_` list on a CPU don't count.
    """
    outer = [one for one in there if not one.outer.startswith(_LIST_OPS)]
    ones = [one for one in outer if one.phase == "update" and one.within != "zero_grad"]
    if any(one.name.startswith(_LIST_OPS) for one in ones) and not any((one.line_runs or 0) >= tensors for one in ones):
        return []
    calls = (sum(one.calls for one in same) for same in group_by(ones, lambda one: one.name).values())
    return ones if max(calls, default=0.0) >= tensors else []


def _per_parameter_remedy(step: ProfiledStep, use: OptimizerUse, **fields: Any) -> Remedy:
    """The gain is the time beyond the memory traffic."""
    spent, least = min(use.ms, step.phase("update")), _least_ms(step, use)
    return Remedy(
        gain=step.share(spent - least),
        evidence=f"the update takes {spent:.2f} ms, {percent(step.share(spent))} of the step; "
        f"as one kernel it could take {least:.2f} ms here",
        **fields,
    )


def _least_ms(step: ProfiledStep, use: OptimizerUse) -> float:
    """Returns the milliseconds of a fused update: memory traffic and the optimizer's Python code."""
    numbers = sum(group.numbers for group in use.groups)
    rate = step.profile.limits.bytes_per_s
    moved = 4.0 * numbers * _TRAFFIC.get(use.kind, _MAX_TRAFFIC)
    python_ms = _PER_UPDATE.get(use.kind, 1.0) * step.launch_ms + _per_tensor_ms(step, use)
    return (1e3 * moved / rate if rate else 0.0) + use.steps * python_ms


def _per_tensor_ms(step: ProfiledStep, use: OptimizerUse) -> float:
    return _PER_TENSOR.get(use.kind, 0.5) * sum(group.tensors for group in use.groups) * step.launch_ms


def manual_update(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields remedies for tensor-by-tensor work in the update outside of optimizers; clipping is torch's own."""
    if not step.operators(lambda one: one.within == "step"):
        return
    others = step.operators(lambda one: one.phase == "update" and not one.within and bool(one.where))
    for where, ones in group_by(others, lambda one: one.where).items():
        if any("norm" in one.name for one in ones) or not (there := _per_tensor_operators(ones, _MIN_LOOP_TENSORS)):
            continue
        won = sum(step.python_around_ms(one) if step.on_cpu else step.reclaimable_ms(one) for one in there)
        calls = sum(one.calls for one in there)
        yield Remedy(
            cause=f"an update beside the optimizer's, tensor by tensor: {calls:.0f} operations",
            where=where,
            remedy="torch._foreach_ operations over the lists of parameters; for an average of weights AveragedModel with "
            "multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay), or an average every few steps",
            gain=step.share(won),
            evidence=f"{step.part(won)} go into {'Python around' if step.on_cpu else 'starting'} them",
        )


def zero_fill_gradients(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields remedies for gradients that are zeroed in place."""
    ones = step.operators(lambda one: one.within == "zero_grad" and one.name.endswith("zero_"))
    for where, there in group_by(ones, lambda one: one.where).items():
        spent = sum(step.cost_ms(one) for one in there)
        yield Remedy(
            cause="gradients are zeroed in place",
            where=where or step.profile.step_where,
            remedy="zero_grad(set_to_none=True), torch's default: the backward then writes new gradients instead of adding to zeros",
            gain=step.share(spent),
            evidence=f"filling them with zeros takes {step.part(spent)}, without the additions to them",
        )


def dense_embedding_update(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields remedies for embeddings of which a batch uses few rows."""
    numbers = sum(group.numbers for use in step.profile.optimizers for group in use.groups)
    for one in step.operators(lambda one: one.name == "aten::embedding" and len(one.shapes) > 1):
        rows, _, width = one.shapes[0].partition("x")
        asked = prod(map(int, one.shapes[1].split("x")))
        if not (rows.isdigit() and width.isdigit()) or asked >= int(rows) or not numbers:
            continue
        if _is_tied(step, rows, width) or not _has_dense_gradient(step, one):
            continue
        unused = (1 - asked / int(rows)) * min(1.0, int(rows) * int(width) / numbers)
        updating = step.phase("update")
        yield Remedy(
            cause=f"an embedding of {rows} rows is updated as a whole, though a batch uses {asked} at most",
            where=one.where or one.module,
            remedy="nn.Embedding(..., sparse=True) with SGD, or with torch.optim.SparseAdam; SparseAdam is another "
            "training, since it does not change rows without a gradient",
            gain=step.share(unused * updating),
            evidence=f"the update takes {step.part(updating)}, {percent(unused)} of it for rows without a gradient",
        )


def _has_dense_gradient(step: ProfiledStep, one: OperatorTime) -> bool:
    """Returns whether a gradient of all rows is made; frozen tables have no gradient, sparse gradients few rows."""
    place = one.where, one.module
    return any(
        other.name == "aten::embedding_dense_backward" and (other.where, other.module) == place
        for other in step.profile.operators
    )


def _is_tied(step: ProfiledStep, rows: str, width: str) -> bool:
    """Returns whether another operator uses the table, as a tied output layer: then all rows have gradients."""
    tables = {f"{rows}x{width}", f"{width}x{rows}"}
    return any(
        one.phase not in ("backward", "update") and one.name != "aten::embedding" and not tables.isdisjoint(one.shapes)
        for one in step.profile.operators
    )
