"""Formats numbers with three digits and a fitting unit, and parses durations."""

from __future__ import annotations

import math
import re

from hotloop.errors import PlanError, shorten

_FLOPS = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"), (1.0, "FLOP"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_MILLISECONDS = ((1000.0, "s"), (1.0, "ms"), (0.001, "us"))
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def format_flops(count: float | None) -> str:
    """Returns a text such as `1.23 GFLOP`; empty for None."""
    return "" if count is None else _scale(count, _FLOPS)


def format_bytes(count: float | None) -> str:
    """Returns a text such as `12.3 MB`; empty for None."""
    return "" if count is None else _scale(count, _BYTES)


def format_time(ms: float | None) -> str:
    """Returns a text such as `1.23 ms` or `45 us`; empty for None."""
    return "" if ms is None else _scale(ms, _MILLISECONDS)


def format_milliseconds(value: float) -> str:
    """Returns a text such as `1,230 ms` or `0.123 ms`, for tables whose times have one unit."""
    return f"{format_digits(value)} ms"


def format_digits(value: float) -> str:
    """Returns three significant digits, or all digits of the integer part."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def format_figure(value: float) -> str:
    """Returns a figure of a training with four decimals, or with four digits where decimals would hide or pad them."""
    return f"{value:.4f}" if value == 0 or 0.01 <= abs(value) < 100 else f"{value:.4g}"


def format_percent(share: float | None) -> str:
    """Returns a text such as `12 %`, or `0.4 %` for small shares; empty for None."""
    if share is None:
        return ""
    if 0 < share < 0.001:
        return "< 0.1 %"
    return f"{100 * share:.1f} %" if share < 0.0995 else f"{100 * share:.0f} %"


def format_shape(sizes: list[int]) -> str:
    """Returns a text such as `128x10`; `()` for a scalar."""
    return "x".join(map(str, sizes)) or "()"


def _scale(value: float, scales: tuple[tuple[float, str], ...]) -> str:
    if not value:
        return "0"
    factor, unit = next((scale for scale in scales if abs(value) >= scale[0]), scales[-1])
    return f"{format_digits(value / factor)} {unit}"


def parse_seconds(text: str, name: str) -> float:
    """Returns the seconds of `90s`, `5m`, `11h`, `1.5h`, `1h30m` or a plain number.

    Raises:
        PlanError: the text has another form, or is no time above zero.
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
    raise PlanError(f"{name}={shorten(text)}", expected="a time above zero, such as 90s, 5m, 11h or 1h30m")


def is_number(text: str) -> bool:
    """Whether a text spells a number, also an infinite one or NaN."""
    try:
        float(text)
    except ValueError:
        return False
    return True
