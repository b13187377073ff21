"""Ratios that a profile measured in turn: what compiling a network won, and what watching costs. Frozen records."""

from __future__ import annotations

from hotloop.records import Record


class CompiledNetwork(Record):
    """What a race of the compiled network against the network as it is found, forward and backward.

    Attributes:
        ratio: median of the time as it is over the time compiled; above 1 is faster. `low` and `high` are the ends of its
            99 % interval.
        pairs: of windows.
        compile_s: that compiling took.
        network: its class.
        failure: why nothing was measured; then the figures are None.
    """

    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    pairs: int = 0
    compile_s: float | None = None
    network: str = ""
    failure: str | None = None

    @property
    def is_faster(self) -> bool:
        """Whether the whole interval says so."""
        return self.low is not None and self.low > 1


class Overhead(Record):
    """What watching costs: an instrumented step over a clean one, in turn in one run; ends of a 95 % interval."""

    ratio: float
    low: float
    high: float
    instrumented: int
    clean: int
