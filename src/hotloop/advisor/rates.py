"""Seconds of operators on a chip: a roofline of the rates that operators of their class and size reach; of a step on a CPU.

Fitted factors, with their spread, lie between a chip's published rates and those that operators reach.
`facts/coefficients.json` holds them; `python -m bench.foresight --fit` writes the file from measurements of others.
A chip without measurements takes the factor of its kind, which follows from published facts, with a wider spread.
A CPU whose rates were measured has the operators' times by interpolation, and the host's work around them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any, Self

from hotloop.advisor.chips import FACTS, Chip
from hotloop.core.records.step_costs import CpuRates, Kind, OperatorCost, Points, StepCosts

_TUNED_MAKERS = {"NVIDIA": "nvidia", "AMD": "amd"}


@dataclass(frozen=True)
class Factor:
    """A factor and the standard deviation of its logarithm."""

    value: float
    spread: float


@dataclass(frozen=True)
class Coefficients:
    """Coefficients of all operator classes.

    Attributes:
        shapes: of products: relative rates of tiles of 128, 64 and 32, `inner` (multiply-adds that a tile loses at its start),
            `power` (how arithmetic and memory time add), `wave` (waves of tiles up to which the last wave counts).
        classes: factor of each class of operators on its published rate, for all chips, on top of the chip's factor.
        kinds: factor of chips by group and class, such as `nvidia/fp32`.
        chips: measured factors by chip and class.
        watts: fp32 FLOP/s per watt of board power in 2016, and the years in which the figure doubles.
        host: seconds of Python and dispatch by phase, on a host of 2023.
        whole: factors of a whole step over the sum of its operators, by way of running.
        sources: where each group comes from.
    """

    shapes: dict[str, Any]
    classes: dict[str, float]
    kinds: dict[str, tuple[float, float]]
    chips: dict[str, dict[str, tuple[float, float]]]
    watts: dict[str, float]
    host: dict[str, float]
    whole: dict[str, tuple[float, float]]
    communication: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        return cls(**data)

    def factor(self, chip: Chip, kind: str) -> Factor:
        """Returns the share of the chip's published rate that operators of the class reach.

        Classes are `fp32`, `tensor` (products by precision), `memory`, `normalization` and `softmax`.
        """
        if chip.is_measured:
            return Factor(*self.kinds.get(f"measured/{kind}", (1.0, 0.15)))
        measured = self.chips.get(chip.name, {}).get(kind)
        if measured:
            return Factor(*measured)
        prior = (
            self.kinds[f"{group(chip)}/{kind}"] if f"{group(chip)}/{kind}" in self.kinds else self.kinds[f"any/{kind}"]
        )
        value = prior[0]
        if kind == "fp32" and chip.kind == "gpu":
            value = min(value, self._power_limit(chip))
        return Factor(value, prior[1])

    def is_measured(self, chip: Chip) -> bool:
        return bool(self.chips.get(chip.name))

    def _power_limit(self, chip: Chip) -> float:
        """Share of the fp32 peak that the board's power allows."""
        if not chip.board_w or not chip.year or not self.watts:
            return math.inf
        rate = self.watts["flop_per_j_2016"] * 2 ** ((chip.year - 2016) / self.watts["doubling_years"])
        return rate * chip.board_w / chip.vector_flop_per_s


def group(chip: Chip) -> str:
    """Returns the group of chips whose factors a chip without measurements takes."""
    if chip.kind != "gpu":
        return chip.kind
    if chip.maker != "NVIDIA":
        return _TUNED_MAKERS.get(chip.maker, "any")
    lanes = chip.vector_flop_per_s / (chip.units or 1) / (chip.clock_hz or 1.7e9) / 2
    if lanes > 100 and (chip.year or 0) >= 2020:
        return "nvidia-wide"
    return "nvidia-pascal" if chip.architecture == "Pascal" else "nvidia"


@cache
def shipped() -> Coefficients:
    """Returns the coefficients of the package."""
    return Coefficients.from_dict(json.loads((FACTS / "coefficients.json").read_text(encoding="utf-8")))


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
    form = conv_form(operator) if operator.kind == "convolution" else operator.kind
    rate *= coefficients.classes.get(f"{form}/{chip_class}", 1.0)
    use = tile_use(operator, chip, coefficients, chip_class)
    compute = operator.flops / (rate * use)
    memory = operator.bytes * byte_scale / (chip.bandwidth_bytes_per_s * coefficients.factor(chip, "memory").value)
    if operator.kind == "convolution" and chip_class == "tensor" and chip.architecture in ("Volta", "Turing"):
        memory *= 1 + coefficients.classes.get("conversion", 0.0)  # their tensor cores take channels last
    power = coefficients.shapes["power"]
    seconds = (compute**power + memory**power) ** (1 / power)
    count = operator.count
    return PredictedTime(seconds * count, compute * count, memory * count, chip_class)


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


CPU_INTERVAL = (0.70, 1.40)
"""Of `cpu_step_time`: 90 % of steps; measured on small and large networks of one CPU."""

_NEIGHBOURS = 4  # probes that a product's rate is interpolated from
_LARGEST_BLOCK = 2**25  # bytes that glibc's allocator reuses; it maps larger blocks anew
_LSTM_BYTES = 80  # per step, row and unit, which the probe of an LSTM allocates too
_LAST_SLOPE = 1.0  # seconds by bytes beyond the largest probe

_SUBSTITUTE: dict[Kind, str] = {
    "elementwise": "aten.mul",
    "reduction": "aten.sum",
    "normalization": "aten.native_layer_norm",
    "softmax": "aten._softmax",
    "gather": "aten.index_select",
    "copy": "aten.clone",
    "random": "aten.bernoulli_",
    "update": "aten._foreach_add_",
    "other": "aten.mul",
}
"""The operator that stands for those of its kind that weren't probed."""

_PRODUCT_PROBES: dict[Kind, tuple[str, str]] = {
    "linear": ("aten.addmm/forward", "aten.mm/backward"),
    "batched_product": ("aten.bmm/forward", "aten.bmm/backward"),
    "convolution": ("aten.convolution/forward", "aten.convolution_backward/backward"),
    "attention": (
        "aten._scaled_dot_product_flash_attention_for_cpu/forward",
        "aten._scaled_dot_product_flash_attention_for_cpu_backward/backward",
    ),
    "recurrent": ("aten.mkldnn_rnn_layer/forward", "aten.mkldnn_rnn_layer_backward/backward"),
}

_Features = Callable[[Sequence[float]], tuple[float, ...]]


@dataclass(frozen=True)
class CpuStepTime:
    """Seconds of a step by part.

    Attributes:
        products, traffic: of operators that are bound by arithmetic, and of all others.
        memory: of new pages, and of reads from main memory, which the probes of operators lack.
        host: of Python, modules, views and the engine of autograd.
    """

    products: float
    traffic: float
    memory: float
    host: float

    @property
    def seconds(self) -> float:
        return self.products + self.traffic + self.memory + self.host


def cpu_step_time(costs: StepCosts, rates: CpuRates) -> CpuStepTime:
    """Returns the time of an eager step."""
    products = traffic = 0.0
    for one in costs.operators:
        if one.kind == "view":
            continue
        if one.kind in _PRODUCT_PROBES and one.flops:
            products += one.count * _product_seconds(one, rates)
        else:
            traffic += one.count * _traffic_seconds(one, rates.traffic)
    return CpuStepTime(products, traffic, _memory_seconds(costs, rates), _host_seconds(costs, rates.overhead_s))


def _memory_seconds(costs: StepCosts, rates: CpuRates) -> float:
    """Returns the time of first touches in a step.

    A step larger than the last-level cache reads parameters, gradients, optimizer state and saved activations from main
    memory: parameters in each of the three phases.
    """
    fixed = 3 * costs.parameter_bytes + costs.gradient_bytes + 2 * costs.optimizer_bytes
    cold_share = max(0.0, 1.0 - rates.cache_bytes / max(costs.peak_bytes, 1))
    cold = cold_share * (fixed + 2 * costs.saved_bytes)
    return rates.fault_s * _new_page_bytes(costs) + rates.cold_s * cold


def _new_page_bytes(costs: StepCosts) -> float:
    """Returns the bytes that the C library takes from the system in each step, beside those that the probes take.

    glibc returns blocks above 32 MiB at once, and of the rest what exceeds twice the largest block.
    """
    products = [one for one in costs.operators if one.kind in _PRODUCT_PROBES]
    of_lstm = sum(
        _LSTM_BYTES * math.prod((one.shape[0], one.shape[1], one.shape[3])) * one.count
        for one in products
        if one.kind == "recurrent" and one.phase == "forward" and len(one.shape) == 4
    )
    large = sum(one.written_bytes * one.count for one in products if one.written_bytes >= _LARGEST_BLOCK)
    rest = max(costs.activation_peak_bytes - of_lstm - large, 0.0)
    return large + max(rest - 2 * min(costs.largest_bytes, _LARGEST_BLOCK), 0.0)


def _host_seconds(costs: StepCosts, overhead: Mapping[str, float]) -> float:
    views = dict.fromkeys(("forward", "backward", "update"), 0)
    for one in costs.operators:
        if one.kind == "view" and not one.name.endswith("detach"):
            views[one.phase] += one.count
    host = overhead["view"] * (views["forward"] + views["update"]) + overhead["node"] * views["backward"]
    host += overhead["module"] * costs.module_calls
    if any(True for _ in costs.in_phase("update")):
        host += overhead["optimizer"] + overhead["parameter"] * costs.parameter_tensors
    return host + overhead["engine"] + overhead.get("step", 0.0)


def _product_seconds(operator: OperatorCost, rates: CpuRates) -> float:
    forward, backward = _PRODUCT_PROBES[operator.kind]
    names = (f"{operator.name}/{operator.phase}", backward if operator.phase == "backward" else forward, forward)
    points = next((rates.products[name] for name in names if name in rates.products), ())
    if not points:
        return _traffic_seconds(operator, rates.traffic)
    return operator.flops / _interpolated_rate(operator.shape, points, _FEATURES[operator.kind])


def _interpolated_rate(shape: Sequence[float], points: Points, features: _Features) -> float:
    """Returns the FLOP/s of the nearest probes, weighted by the inverse square of the distance of log sizes."""
    wanted = features(shape)
    near = sorted((math.dist(wanted, features(probe)), rate) for probe, rate in points)[:_NEIGHBOURS]
    weights = [1.0 / (distance + 0.05) ** 2 for distance, _ in near]
    logs = sum(weight * math.log(rate) for weight, (_, rate) in zip(weights, near, strict=True))
    return math.exp(logs / sum(weights))


def _product_features(shape: Sequence[float]) -> tuple[float, ...]:
    return tuple(math.log2(max(size, 1)) for size in shape)


def _convolution_features(shape: Sequence[float]) -> tuple[float, ...]:
    """Returns log sizes; channels before and depthwise groups matter the most, since they choose the algorithm."""
    n, before, h, w, after, kernel_h, kernel_w, stride, groups = (*shape, *[1.0] * 9)[:9]
    side, work = (h * w) ** 0.5, n * h * w / stride**2
    sizes = (1.5 * math.log2(before), 0.7 * math.log2(after), 0.5 * math.log2(side), 0.5 * math.log2(work))
    return (*sizes, 1.0 * math.log2(kernel_h * kernel_w), 1.0 * math.log2(stride), 3.0 * (groups > 1))


def _recurrent_features(shape: Sequence[float]) -> tuple[float, ...]:
    """Returns log sizes of rows, inputs and hidden units: steps follow each other at the same rate."""
    _, rows, inputs, hidden = (*shape, 1.0, 1.0, 1.0, 1.0)[:4]
    return (math.log2(rows), 0.5 * math.log2(inputs), math.log2(hidden))


_FEATURES: Mapping[Kind, _Features] = {
    **dict.fromkeys(_PRODUCT_PROBES, _product_features),
    "convolution": _convolution_features,
    "recurrent": _recurrent_features,
}


def _traffic_seconds(operator: OperatorCost, traffic: Mapping[str, Points]) -> float:
    name = operator.name if operator.name in traffic else _substitute(operator, traffic)
    return _interpolated_seconds(float(operator.bytes), traffic[name]) if name else 0.0


def _substitute(operator: OperatorCost, traffic: Mapping[str, Points]) -> str:
    in_place = operator.name.removesuffix("_")
    wanted = (in_place, f"{operator.name}_", _SUBSTITUTE.get(operator.kind, "aten.mul"), "aten.mul")
    return next((name for name in wanted if name in traffic), "")


def _interpolated_seconds(size: float, points: Points) -> float:
    """Returns seconds by bytes, interpolated between probes in logarithms, and proportional beyond the largest."""
    sizes = [sizes[0] for sizes, _ in points]
    if size <= sizes[0]:
        return points[0][1]
    for (low, first), (high, second) in pairwise(points):
        if size <= high[0]:
            position = math.log(size / low[0]) / math.log(high[0] / low[0]) if high[0] > low[0] else 0.0
            return math.exp((1 - position) * math.log(first) + position * math.log(second))
    return points[-1][1] * (size / sizes[-1]) ** _LAST_SLOPE
