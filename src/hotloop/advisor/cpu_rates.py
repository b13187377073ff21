"""Seconds of a step on a CPU whose rates were measured: operators by interpolation, and the host's work around them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hotloop.core.records.step_costs import CpuRates, Kind, OperatorCost, Points, StepCosts

INTERVAL = (0.70, 1.40)
"""Of the prediction: 90 % of steps; measured on small and large networks of one CPU."""

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

_PRODUCTS: dict[Kind, tuple[str, str]] = {
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
        if one.kind in _PRODUCTS and one.flops:
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
    products = [one for one in costs.operators if one.kind in _PRODUCTS]
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
    forward, backward = _PRODUCTS[operator.kind]
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
    **dict.fromkeys(_PRODUCTS, _product_features),
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
