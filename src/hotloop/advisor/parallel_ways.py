"""How several chips share a step: the share of each, its memory, and the time of communication that isn't hidden."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from hotloop.advisor.chips import Chip
from hotloop.advisor.coefficients import Coefficients
from hotloop.advisor.communication import Interconnect, all_reduce_s, gather_s, send_s
from hotloop.core.records.step_costs import OperatorCost, StepCosts
from hotloop.errors import HotloopError

Way = Literal["none", "data", "sharded", "tensor", "stages"]

WAYS = ("none", "data", "sharded", "tensor", "stages")

BUCKET_BYTES = 25 * 2**20
"""Gradients that DistributedDataParallel sums at once."""


def share_of(costs: StepCosts, gpus: int, way: Way, microbatches: int) -> StepCosts:
    """Returns the costs of the part of one chip; for `stages`, those of one microbatch of one stage."""
    if way not in WAYS:
        raise HotloopError(f"parallel {way!r}", expected="one of " + ", ".join(WAYS))
    if way == "none":
        return costs
    if way in ("data", "sharded"):
        scaled = at_batch(costs, costs.batch_size / gpus)
        if way == "data":
            return scaled
        return replace(
            scaled, operators=tuple(_divided(one, gpus) if one.phase == "update" else one for one in scaled.operators)
        )
    if way == "tensor":
        return replace(costs, operators=tuple(_sharded(one, gpus) for one in costs.operators))
    scaled = at_batch(costs, costs.batch_size / microbatches)
    operators = tuple(_divided(one, gpus * (microbatches if one.phase == "update" else 1)) for one in scaled.operators)
    return replace(scaled, operators=operators, module_calls=costs.module_calls // gpus)


def at_batch(costs: StepCosts, batch_size: float) -> StepCosts:
    """Returns the costs of a batch of another size: activations scale with it, weights and the update don't."""
    ratio = batch_size / max(1, costs.batch_size)
    if ratio == 1:
        return costs
    weights = weight_gradients(costs)
    operators = tuple(one if one.phase == "update" else _scaled(one, ratio, one in weights) for one in costs.operators)
    activations = round(costs.activation_peak_bytes * ratio)
    return replace(
        costs,
        operators=operators,
        batch_size=max(1, round(batch_size)),
        input_bytes=round(costs.input_bytes * ratio),
        activation_peak_bytes=activations,
        saved_bytes=round(costs.saved_bytes * ratio),
        peak_bytes=max(
            costs.peak_bytes + round((costs.activation_peak_bytes + costs.input_bytes) * (ratio - 1)),
            costs.parameter_bytes,
        ),
    )


def weight_gradients(costs: StepCosts) -> set[OperatorCost]:
    """Returns the backward products whose inner dimension is the batch, by comparison with the forward products."""
    linear = [one for one in costs.operators if one.kind == "linear" and len(one.shape) == 4]
    forward = {one.shape[1:] for one in linear if one.phase == "forward"}
    found = set()
    for one in linear:
        m, n, k = one.shape[1:]
        if one.phase == "backward" and ({(k, m, n), (k, n, m)} & forward) and (m, k, n) not in forward:
            found.add(one)
    return found


def _scaled(operator: OperatorCost, ratio: float, is_weight_gradient: bool) -> OperatorCost:
    """Returns an operator of a batch `ratio` times as large."""
    constant = _weight_bytes(operator, is_weight_gradient)
    moved = max(0, operator.bytes - constant) * ratio + min(constant, operator.bytes)
    share = moved / operator.bytes if operator.bytes else 1.0
    shape = operator.shape
    if shape:
        index = 0
        if operator.kind == "linear" and len(shape) == 4:
            index = 3 if is_weight_gradient else 1
        shape = (*shape[:index], max(1, round(shape[index] * ratio)), *shape[index + 1 :])
    return replace(
        operator,
        flops=round(operator.flops * ratio),
        read_bytes=round(operator.read_bytes * share),
        written_bytes=round(operator.written_bytes * share),
        shape=shape,
    )


def _weight_bytes(operator: OperatorCost, is_weight_gradient: bool = False) -> int:
    shape, width = operator.shape, 2 if "16" in operator.dtype else 4
    if operator.kind == "linear" and len(shape) == 4:
        _, m, n, k = shape
        return width * (m * n if is_weight_gradient else n * k)
    if operator.kind == "convolution" and len(shape) >= 9:
        return width * shape[1] * shape[4] * shape[5] * shape[6] // max(1, shape[8])
    return 0


def _divided(operator: OperatorCost, parts: int) -> OperatorCost:
    """Returns an operator with a part of the calls; fewer calls than one are a smaller call."""
    if operator.count >= parts:
        return replace(operator, count=round(operator.count / parts))
    scale = operator.count / parts
    return replace(
        operator,
        count=1,
        flops=round(operator.flops * scale),
        read_bytes=round(operator.read_bytes * scale),
        written_bytes=round(operator.written_bytes * scale),
    )


def _sharded(operator: OperatorCost, gpus: int) -> OperatorCost:
    """Returns one chip's part of an operator whose linear layers are split: normalization stays whole."""
    if operator.kind == "normalization":
        return operator
    shape = operator.shape
    if operator.kind == "linear" and len(shape) == 4:
        shape = (shape[0], shape[1], max(1, shape[2] // gpus), shape[3])
    elif shape:
        shape = (max(1, shape[0] // gpus), *shape[1:])
    return replace(
        operator,
        flops=operator.flops // gpus,
        read_bytes=operator.read_bytes // gpus,
        written_bytes=operator.written_bytes // gpus,
        shape=shape,
    )


def communication_s(
    costs: StepCosts,
    gpus: int,
    way: Way,
    chip: Chip,
    coefficients: Coefficients,
    network: Interconnect | None,
    step_s: float,
    precision: str,
    microbatches: int,
) -> float:
    """Returns seconds of communication that the step doesn't hide behind the backward pass."""
    if gpus == 1 or way == "none":
        return 0.0
    if way == "data":
        total = all_reduce_s(costs.gradient_bytes, gpus, chip, coefficients, network)
        last = all_reduce_s(min(BUCKET_BYTES, costs.gradient_bytes), gpus, chip, coefficients, network)
        return last + max(0.0, total - last - coefficients.communication["overlap"] * 0.6 * step_s)
    if way == "sharded":
        each = gather_s(costs.parameter_bytes, gpus, chip, coefficients, network)
        return each * (1 - coefficients.communication["overlap"]) + max(0.0, 3 * each - 0.9 * step_s)
    width = 2 if precision in ("fp16", "bf16") else 4
    outputs = [
        one for one in costs.operators if one.kind == "linear" and one.phase == "forward" and len(one.shape) == 4
    ]
    if way == "tensor":
        size = sum(one.count for one in outputs) / 2
        mean = sum(one.count * one.shape[1] * min(one.shape[2], one.shape[3]) for one in outputs) / max(1.0, 2 * size)
        return 2 * size * all_reduce_s(mean * width, gpus, chip, coefficients, network)
    largest = max((one.shape[1] * min(one.shape[2], one.shape[3]) for one in outputs), default=0)
    return 2 * (microbatches + gpus - 2) * send_s(largest * width / microbatches, chip, coefficients)


def memory_of(costs: StepCosts, gpus: int, way: Way, width: float, microbatches: int) -> int:
    """Returns the peak bytes of tensors on each chip; activations have `width` times their bytes in the record."""
    fixed = costs.parameter_bytes + costs.gradient_bytes + costs.optimizer_bytes
    activations = max(costs.activation_peak_bytes, costs.peak_bytes - fixed - costs.buffer_bytes - costs.input_bytes)
    copies = (1 - width) * costs.parameter_bytes  # weights cast to the precision of products
    if way == "none":
        return round(fixed + copies + costs.buffer_bytes + costs.input_bytes + activations * width)
    moving = (costs.input_bytes + activations * width) / gpus
    if way == "data":
        return round(fixed + copies + costs.gradient_bytes + costs.buffer_bytes + moving)
    if way == "sharded":
        return round((fixed + copies) / gpus + 2 * _largest_weight(costs) + costs.buffer_bytes + moving)
    if way == "tensor":
        return round((fixed + copies) / gpus + costs.buffer_bytes + 1.3 * moving)
    return round((fixed + copies) / gpus + costs.buffer_bytes + moving * min(1.0, gpus / microbatches) * 1.2)


def _largest_weight(costs: StepCosts) -> int:
    return max((_weight_bytes(one) for one in costs.operators if one.phase == "forward"), default=0)
