"""Words for times, ratios and names in sentences."""

from __future__ import annotations


def with_article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEFHLMNRSX' or name[:1] == '8' else 'a'} {name}"


def times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}"


def duration(seconds: float) -> str:
    """Returns `45 s`, `12 min`, `3.4 h` or `2.1 days`."""
    for limit, unit, size in ((100, "s", 1), (6000, "min", 60), (48 * 3600, "h", 3600)):
        if seconds < limit:
            value = seconds / size
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"
    return f"{seconds / 86400:,.1f} days"
