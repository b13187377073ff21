"""Step time against the size of a Task: a table, a picture, and where one plan overtakes another."""

from __future__ import annotations

from html import escape
from pathlib import Path

import plotly.graph_objects as go
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hotloop.report.page import styled, write_page
from hotloop.verdicts import Crossing, Scaling, Timing

_COLOURS = ("#3566b8", "#d9622b", "#2a9d6f", "#8a4fbf", "#b8860b", "#616e7c")


def page(scaling: Scaling) -> RenderableType:
    """A row for each size, a column for each plan, and a sentence for each crossing."""
    baseline = scaling.races[0].baseline
    names = [timing.name for timing in scaling.races[0].plans]
    shown = Table()
    shown.add_column(scaling.parameter, justify="right")
    for name in names:
        shown.add_column(Text(name), justify="right")
    for value, verdict in zip(scaling.values, scaling.races, strict=True):
        shown.add_row(value, *(Text(_cell(verdict.plan(name), name == baseline)) for name in names))
    notes = [
        f"Note: {scaling.parameter}={value}: {note}"
        for value, verdict in zip(scaling.values, scaling.races, strict=True)
        for note in [*(f"{plan.name}: {plan.failure}" for plan in verdict.plans if plan.failure), *verdict.notes]
    ]
    lines = [*notes, *(f"{sentence(scaling, crossing)}: {crossing.reason}." for crossing in scaling.crossings)]
    return Group(shown, *(Text(line) for line in lines))


def _cell(timing: Timing, is_baseline: bool) -> str:
    if timing.step_ms is None:
        return "failed"
    return f"{timing.step_ms:.3g} ms" + ("" if is_baseline else f", {timing.ratio:.2f} times as fast")


def sentence(scaling: Scaling, crossing: Crossing) -> str:
    """From which size on a plan is faster than the baseline."""
    baseline, name = scaling.races[0].baseline, crossing.name
    if crossing.at is None:
        return f"{name} {_throughout(scaling, name)} {baseline} at all sizes raced"
    within = "" if crossing.low is None else f" (between {crossing.low:.3g} and {crossing.high:.3g})"
    smallest = min(zip(map(float, scaling.values), scaling.races, strict=True), key=lambda pair: pair[0])[1]
    side = "above" if (smallest.plan(name).ratio or 1.0) < 1 else "below"
    size = f"{scaling.parameter}={crossing.at:.3g}"
    return f"{name} is faster than {baseline} {side} {size}{within}"


def _throughout(scaling: Scaling, name: str) -> str:
    ratios = [ratio for verdict in scaling.races if (ratio := verdict.plan(name).ratio) is not None]
    if not ratios:
        return "can't be compared with"
    return "is faster than" if min(ratios) > 1 else "is slower than" if max(ratios) < 1 else "is neither way from"


def picture(scaling: Scaling) -> go.Figure:
    """Milliseconds of a step against the size, both logarithmic, a line for each plan; crossings are marked."""
    figure = go.Figure()
    races = sorted(zip(map(float, scaling.values), scaling.races, strict=True), key=lambda pair: pair[0])
    for number, timing in enumerate(scaling.races[0].plans):
        found = [(size, verdict.plan(timing.name).step_ms) for size, verdict in races]
        points = [(size, step_ms) for size, step_ms in found if step_ms is not None]
        figure.add_trace(
            go.Scatter(
                x=[size for size, _ in points],
                y=[step_ms for _, step_ms in points],
                name=escape(timing.name),
                mode="lines+markers",
                line={"color": _COLOURS[number % len(_COLOURS)]},
            )
        )
    for crossing in scaling.crossings:
        if crossing.at is not None:
            text = f"{escape(crossing.name)}: {crossing.at:.3g}"
            figure.add_vline(x=crossing.at, line_dash="dot", line_color="#616e7c", annotation_text=text)
    figure.update_xaxes(title_text=escape(scaling.parameter), type="log")
    figure.update_yaxes(title_text="milliseconds of a step", type="log")
    note = "; ".join(sentence(scaling, crossing) for crossing in scaling.crossings)
    return styled(figure, f"{scaling.races[0].task}: step time against {scaling.parameter}", note).update_layout(
        height=520
    )


def write_picture(scaling: Scaling, path: Path) -> None:
    """Writes the picture as one self-contained page."""
    write_page(path, f"Step time against {scaling.parameter}", picture(scaling))
