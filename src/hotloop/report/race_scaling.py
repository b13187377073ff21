"""Shows step time against the size of a Task: a table, a figure, and the sizes at which plans overtake."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

import plotly.graph_objects as go
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hotloop.core.format import format_milliseconds
from hotloop.core.records.race import Crossover, RaceScaling, Timing
from hotloop.report.html import log_axis, style_figure, write_page

_COLOURS = ("#3566b8", "#d9622b", "#2a9d6f", "#8a4fbf", "#b8860b", "#616e7c")


def scaling_page(scaling: RaceScaling) -> RenderableType:
    """Returns a row for each size, a column for each plan, and a sentence on each plan but the baseline."""
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
        for note in [*(f"{plan.name}: {plan.failure}" for plan in verdict.plans if plan.failure), *verdict.remarks]
    ]
    lines = [*notes, *(f"{scaling_sentence(scaling, name)}: {reason}." for name, reason in _reasons(scaling).items())]
    return Group(shown, *(Text(line) for line in lines))


def _cell(timing: Timing, is_baseline: bool) -> str:
    if timing.step_ms is None:
        return "failed"
    return format_milliseconds(timing.step_ms) + ("" if is_baseline else f", {timing.ratio:.2f} times as fast")


def scaling_sentence(scaling: RaceScaling, name: str) -> str:
    """Returns the sizes at which a plan is measurably faster than the baseline."""
    baseline = scaling.races[0].baseline
    sides = [_describe_crossing(scaling, one) for one in scaling.crossings if one.name == name and one.at is not None]
    if sides:
        return f"{name} is faster than {baseline} {' and '.join(sides)}"
    shown = {way: _sizes_with_verdict(scaling, name, way) for way in ("faster", "slower")}
    way, sizes = next(((way, sizes) for way, sizes in shown.items() if sizes), ("", []))
    if not way:
        return f"no difference between {name} and {baseline} was shown at any size raced"
    if len(sizes) == len(scaling.values):
        return f"{name} is {way} than {baseline} at all sizes raced"
    return f"{name} is {way} than {baseline} at {scaling.parameter}={', '.join(sizes)}; else no difference was shown"


def _describe_crossing(scaling: RaceScaling, crossing: Crossover) -> str:
    return (
        f"{crossing.faster} {scaling.parameter}={crossing.at:.3g} (between {crossing.low:.3g} and {crossing.high:.3g})"
    )


def _sizes_with_verdict(scaling: RaceScaling, name: str, verdict: str) -> list[str]:
    races = zip(scaling.values, scaling.races, strict=True)
    return [value for value, race in races if race.plan(name).verdict == verdict]


def _reasons(scaling: RaceScaling) -> dict[str, str]:
    return {crossing.name: crossing.reason for crossing in scaling.crossings}


def scaling_figure(scaling: RaceScaling) -> go.Figure:
    """Returns the step time in ms against the size on logarithmic axes, a line for each plan, with crossings."""
    figure = go.Figure()
    races = sorted(zip(map(float, scaling.values), scaling.races, strict=True), key=lambda pair: pair[0])
    for number, timing in enumerate(scaling.races[0].plans):
        times = [(size, verdict.plan(timing.name).step_ms) for size, verdict in races]
        points = [(size, step_ms) for size, step_ms in times if step_ms is not None]
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
            _mark_crossing(figure, crossing.at, f"{escape(crossing.name)}: {crossing.at:.3g}")
    sizes = [float(value) for value in scaling.values]
    ticks = {"tickvals": sizes, "ticktext": [escape(value) for value in scaling.values]}
    figure.update_xaxes(title_text=escape(scaling.parameter), type="log", **ticks)
    steps_ms = [timing.step_ms for verdict in scaling.races for timing in verdict.plans if timing.step_ms is not None]
    figure.update_yaxes(title_text="milliseconds of a step", **log_axis(steps_ms))
    note = "; ".join(scaling_sentence(scaling, name) for name in _reasons(scaling))
    return style_figure(figure, f"{scaling.races[0].task}: step time against {scaling.parameter}", note).update_layout(
        height=520
    )


def _mark_crossing(figure: go.Figure, at: float, text: str) -> None:
    """Draws a vertical line with a text at its top: plotly expects the text's place on a log axis as an exponent."""
    figure.add_vline(x=at, line_dash="dot", line_color="#616e7c")
    figure.add_annotation(
        x=math.log10(at), y=1, yref="y domain", xanchor="left", yanchor="top", showarrow=False, text=text
    )


def write_scaling(scaling: RaceScaling, path: Path) -> None:
    write_page(path, f"Step time against {scaling.parameter}", scaling_figure(scaling), "--save")
