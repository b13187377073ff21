"""Frozen records of ratios that a profile measured alternately: compiled over eager, and instrumented over clean."""

from __future__ import annotations

from hotloop.core.records.training import Record


class CompiledNetwork(Record):
    """The result of a race between the compiled and the eager network, forward and backward.

    Attributes:
        ratio: the median of the eager time over the compiled time; above 1, the compiled network is faster.
        low, high: the ends of the ratio's 99 % interval.
        pairs: the number of pairs of windows.
        compile_s: the duration of compiling in seconds.
        network: the network's class.
        failure: why the race has no result; then the figures are None.
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
        """Whether the whole interval is above 1."""
        return self.low is not None and self.low > 1


class Overhead(Record):
    """The cost of instrumentation, measured in one run with alternating steps.

    Attributes:
        ratio: the time of an instrumented step over the time of a clean step.
        low, high: the ends of the ratio's 95 % interval.
        instrumented, clean: the numbers of steps.
    """

    ratio: float
    low: float
    high: float
    instrumented: int
    clean: int
