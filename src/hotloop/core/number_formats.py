"""Computes number formats of products from torch's switches and operators' dtypes, without torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Float32Switches = Mapping[str, str]
"""Values (`ieee`, `tf32`, `bf16`) of torch's `fp32_precision` by name, such as `cudnn.conv`."""

OPERATORS = {"matmul": "matrix products", "conv": "convolutions", "rnn": "recurrent layers"}
"""Operator classes with a switch, and their names in messages. Attention has the switch of matrix products."""

FORMATS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8")
"""Number formats from the most bits to the fewest."""

REDUCED = ("tf32", "bf16", "fp16")
"""Values of the plan axis `precision` with fewer bits than fp32."""

SWITCH_OF = {
    "cuda": {"matmul": "cuda.matmul", "conv": "cudnn.conv", "rnn": "cudnn.rnn"},
    "cpu": {"matmul": "mkldnn.matmul", "conv": "mkldnn.conv", "rnn": "mkldnn.rnn"},
}
"""The switch of each operator class, by kind of device. Other kinds of device have no switch and compute in fp32."""

IEEE = {name: "ieee" for names in SWITCH_OF.values() for name in names.values()}
TORCH_DEFAULTS = IEEE | {"cudnn.conv": "tf32", "cudnn.rnn": "tf32"}

_FORMAT_OF = {"float64": "fp64", "complex128": "fp64", "float16": "fp16", "complex32": "fp16", "bfloat16": "bf16"}
_FORMAT_OF_SWITCH = {"ieee": "fp32", "tf32": "tf32", "bf16": "bf16"}

_NAMES = {
    "conv": re.compile(r"(?:^|_)conv(?:olution|\d|_|$)"),
    "rnn": re.compile(r"(?:cudnn|mkldnn|miopen)_rnn"),
    "matmul": re.compile(r"(?:^|_)(?:mm|addmm|bmm|baddbmm|addbmm|mv|addmv|dot|vdot|matmul|linear|attention)(?:_|$)"),
}


def operator_class(name: str) -> str | None:
    """Returns an operator's class, such as `conv` for `convolution_backward`; None for operators without products."""
    return next((operator for operator, pattern in _NAMES.items() if pattern.search(name)), None)


def product_format(operator: str, dtype: str, device: str, switches: Float32Switches) -> str | None:
    """Returns the number format of an operator's products; None for integers.

    Args:
        operator: a key of `OPERATORS`.
        dtype: the operands' dtype with the fewest bits, such as `float32`.
        device: the kind of device, such as `cuda`.
    """
    if dtype in ("float32", "complex64"):
        return _FORMAT_OF_SWITCH[switches.get(SWITCH_OF.get(device, {}).get(operator, ""), "ieee")]
    return "fp8" if dtype.startswith("float8") else _FORMAT_OF.get(dtype)


def reduced_formats(switches: Float32Switches, device: str) -> dict[str, str]:
    """Returns the formats of operator classes that compute float32 products in fewer bits on this kind of device."""
    formats = {operator: product_format(operator, "float32", device, switches) for operator in OPERATORS}
    return {operator: name for operator, name in formats.items() if name and _has_more_bits("fp32", name)}


@dataclass(frozen=True)
class Arithmetic:
    """The observed products of one training step.

    Attributes:
        counts: number of products by (operator class, format).
        pieces: number of micro-batches of the batch.
    """

    counts: Mapping[tuple[str, str], int]
    pieces: int = 1

    @property
    def lowest(self) -> dict[str, str]:
        """The format with the fewest bits of each operator class."""
        return {
            operator: max((name for key, name in self.counts if key == operator), key=FORMATS.index)
            for operator in OPERATORS
            if any(key == operator for key, _ in self.counts)
        }

    def halves(self) -> dict[str, float]:
        """Returns the number of products of a whole batch per 16-bit and 8-bit format, lower formats included."""
        return {
            limit: sum(count for (_, name), count in self.counts.items() if not _has_more_bits(name, limit))
            / self.pieces
            for limit in FORMATS
            if _has_more_bits("tf32", limit)
        }


def lowest_format(formats: Mapping[str, str]) -> str:
    """Returns the format with the fewest bits; fp32 if `formats` is empty."""
    return max(formats.values(), key=FORMATS.index, default="fp32")


def _has_more_bits(one: str, other: str) -> bool:
    return FORMATS.index(one) < FORMATS.index(other)


def describe_reductions(plan: Arithmetic, baseline: Arithmetic) -> list[str]:
    """Returns one line for each operator class that the plan computes in fewer bits than the baseline.

    An operator class that the baseline doesn't use is compared with its class of the lowest precision.
    """
    formats = baseline.lowest
    lines = [
        f"{OPERATORS[operator]} run in {reduced}, the baseline's in {full}"
        for operator, reduced in plan.lowest.items()
        if _has_more_bits(full := formats.get(operator, lowest_format(formats)), reduced)
    ]
    return lines or list(_more_reduced_products(plan, baseline))


def _more_reduced_products(plan: Arithmetic, baseline: Arithmetic) -> Iterator[str]:
    """Yields a line if the baseline mixes dtypes (the Task's own autocast) and the plan has more reduced products."""
    baseline_counts = baseline.halves()
    for limit, count in reversed(plan.halves().items()):
        if count > baseline_counts[limit] and any(_has_more_bits(name, limit) for _, name in baseline.counts):
            yield f"{count:g} products of a step run in {limit}, {baseline_counts[limit]:g} of the baseline's"
            return


def describe_switches(switches: Float32Switches) -> str:
    """Returns the switches that differ from torch's defaults as one text; empty if none differs."""
    return ", ".join(f"{name}={kind}" for name, kind in sorted(switches.items()) if kind != TORCH_DEFAULTS[name])


def own_settings(switches: Float32Switches, device: str) -> str:
    """Returns a line on switches that the user's process reduced for this kind of device; empty without any."""
    changed = [
        f"{OPERATORS[operator]} in {switches[name]}"
        for operator, name in SWITCH_OF.get(device, {}).items()
        if switches[name] not in ("ieee", TORCH_DEFAULTS[name])
    ]
    if not changed:
        return ""
    return f"torch's settings allow {' and '.join(changed)}, which precision=default follows; precision=fp32 computes in fp32"


def other_settings(then: Float32Switches, now: Float32Switches, device: str) -> str:
    """Returns a line on a resumed run whose process has other switches; empty if the device's switches are equal."""
    other = [
        f"{OPERATORS[operator]} in {_FORMAT_OF_SWITCH[then[name]]} then, {_FORMAT_OF_SWITCH[now[name]]} now"
        for operator, name in SWITCH_OF.get(device, {}).items()
        if then.get(name, now[name]) != now[name]
    ]
    return f"torch's settings: {', '.join(other)}: the run continues with the settings of its start" if other else ""
