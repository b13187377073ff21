"""Ratios that a profile measures in alternation: compiled over eager, and instrumented over clean."""

from __future__ import annotations

from hotloop.core.records.training import Record


class CompiledNetwork(Record):
    """A race between the compiled and the eager network, forward and backward.

    Attributes:
        ratio: median of eager time over compiled time; above 1, the compiled network is faster.
        low, high: the ratio's 99 % interval.
        pairs: number of pairs of windows.
        compile_s: seconds of compilation.
        network: the network's class.
        failure: why there are no figures.
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
        return self.low is not None and self.low > 1


class Overhead(Record):
    """The cost of instrumentation, measured in a run with alternating steps.

    Attributes:
        ratio: time of an instrumented step over the time of a clean step.
        low, high: the ratio's 95 % interval.
        instrumented, clean: numbers of steps.
    """

    ratio: float
    low: float
    high: float
    instrumented: int
    clean: int
