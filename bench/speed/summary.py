"""Rows of the journal -> figures of each workload and over all: plain values, for the table, the picture and the record."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.speed.journal import Row
from bench.speed.lanes import OURS, TUTORIAL
from bench.speed.ratios import Mean, geometric_mean, paired, ratio
from bench.speed.turns import step_times
from bench.speed.workloads import WORKLOADS
from hotloop.measuring.statistics import Ratio

RUN_S = 120.0
"""A run is compared that takes the tutorial's loop so long."""

_LOSS_OFF = 1.25
_LOSS_MORE = 0.1


@dataclass(frozen=True)
class Line:
    """One peer on one workload.

    Attributes:
        step_ms: median over all windows.
        ratio: its time over hotloop's, above 1 hotloop is faster; None for hotloop itself.
        startup_s: median over the sessions, by what was in the peer's cache, see `caching.py`; else under "".
        run_s: start-up and as many steps as the tutorial's loop does in `RUN_S`, reckoned from both, alike.
        peak_mb: the most memory.
        train_loss, test_accuracy: at the end of the last session.
        other_result: whether its loss is far above that of the tutorial's loop.
        plan: what hotloop ran.
        missing: why there are no figures.
        failed: what went wrong after those that there are.
        unsearched: why it runs what needs no search.
    """

    name: str
    step_ms: float | None = None
    ratio: Ratio | None = None
    startup_s: dict[str, float] = field(default_factory=dict)
    run_s: dict[str, float] = field(default_factory=dict)
    peak_mb: float | None = None
    train_loss: float | None = None
    test_accuracy: float | None = None
    other_result: bool = False
    plan: str | None = None
    missing: str = ""
    failed: tuple[str, ...] = ()
    unsearched: str = ""


@dataclass(frozen=True)
class Summary:
    """All that was found.

    Attributes:
        lines: by workload, in order.
        limits: by workload: the roofline's, see `limits.py`.
        means: peer -> geometric means over the small workloads (W1 to W5) and the others; None where there are none.
        ours: name of the lane that the others are compared with.
    """

    lines: dict[str, list[Line]]
    limits: dict[str, Any]
    means: dict[str, tuple[Mean | None, Mean | None]] = field(default_factory=dict)
    ours: str = OURS

    def line(self, workload: str, name: str) -> Line | None:
        return next((line for line in self.lines.get(workload, []) if line.name == name), None)

    def best_peer(self, workload: str) -> Line | None:
        """The fastest of the others, by its step."""
        others = [line for line in self.lines[workload] if line.step_ms and not line.name.startswith(OURS)]
        return min(others, key=lambda line: line.step_ms or 0.0, default=None)


def summary(
    rows: Sequence[Row], limits: Mapping[str, Any], missing: Mapping[tuple[str, str], str], ours: str
) -> Summary:
    """Rows of sessions -> figures.

    Args:
        limits: by workload.
        missing: (workload, peer) -> why it wasn't run at all.
    """
    found = Summary({}, dict(limits), ours=ours)
    for workload in WORKLOADS:
        own = [row for row in rows if row["workload"] == workload]
        if own:
            found.lines[workload] = _lines(workload, own, missing, ours)
    names = dict.fromkeys(line.name for lines in found.lines.values() for line in lines if line.name != ours)
    for name in names:
        pairs = {w: paired([row for row in rows if row["workload"] == w], name, ours) for w in found.lines}
        small, large = ([pairs[w] for w in found.lines if WORKLOADS[w].grey is grey] for grey in (True, False))
        found.means[name] = geometric_mean(small), geometric_mean(large)
    return found


def _lines(workload: str, rows: Sequence[Row], missing: Mapping[tuple[str, str], str], ours: str) -> list[Line]:
    names = list(dict.fromkeys(name for row in rows for name in row["lanes"]))
    tutorial = _raw(rows, TUTORIAL)
    lines = [_line(name, rows, tutorial, ours) for name in names]
    out = {name: why for (where, name), why in missing.items() if where == workload and name not in names}
    return lines + [Line(name, missing=why) for name, why in out.items()]


def _raw(rows: Sequence[Row], name: str) -> Line | None:
    marked = [row["lanes"][name] for row in rows if name in row["lanes"]]
    times = [seconds for one in marked for seconds in step_times(one)]
    if not times:
        return None
    measured = [one for one in marked if one["windows"]]
    # The last whose network was judged: one that failed before says nothing of the result.
    last = next((one for one in reversed(measured) if one["train_loss"] is not None), measured[-1])
    return Line(
        name,
        step_ms=1e3 * statistics.median(times),
        startup_s=_startups(marked),
        peak_mb=max((one["peak_bytes"] or 0) for one in marked) / 1e6 or None,
        train_loss=last["train_loss"],
        test_accuracy=last["test_accuracy"],
        plan=last["plan"],
        failed=tuple(dict.fromkeys(one["failure"] for one in marked if one["failure"])),
        unsearched=last.get("unsearched") or "",
    )


def _startups(marked: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Those that searched or compiled beforehand are among them, each once."""
    begun = [(one.get("cache") or "", one["startup_s"]) for one in marked if one["startup_s"]]
    first = {(start["cache"], start["seconds"]) for one in marked if (start := one.get("first_start"))}
    begun += sorted(first)
    return {cache: statistics.median(s for which, s in begun if which == cache) for cache in sorted(dict(begun))}


def _line(name: str, rows: Sequence[Row], tutorial: Line | None, ours: str) -> Line:
    raw = _raw(rows, name)
    if raw is None:
        failures = [row["lanes"][name]["failure"] for row in rows if name in row["lanes"]]
        return Line(name, missing=next(filter(None, failures), "no window was measured"))
    more: dict[str, Any] = {}
    if tutorial is not None and tutorial.step_ms:
        assert raw.step_ms is not None
        steps_s = RUN_S * raw.step_ms / tutorial.step_ms
        more["run_s"] = {cache: startup_s + steps_s for cache, startup_s in raw.startup_s.items()}
        if raw.train_loss is not None and tutorial.train_loss is not None:
            more["other_result"] = raw.train_loss > _LOSS_OFF * tutorial.train_loss + _LOSS_MORE
    if name != ours:
        more["ratio"] = ratio(rows, name, ours)
    return Line(**{**vars(raw), **more})
