"""A summary as Markdown: for the terminal, the record and the README."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any

from bench.speed.lanes import FEWER_BITS, OURS, TUTORIAL
from bench.speed.ratios import Mean
from bench.speed.summary import RUN_S, Line, Summary
from bench.speed.targets import Target
from bench.speed.workloads import WORKLOADS
from hotloop.core.format import format_digits, format_milliseconds
from hotloop.tuning.races.statistics import Ratio

_HEAD = (
    "peer",
    "step",
    "hotloop is times as fast (95 %)",
    "first step after",
    f"run of {RUN_S / 60:.0f} min",
    "peak memory",
    "train loss",
    "test accuracy",
)

_STEPS_OFF = 0.01
"""A share of the steps by which networks may differ in what they were trained before the table says so."""


def markdown(found: Summary) -> str:
    """A table for each workload, one over all, and what hotloop lost."""
    parts = [part for workload in found.lines for part in _workload(found, workload)]
    return "\n".join([*_caches(found), *parts, *_overall(found), *_lost(found)]) + "\n"


def _caches(found: Summary) -> Iterator[str]:
    if any(cache for lines in found.lines.values() for line in lines for cache in line.startup_s):
        yield (
            "A peer that keeps what it found and compiled started `cold` where its cache was empty, alone and before it was "
            "measured: to search, compile, race and prove takes that long. It started `warm` where that start had filled "
            "the cache, and `half-warm` where one was cut off.\n"
        )


def _workload(found: Summary, workload: str) -> Iterator[str]:
    yield f"## {workload}: {WORKLOADS[workload].title}\n"
    lines = [line for line in found.lines[workload] if not line.missing]
    lines.sort(key=lambda line: line.step_ms or 0.0)
    unequal = _unequal(lines)
    head = (*_HEAD, "after steps") if unequal else _HEAD
    yield from rows(head, [_cells(line) + [f"{line.steps:,}"] * unequal for line in lines])
    yield ""
    for line in found.lines[workload]:
        if line.missing:
            yield f"- not run: {line.name}: {line.missing}"
        for failure in line.failed:
            judged = "" if line.train_loss is not None else "; whether its result is that of the others isn't known"
            yield f"- **failed** meanwhile: {line.name}: {failure}{judged}"
        if line.unsearched:
            yield f"- {line.name} runs the plan of the rules, without a search: {line.unsearched}"
        if line.other_result:
            yield f"- **another result**: the loss of {line.name} isn't that of the tutorial's loop"
    yield from (f"- {line.name} ran `{line.plan}`" for line in lines if line.plan)
    if limit := _limit(found, workload):
        yield f"- {limit}"
    yield ""


def _unequal(lines: Sequence[Line]) -> bool:
    """Whether their losses aren't of the same number of steps."""
    steps = [line.steps for line in lines if line.train_loss is not None]
    return bool(steps) and max(steps) - min(steps) > _STEPS_OFF * max(steps)


def _cells(line: Line) -> list[str]:
    return [
        line.name,
        format_milliseconds(line.step_ms),
        ratio_text(line.ratio) if line.ratio else "1" if line.name.startswith(OURS) else "",
        _by_cache(line.startup_s, ".1f"),
        _by_cache(line.run_s, ".0f"),
        _by_cache(line.peak_mb, ".0f", "MB"),
        "" if line.train_loss is None else f"{line.train_loss:.3f}",
        "" if line.test_accuracy is None else f"{line.test_accuracy:.3f}",
    ]


def _by_cache(found: Mapping[str, float], digits: str, unit: str = "s") -> str:
    return ", ".join(f"{value:{digits}} {unit} {cache}".rstrip() for cache, value in found.items())


def _limit(found: Summary, workload: str) -> str:
    """How far the step is from the machine's measured roofline, and who came below it."""
    share = found.of_limit(workload)
    if share is None:
        return ""
    limit = found.limits[workload]
    below = [
        f"{one.name} in {format_milliseconds(one.step_ms)}"
        for one in found.lines[workload]
        if one.name != FEWER_BITS and (one.step_ms or inf) < limit["least_ms"]
    ]
    no_limit = f". It is no limit: faster were {', '.join(below)}" if below else ""
    return (
        f"the roofline measured on this machine allows {format_milliseconds(limit['least_ms'])} ({format_digits(limit['flops'] / 1e9)} GFLOP, "
        f"{format_digits(limit['bytes'] / 1e6)} MB): {found.ours} reaches {share:.0%} of it{no_limit}{_limit_of_fewer_bits(found, workload)}"
    )


def _limit_of_fewer_bits(found: Summary, workload: str) -> str:
    share = found.of_limit(workload, FEWER_BITS, "least_bf16_ms")
    if share is None:
        return ""
    return f"; in bf16 it allows {format_milliseconds(found.limits[workload]['least_bf16_ms'])}: {FEWER_BITS} reaches {share:.0%} of that"


def _overall(found: Summary) -> Iterator[str]:
    yield "## Over all\n"
    yield "Geometric means of how many times as fast hotloop is in the steady state, with 95 % intervals.\n"
    cells = [[name, mean_text(small), mean_text(large)] for name, (small, large) in found.means.items()]
    yield from rows(("peer", "W1 to W5", "W6 to W9"), cells)
    yield ""


def _lost(found: Summary) -> Iterator[str]:
    """Every figure in which another is ahead."""
    yield "## Where hotloop is behind\n"
    lost = [text for workload in found.lines for text in behind(found, workload)]
    yield from lost or ["Nowhere, in what was measured."]


def behind(found: Summary, workload: str) -> Iterator[str]:
    own = found.line(workload, found.ours)
    if own is None or own.step_ms is None:
        yield f"- {workload}: hotloop wasn't measured: {own.missing if own else 'it was not run'}"
        return
    for failure in own.failed:
        yield f"- {workload}: hotloop failed: {failure}"
    for line in found.lines[workload]:
        if line.name.startswith(OURS):
            continue
        if line.ratio and line.ratio.median < 1:
            yield f"- {workload}, step: {line.name} is {1 / line.ratio.median:.2f} times as fast ({ratio_text(line.ratio)})"
        for cache, own_s in own.run_s.items():
            theirs = {at: s for at, s in line.run_s.items() if s < own_s and (at == cache or cache not in line.run_s)}
            if theirs:
                them, us = _by_cache(theirs, ".0f"), _by_cache({cache: own_s}, ".0f")
                yield f"- {workload}, run of {RUN_S / 60:.0f} min: {line.name} {them}, hotloop {us}"
        if line.name != TUTORIAL or not line.peak_mb:
            continue
        data_mb = found.limits.get(workload, {}).get("data_bytes", 0) / 1e6
        for cache, peak_mb in own.peak_mb.items():
            more_mb = peak_mb - max(line.peak_mb.values())
            if more_mb > data_mb:
                text = f"{more_mb:.0f} MB {cache}".rstrip()
                yield f"- {workload}, memory: {text} more than the tutorial's loop; the data has {data_mb:.0f} MB"


def targets_table(promised: Sequence[Target]) -> str:
    """Each target, what was reached, and by how much it was missed; nothing where there is none."""
    if not promised:
        return ""
    cells = [
        (
            one.where,
            f"{'at most' if one.most else 'at least'} {_figure(one.goal, one.unit)}",
            "" if one.reached is None else _figure(one.reached, one.unit),
            f"**{one.verdict}**" if one.met is False else one.verdict,
        )
        for one in promised
    ]
    return "\n".join(["## Targets\n", *rows(("where", "target", "reached", ""), cells), ""]) + "\n"


def _figure(value: float, unit: str) -> str:
    return f"{format_digits(value)}{unit if unit == 'x' else f' {unit}'}"


def ratio_text(ratio: Ratio) -> str:
    if ratio.low is None or ratio.high is None:
        return f"{ratio.median:.2f} ({ratio.pairs} pairs)"
    return f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def mean_text(mean: Mean | None) -> str:
    if mean is None:
        return ""
    known = mean.low is not None and mean.high is not None
    return f"{mean.value:.2f} ({f'{mean.low:.2f} to {mean.high:.2f}' if known else 'too few pairs'}), {mean.of} of them"


def rows(head: Sequence[str], cells: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Lines of a Markdown table."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + " --- |" * len(head)
    yield from ("| " + " | ".join(map(str, row)) + " |" for row in cells)
