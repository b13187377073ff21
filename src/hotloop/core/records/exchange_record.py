"""The record of a script that ran with exchanges: frozen, versioned, readable without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hotloop.core.records.training import Record


class SpeedRatio(Record):
    """A ratio of times: original over exchange, with its 99 % interval.

    Attributes:
        median: over the pairs; above 1 if the exchange is faster.
        low, high: ends of the interval; None with fewer than 8 pairs.
        pairs: number of compared pairs.
    """

    median: float
    low: float | None = None
    high: float | None = None
    pairs: int


class ExchangedPart(Record):
    """A part of the script that hotloop could exchange.

    Attributes:
        kind: `optimizer` or `data loader`.
        name: the part in the script's words, such as `TensorDataset, 4,096 samples`.
        exchange: the form that was tried last, such as `fused`.
        used: whether the exchange was in use at the script's end.
        proof: `bitwise` or `fp32-equivalent`; empty without a proof.
        proven: number of calls at which original and exchange were compared.
        ratio: time of the original over time of the exchange, for this part alone; None without a race.
        reason: why the exchange is not used; empty if it is.
    """

    kind: Literal["optimizer", "data loader"]
    name: str
    exchange: str
    used: bool
    proof: str = ""
    proven: int = 0
    ratio: SpeedRatio | None = None
    reason: str = ""


class ScriptRun(Record):
    """A script's run with exchanges.

    Attributes:
        source: the script's file, or its module.
        exit_code: of the script's process; negative for a signal.
        seconds: from start to end.
        steps: updates of the optimizer that ends a step.
        exact: whether only bitwise exchanges were allowed.
        dry_run: whether the exchanges were only tried.
        parts: the parts that hotloop could exchange.
        ratio: step time without the exchanges over step time with them; None if too few steps were compared.
        notes: what else the user must know.
    """

    version: int = 1
    source: str
    exit_code: int
    seconds: float
    steps: int = 0
    exact: bool = False
    dry_run: bool = False
    parts: list[ExchangedPart] = Field(default_factory=list)
    ratio: SpeedRatio | None = None
    notes: list[str] = Field(default_factory=list)
