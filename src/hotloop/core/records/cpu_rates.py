"""Measured seconds of operators on one CPU by their sizes, and of the host's work around them; without torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from hotloop.errors import HotloopError

Points = tuple[tuple[tuple[float, ...], float], ...]


@dataclass(frozen=True)
class CpuRates:
    """What small probes take on a CPU.

    Attributes:
        products: by operator and phase, such as `aten.mm/backward`: ((shape as in `OperatorCost`), FLOP/s) a probe.
        traffic: by operator, such as `aten.relu`: ((bytes read and written), seconds) a probe.
        overhead_s: seconds of the host: `view`, a view in the forward pass; `node`, in the backward pass; `module`, a
            module's call; `parameter`, of an update, beside its operators; `optimizer`, an update beside its parameters;
            `engine`, a backward pass beside its nodes.
        fault_s: seconds per byte of new memory, which the system zeroes.
        cold_s: seconds per byte that a tensor takes longer to read and write from main memory than from a cache.
        cache_bytes: of the last-level cache.
        threads: of one operation.
    """

    products: dict[str, Points]
    traffic: dict[str, Points]
    overhead_s: dict[str, float]
    fault_s: float
    cold_s: float
    cache_bytes: int
    threads: int = 1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Reads the result of `to_dict`, also after JSON; raises HotloopError for the first wrong field."""
        from pydantic import TypeAdapter, ValidationError  # slow to import

        try:
            return TypeAdapter(cls).validate_python(data)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the record"
            raise HotloopError(f"{where} of a CPU's rates: {first['msg']}", expected="a record of to_dict()") from None
