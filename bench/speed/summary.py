"""Rows of the journal -> figures of each workload and over all: plain values, for the table, the picture and the record."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.speed.journal import Row
from bench.speed.lanes import OURS, TUTORIAL, library
from bench.speed.ratios import Mean, geometric_mean, ratio
from bench.speed.turns import step_times
from bench.speed.workloads import WORKLOADS
from hotloop.tuning.races.statistics import Ratio

RUN_S = 120.0
"""A run is compared that takes the tutorial's loop so long."""

_LOSS_OFF = 1.25
_LOSS_MORE = 0.1
"""A loss above so many times the tutorial's, and so much, is another result where dropout or the number of steps differs."""

_SAME_OFF, _SAME_MORE = 0.05, 0.02
"""After the same steps from the same weights, a loss that differs by more than this share and this number is another result."""


@dataclass(frozen=True)
class Line:
    """One peer on one workload.

    Attributes:
        step_ms: the anchor's median over its windows, and of everybody else what that makes by the ratio of windows that lie
            side by side: medians of windows at other times would say something else than `ratio`.
        ratio: its time over hotloop's, above 1 hotloop is faster; None for hotloop itself.
        startup_s: median over the sessions, by what was in the peer's cache, see `caching.py`; else under "".
        run_s: start-up and as many steps as the tutorial's loop does in `RUN_S`, reckoned from both, alike.
        steps: that its network was trained in all when it was judged.
        peak_mb: the most memory, by what was in the peer's cache as it started; of a cold one until its first step.
        train_loss, test_accuracy: at the end of the last session.
        other_result: whether its loss isn't that of the tutorial's loop: from the same weights, and on the same batches.
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
    steps: int = 0
    peak_mb: dict[str, float] = field(default_factory=dict)
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

    def of_limit(self, workload: str, name: str = "", least: str = "least_ms") -> float | None:
        """The share that a lane, hotloop where none is named, reaches of what the machine's measured roofline allows."""
        limit, line = self.limits.get(workload, {}), self.line(workload, name or self.ours)
        if not limit.get(least) or line is None or not line.step_ms:
            return None
        return float(limit[least] / line.step_ms)

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
    for peer in dict.fromkeys(map(library, names)):
        ways = [name for name in names if library(name) == peer]
        fastest = {w: one for w in found.lines if (one := _fastest(found, w, ways)) is not None}
        small, large = ([fastest[w] for w in fastest if WORKLOADS[w].grey is grey] for grey in (True, False))
        label = ways[0] if len(ways) == 1 else f"{peer} (the faster of {', '.join(ways)})"
        found.means[label] = geometric_mean(small), geometric_mean(large)
    return found


def _fastest(found: Summary, workload: str, ways: Sequence[str]) -> Ratio | None:
    """Of one peer, the way that took the least time there."""
    lines = [found.line(workload, name) for name in ways]
    ratios = [line.ratio for line in lines if line is not None and line.ratio is not None]
    return min(ratios, key=lambda one: one.median, default=None)


def _lines(workload: str, rows: Sequence[Row], missing: Mapping[tuple[str, str], str], ours: str) -> list[Line]:
    names = list(dict.fromkeys(name for row in rows for name in row["lanes"]))
    step_ms = _anchored(rows, names, ours)
    tutorial = _raw(rows, TUTORIAL, step_ms)
    lines = [_line(name, rows, step_ms, tutorial, ours) for name in names]
    out = {name: why for (where, name), why in missing.items() if where == workload and name not in names}
    return lines + [Line(name, missing=why) for name, why in out.items()]


def _anchored(rows: Sequence[Row], names: Sequence[str], ours: str) -> dict[str, float]:
    """Milliseconds of a step of each that was measured; see `Line`. The anchor is the tutorial's loop, or else hotloop."""
    own = {name: times for name in names if (times := _times(rows, name))}
    step_ms = {name: 1e3 * statistics.median(times) for name, times in own.items()}
    if ours in own and (found := ratio(rows, TUTORIAL, ours)):
        step_ms[ours] = step_ms[TUTORIAL] / found.median
    beside = ours if ours in own else TUTORIAL
    for name in own.keys() - {TUTORIAL, beside}:
        if found := ratio(rows, name, beside):
            step_ms[name] = step_ms[beside] * found.median
    return step_ms


def _times(rows: Sequence[Row], name: str) -> list[float]:
    return [seconds for row in rows if name in row["lanes"] for seconds in step_times(row["lanes"][name])]


def _raw(rows: Sequence[Row], name: str, step_ms: Mapping[str, float]) -> Line | None:
    marked = [row["lanes"][name] for row in rows if name in row["lanes"]]
    if name not in step_ms:
        return None
    measured = [one for one in marked if one["windows"]]
    # The last whose network was judged: one that failed before says nothing of the result.
    last = next((one for one in reversed(measured) if one["train_loss"] is not None), measured[-1])
    return Line(
        name,
        step_ms=step_ms[name],
        startup_s=_startups(marked),
        steps=last["steps"],
        peak_mb=_peaks_mb(marked),
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


def _peaks_mb(marked: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What a search takes is among them, since its process ends before the measured one begins."""
    held = [(one.get("cache") or "", one["peak_bytes"]) for one in marked if one["peak_bytes"]]
    starts = [start for one in marked if (start := one.get("first_start"))]
    held += [(start["cache"], start["peak_bytes"]) for start in starts if start.get("peak_bytes")]
    return {cache: max(peak for which, peak in held if which == cache) / 1e6 for cache in sorted(dict(held))}


def _is_other_loss(loss: float, tutorial: float, same_steps: bool) -> bool:
    if same_steps:
        return abs(loss - tutorial) > _SAME_OFF * tutorial + _SAME_MORE
    return loss > _LOSS_OFF * tutorial + _LOSS_MORE


def _line(name: str, rows: Sequence[Row], step_ms: Mapping[str, float], tutorial: Line | None, ours: str) -> Line:
    raw = _raw(rows, name, step_ms)
    if raw is None:
        failures = [row["lanes"][name]["failure"] for row in rows if name in row["lanes"]]
        return Line(name, missing=next(filter(None, failures), "no window was measured"))
    more: dict[str, Any] = {}
    if tutorial is not None and tutorial.step_ms:
        assert raw.step_ms is not None
        steps_s = RUN_S * raw.step_ms / tutorial.step_ms
        more["run_s"] = {cache: startup_s + steps_s for cache, startup_s in raw.startup_s.items()}
        if raw.train_loss is not None and tutorial.train_loss is not None:
            same_steps = raw.steps == tutorial.steps and not WORKLOADS[rows[0]["workload"]].drops
            more["other_result"] = _is_other_loss(raw.train_loss, tutorial.train_loss, same_steps)
    if name != ours:
        more["ratio"] = ratio(rows, name, ours)
    return Line(**{**vars(raw), **more})
