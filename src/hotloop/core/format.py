"""Numbers as people read them: three digits and a unit that fits."""

from __future__ import annotations

import math
import re

from hotloop.errors import PlanError, shortened

_FLOPS = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"), (1.0, "FLOP"))

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))

_MILLISECONDS = ((1000.0, "s"), (1.0, "ms"), (0.001, "us"))


def flops(count: float | None) -> str:
    """Such as `1.23 GFLOP`; empty if unknown."""
    return "" if count is None else _scaled(count, _FLOPS)


def size(count: float | None) -> str:
    """Such as `12.3 MB`; empty if unknown."""
    return "" if count is None else _scaled(count, _BYTES)


def time(ms: float | None) -> str:
    """Such as `1.23 ms` or `45 us`; empty if unknown."""
    return "" if ms is None else _scaled(ms, _MILLISECONDS)


def milliseconds(value: float) -> str:
    """Such as `1,230 ms` or `0.123 ms`: times that stand beside each other in one unit."""
    return f"{digits(value)} ms"


def digits(value: float) -> str:
    """Three digits, or those of a whole number."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(share: float | None) -> str:
    """Such as `12 %`, or `0.4 %` for little; empty if unknown."""
    if share is None:
        return ""
    if 0 < share < 0.001:
        return "< 0.1 %"
    return f"{100 * share:.1f} %" if share < 0.0995 else f"{100 * share:.0f} %"


def shape(sizes: list[int]) -> str:
    """Such as `128x10`; `()` for a single number."""
    return "x".join(map(str, sizes)) or "()"


def _scaled(value: float, scales: tuple[tuple[float, str], ...]) -> str:
    if not value:
        return "0"
    factor, unit = next((scale for scale in scales if abs(value) >= scale[0]), scales[-1])
    return f"{digits(value / factor)} {unit}"


def seconds(text: str, name: str) -> float:
    """`90s`, `5m`, `11h`, `1.5h`, `1h30m` or a plain number of seconds.

    Raises:
        PlanError: the text is none of these.
    """
    parts = re.findall(r"([\d.]+)([smhd])", text)
    try:
        if parts and "".join(number + unit for number, unit in parts) == text:
            value = sum(float(number) * _UNITS[unit] for number, unit in parts)
        else:
            value = float(text)
        if 0 < value < math.inf:
            return value
    except ValueError:
        pass
    raise PlanError(f"{name}={shortened(text)}", expected="a time above zero, such as 90s, 5m, 11h or 1h30m")


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
