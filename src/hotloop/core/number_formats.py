"""Number formats of products, computed from torch's switches and the operators' dtypes. This file doesn't import torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Float32Switches = Mapping[str, str]
"""Each switch's name, such as `cudnn.conv`, and its value of torch's `fp32_precision`: `ieee`, `tf32` or `bf16`."""

OPERATORS = {"matmul": "matrix products", "conv": "convolutions", "rnn": "recurrent layers"}
"""Classes of operators that have a switch, and their names in messages. Attention uses the switch of matrix products."""

FORMATS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8")
"""Number formats, ordered from the most bits to the fewest."""

REDUCED = ("tf32", "bf16", "fp16")
"""Values of the plan's axis `precision` that ask for fewer bits than fp32."""

SWITCH_OF = {
    "cuda": {"matmul": "cuda.matmul", "conv": "cudnn.conv", "rnn": "cudnn.rnn"},
    "cpu": {"matmul": "mkldnn.matmul", "conv": "mkldnn.conv", "rnn": "mkldnn.rnn"},
}
"""The switch of each class of operators, by kind of device. Other kinds of device have no switch and compute in fp32."""

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
    """Returns the class of a torch operator, such as `conv` for `convolution_backward`; None if it computes no products."""
    return next((operator for operator, pattern in _NAMES.items() if pattern.search(name)), None)


def product_format(operator: str, dtype: str, device: str, switches: Float32Switches) -> str | None:
    """Returns the number format in which an operator computes products; None for integers.

    Args:
        operator: the operator's class, a key of `OPERATORS`.
        dtype: the operands' dtype with the fewest bits, such as `float32`.
        device: the kind of device, such as `cuda`.
    """
    if dtype in ("float32", "complex64"):
        return _FORMAT_OF_SWITCH[switches.get(SWITCH_OF.get(device, {}).get(operator, ""), "ieee")]
    return "fp8" if dtype.startswith("float8") else _FORMAT_OF.get(dtype)


def reduced_formats(switches: Float32Switches, device: str) -> dict[str, str]:
    """Returns the formats of the classes of operators that compute float32 products in fewer bits on this kind of device."""
    formats = {operator: product_format(operator, "float32", device, switches) for operator in OPERATORS}
    return {operator: each for operator, each in formats.items() if each and _has_more_bits("fp32", each)}


@dataclass(frozen=True)
class Arithmetic:
    """The observed products of one training step.

    Attributes:
        counts: the number of products by class of operators and format.
        pieces: the number of micro-batches that the batch is split into.
    """

    counts: Mapping[tuple[str, str], int]
    pieces: int = 1

    @property
    def lowest(self) -> dict[str, str]:
        """The format with the fewest bits that each class of operators uses."""
        found = {operator: self._formats(operator) for operator in OPERATORS}
        return {operator: max(formats, key=FORMATS.index) for operator, formats in found.items() if formats}

    def _formats(self, operator: str) -> list[str]:
        return [each for one, each in self.counts if one == operator]

    def halves(self) -> dict[str, float]:
        """Returns the number of products of a whole batch for each 16-bit or 8-bit format; each count includes lower formats."""
        return {
            limit: sum(count for (_, each), count in self.counts.items() if not _has_more_bits(each, limit))
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
    """Returns one line for each class of operators that the plan computes in fewer bits than the baseline.

    The baseline may lack a class of operators, because the plan replaced a convolution by a matrix product. Such a class
    is compared with the baseline's format of the fewest bits.
    """
    mine, theirs = plan.lowest, baseline.lowest
    found = [
        f"{OPERATORS[operator]} run in {own}, the baseline's in {beside}"
        for operator, own in mine.items()
        if _has_more_bits(beside := theirs.get(operator, lowest_format(theirs)), own)
    ]
    return found or list(_more_reduced_products(plan, baseline))


def _more_reduced_products(plan: Arithmetic, baseline: Arithmetic) -> Iterator[str]:
    """Yields a line if the baseline mixes dtypes, as with the Task's own autocast, and the plan has more reduced products."""
    mine, theirs = plan.halves(), baseline.halves()
    for limit, count in reversed(mine.items()):
        if count > theirs[limit] and any(_has_more_bits(each, limit) for _, each in baseline.counts):
            yield f"{count:g} products of a step run in {limit}, {theirs[limit]:g} of the baseline's"
            return


def describe_switches(switches: Float32Switches) -> str:
    """Returns the switches that differ from torch's defaults, as one text; empty if none differs."""
    return ", ".join(f"{name}={kind}" for name, kind in sorted(switches.items()) if kind != TORCH_DEFAULTS[name])


def own_settings(switches: Float32Switches, device: str) -> str:
    """Returns the line on switches that the user's process reduced for a kind of device; empty if all are torch's defaults."""
    changed = [
        f"{OPERATORS[operator]} in {switches[name]}"
        for operator, name in SWITCH_OF.get(device, {}).items()
        if switches[name] not in ("ieee", TORCH_DEFAULTS[name])
    ]
    if not changed:
        return ""
    return f"torch's settings allow {' and '.join(changed)}, which precision=default follows; precision=fp32 computes in fp32"


def other_settings(then: Float32Switches, now: Float32Switches, device: str) -> str:
    """Returns the line on a run that resumes in a process with other switches; empty if the device's switches are equal."""
    names = SWITCH_OF.get(device, {}).items()
    other = [
        f"{OPERATORS[operator]} in {_format_words(then[name])} then, {_format_words(now[name])} now"
        for operator, name in names
        if then.get(name, now[name]) != now[name]
    ]
    return f"torch's settings: {', '.join(other)}: the run goes on with those that it began with" if other else ""


def _format_words(switch: str) -> str:
    return _FORMAT_OF_SWITCH[switch]
