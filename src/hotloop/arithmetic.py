"""In which number format products are computed: from torch's switches and the dtypes of operators. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Switches = Mapping[str, str]
"""torch's `fp32_precision` by name, such as `cudnn.conv`: `ieee`, `tf32` or `bf16`."""

OPERATORS = {"matmul": "matrix products", "conv": "convolutions", "rnn": "recurrent layers"}
"""Classes of operators that have a switch, and their names in sentences. Attention follows the switch of products."""

FORMATS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8")
"""From the most bits to the fewest."""

REDUCED = ("tf32", "bf16", "fp16")
"""Values of the plan's axis `precision` that ask for fewer bits than fp32."""

SWITCH_OF = {
    "cuda": {"matmul": "cuda.matmul", "conv": "cudnn.conv", "rnn": "cudnn.rnn"},
    "cpu": {"matmul": "mkldnn.matmul", "conv": "mkldnn.conv", "rnn": "mkldnn.rnn"},
}
"""The switch of each class of operators, by kind of device; other kinds have none, and compute in fp32."""

IEEE = {name: "ieee" for names in SWITCH_OF.values() for name in names.values()}
TORCH_DEFAULTS = IEEE | {"cudnn.conv": "tf32", "cudnn.rnn": "tf32"}

_FORMAT_OF = {"float64": "fp64", "complex128": "fp64", "float16": "fp16", "complex32": "fp16", "bfloat16": "bf16"}
_FORMAT_OF_SWITCH = {"ieee": "fp32", "tf32": "tf32", "bf16": "bf16"}

_NAMES = {
    "conv": re.compile(r"(?:^|_)conv(?:olution|\d|_|$)"),
    "rnn": re.compile(r"(?:cudnn|mkldnn|miopen)_rnn"),
    "matmul": re.compile(r"(?:^|_)(?:mm|addmm|bmm|baddbmm|addbmm|mv|addmv|dot|vdot|matmul|linear|attention)(?:_|$)"),
}


def operator_of(name: str) -> str | None:
    """The class of an operator of torch's, such as `conv` for `convolution_backward`; None for one without products."""
    return next((operator for operator, pattern in _NAMES.items() if pattern.search(name)), None)


def format_of(operator: str, dtype: str, device: str, switches: Switches) -> str | None:
    """In which format such an operator computes products; None for whole numbers.

    Args:
        operator: its class, see `OPERATORS`.
        dtype: of its operands, such as `float32`; the one of the fewest bits.
        device: its kind, such as `cuda`.
    """
    if dtype in ("float32", "complex64"):
        return _FORMAT_OF_SWITCH[switches.get(SWITCH_OF.get(device, {}).get(operator, ""), "ieee")]
    return "fp8" if dtype.startswith("float8") else _FORMAT_OF.get(dtype)


def reduced_by(switches: Switches, device: str) -> dict[str, str]:
    """The format of each class of operators that computes products of float32 in fewer bits on such a kind of device."""
    formats = {operator: format_of(operator, "float32", device, switches) for operator in OPERATORS}
    return {operator: each for operator, each in formats.items() if each and _finer("fp32", each)}


@dataclass(frozen=True)
class Arithmetic:
    """What was seen of a step's products.

    Attributes:
        counts: how many there are of a class of operators and a format.
        pieces: that the batch is cut into.
    """

    counts: Mapping[tuple[str, str], int]
    pieces: int = 1

    @property
    def lowest(self) -> dict[str, str]:
        """The format of the fewest bits in which each class of operators computes."""
        found = {operator: self._formats(operator) for operator in OPERATORS}
        return {operator: max(formats, key=FORMATS.index) for operator, formats in found.items() if formats}

    def _formats(self, operator: str) -> list[str]:
        return [each for one, each in self.counts if one == operator]

    def halves(self) -> dict[str, float]:
        """How many products a whole batch takes at each dtype of 16 bits or fewer, those of still fewer bits included."""
        return {
            limit: sum(count for (_, each), count in self.counts.items() if not _finer(each, limit)) / self.pieces
            for limit in FORMATS
            if _finer("tf32", limit)
        }


def coarsest(formats: Mapping[str, str]) -> str:
    """Of the formats of several classes of operators the one of the fewest bits; fp32 where there are none."""
    return max(formats.values(), key=FORMATS.index, default="fp32")


def _finer(one: str, other: str) -> bool:
    return FORMATS.index(one) < FORMATS.index(other)


def reductions(plan: Arithmetic, baseline: Arithmetic) -> list[str]:
    """What a plan computes in fewer bits than the baseline, one line for each class of operators; empty if nothing.

    A class of operators that the baseline doesn't have, as where a convolution became a matrix product, is compared with
    the fewest bits of all its products.
    """
    mine, theirs = plan.lowest, baseline.lowest
    found = [
        f"{OPERATORS[operator]} run in {own}, the baseline's in {beside}"
        for operator, own in mine.items()
        if _finer(beside := theirs.get(operator, coarsest(theirs)), own)
    ]
    return found or list(_more_of_them(plan, baseline))


def _more_of_them(plan: Arithmetic, baseline: Arithmetic) -> Iterator[str]:
    """Where the baseline mixes dtypes, as by an autocast of the Task's own."""
    mine, theirs = plan.halves(), baseline.halves()
    for limit, count in reversed(mine.items()):
        if count > theirs[limit] and any(_finer(each, limit) for _, each in baseline.counts):
            yield f"{count:g} products of a step run in {limit}, {theirs[limit]:g} of the baseline's"
            return


def written(switches: Switches) -> str:
    """The switches that aren't as torch begins, in one text; empty where all are."""
    return ", ".join(f"{name}={kind}" for name, kind in sorted(switches.items()) if kind != TORCH_DEFAULTS[name])


def own_settings(switches: Switches, device: str) -> str:
    """The line on switches that the user's process has reduced, on a kind of device; empty where all are torch's defaults."""
    changed = [
        f"{OPERATORS[operator]} in {switches[name]}"
        for operator, name in SWITCH_OF.get(device, {}).items()
        if switches[name] not in ("ieee", TORCH_DEFAULTS[name])
    ]
    if not changed:
        return ""
    return f"torch's settings allow {' and '.join(changed)}, which precision=default follows; precision=fp32 computes in fp32"


def other_settings(then: Switches, now: Switches, device: str) -> str:
    """The line on a run that goes on in a process with other settings; empty where those of the device are the same."""
    names = SWITCH_OF.get(device, {}).items()
    other = [
        f"{OPERATORS[operator]} in {_words(then[name])} then, {_words(now[name])} now"
        for operator, name in names
        if then.get(name, now[name]) != now[name]
    ]
    return f"torch's settings: {', '.join(other)}: the run goes on with those that it began with" if other else ""


def _words(switch: str) -> str:
    return _FORMAT_OF_SWITCH[switch]
