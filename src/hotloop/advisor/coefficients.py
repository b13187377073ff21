"""Fitted factors between a chip's published rates and the rates that operators reach, with their spread.

`facts/coefficients.json` holds them; `python -m bench.foresight --fit` writes the file from measurements of others.
A chip without measurements takes the factor of its kind, which follows from published facts, with a wider spread.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Self

from hotloop.advisor.chips import FACTS, Chip

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
