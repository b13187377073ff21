"""Seconds of one operator on a chip: a roofline of the rates that operators of its class and size reach."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hotloop.advisor.chips import Chip
from hotloop.advisor.coefficients import Coefficients
from hotloop.core.records.step_costs import OperatorCost

PRODUCTS = ("linear", "batched_product", "convolution", "attention", "recurrent")

_TILES = (128, 64, 32)


@dataclass(frozen=True)
class PredictedTime:
    """Seconds of all calls of an operator on the device.

    Attributes:
        compute_s: time that arithmetic alone takes.
        memory_s: time that memory traffic alone takes.
        seconds: time of both together, without launches.
        factor_class: class whose chip factor decides the time.
    """

    seconds: float
    compute_s: float
    memory_s: float
    factor_class: str


def operator_time(
    operator: OperatorCost, chip: Chip, precision: str, coefficients: Coefficients, byte_scale: float = 1.0
) -> PredictedTime:
    """Returns the time of all calls of an operator.

    Args:
        operator: the operator, with the bytes of its own dtype.
        chip: the chip.
        precision: of products.
        coefficients: fitted factors.
        byte_scale: factor on all bytes, such as 0.5 for a step traced in fp32 that runs in bf16.
    """
    if operator.kind == "view":
        return PredictedTime(0.0, 0.0, 0.0, "memory")
    if operator.kind in PRODUCTS:
        return _product_time(operator, chip, precision, coefficients, byte_scale)
    chip_class = operator.kind if operator.kind in ("normalization", "softmax") else "memory"
    share = coefficients.factor(chip, chip_class).value * coefficients.classes.get(operator.kind, 1.0)
    memory = operator.bytes * byte_scale / (chip.bandwidth_bytes_per_s * share)
    compute = operator.flops / (chip.vector_flop_per_s * coefficients.classes["vector"])
    seconds = max(memory, compute) * operator.count
    return PredictedTime(seconds, compute * operator.count, memory * operator.count, chip_class)


def product_class(chip: Chip, precision: str) -> str:
    """Returns `tensor` for a precision that has matrix units of its own, `fp32` for others."""
    return "tensor" if precision != "fp32" and chip.peak(precision) > 1.5 * chip.vector_flop_per_s else "fp32"


def _product_time(
    operator: OperatorCost, chip: Chip, precision: str, coefficients: Coefficients, byte_scale: float
) -> PredictedTime:
    chip_class = product_class(chip, precision)
    rate = chip.peak(precision) * coefficients.factor(chip, chip_class).value
    rate *= coefficients.classes.get(_product_kind(operator, chip_class), 1.0)
    use = tile_use(operator, chip, coefficients, chip_class)
    compute = operator.flops / (rate * use)
    memory = operator.bytes * byte_scale / (chip.bandwidth_bytes_per_s * coefficients.factor(chip, "memory").value)
    if operator.kind == "convolution" and chip_class == "tensor" and chip.architecture in ("Volta", "Turing"):
        memory *= 1 + coefficients.classes.get("conversion", 0.0)  # their tensor cores take channels last
    power = coefficients.shapes["power"]
    seconds = (compute**power + memory**power) ** (1 / power)
    count = operator.count
    return PredictedTime(seconds * count, compute * count, memory * count, chip_class)


def _product_kind(operator: OperatorCost, chip_class: str) -> str:
    """Returns the name of the class factor: convolutions differ by kernel size and groups."""
    form = conv_form(operator) if operator.kind == "convolution" else operator.kind
    return f"{form}/{chip_class}"


def conv_form(operator: OperatorCost) -> str:
    """Returns `grouped`, `point`, `winograd` (3x3 with stride 1) or `direct`."""
    if len(operator.shape) < 9:
        return "direct"
    rows, columns, stride, groups = operator.shape[5:9]
    if groups > 1:
        return "grouped"
    if rows * columns == 1:
        return "point"
    return "winograd" if rows == columns == 3 and stride == 1 else "direct"


def tile_use(operator: OperatorCost, chip: Chip, coefficients: Coefficients, chip_class: str) -> float:
    """Returns the share of the chip that the tiles of a product keep busy."""
    if chip.kind == "cpu" or operator.kind == "recurrent":
        return 1.0
    batch, m, n, k = _as_product(operator)
    shapes = coefficients.shapes
    units = chip.units or 64
    best = 0.0
    for tile, relative in zip(_TILES, shapes["relative"], strict=True):
        tiles = batch * math.ceil(m / tile) * math.ceil(n / tile)
        waves = tiles / units
        if waves < shapes["wave"]:
            waves = math.ceil(waves)
        if operator.phase == "backward" and k > 4 * max(m, n):  # the inner dimension is split between units
            waves = max(tiles / units, 1 / max(1, units // tiles)) if tiles < units else waves
        best = max(best, relative * batch * m * n / (waves * units * tile * tile))
    return best * k / (k + shapes["inner"][chip_class])


def _as_product(operator: OperatorCost) -> tuple[int, int, int, int]:
    """Returns (batch, m, n, k) of the product that an operator computes."""
    shape = operator.shape
    match operator.kind:
        case "attention" if len(shape) == 4:
            return shape[0], shape[1], shape[3], shape[2]
        case "convolution" if len(shape) >= 9:
            _samples, c_in, _h, _w, c_out, rows, columns, _stride, groups = shape[:9]
            k = max(1, c_in // groups * rows * columns)
            outputs = operator.flops / (2 * k * c_out * max(1, operator.gradients))
            return groups, max(1, round(outputs)), max(1, c_out // groups), k
        case _ if len(shape) == 4:
            return shape
    return 1, max(1, math.prod(shape)), 1, max(1, operator.flops // (2 * max(1, math.prod(shape))))
