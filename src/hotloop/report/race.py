"""Formats a race: a table, a sentence with the winner and the reason; and races over the size of a Task, with a figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, TextColumn
from rich.table import Table
from rich.text import Text

from hotloop.core.format import format_milliseconds
from hotloop.core.records.race import TRUSTED_CLASSES, Crossover, RaceScaling, Timing, Verdict, describe_ratio
from hotloop.core.terminal import Bar
from hotloop.report.blocks import Block, Section, figures, lines, table, text
from hotloop.report.html import LINE_COLOURS, draw, log_axis, style_figure, write_page
from hotloop.report.progress import format_duration
from hotloop.report.run_curves import COLOURS

if TYPE_CHECKING:
    import plotly.graph_objects as go

_NAME = 20
"""Characters of a plan's name that stay on one line in a narrow terminal."""
_WORD = len("difference")
"""The same for a verdict."""


@contextmanager
def race_progress_bar(console: Console) -> Iterator[Callable[[str, float], None]]:
    """Shows a progress bar while plans race; yields a function of the present work and the completed share."""
    columns = (TextColumn("{task.description}"), BarColumn())
    bar = Bar(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("", total=1.0)
    with bar:
        yield lambda doing, share: bar.update(task, description=doing, completed=share)


def race_page(verdict: Verdict) -> RenderableType:
    failures = [f"{timing.name}: {timing.failure}" for timing in verdict.plans if timing.failure]
    base = verdict.plan(verdict.baseline)
    reasons = [
        f"{timing.name} is {_parity_text(timing, base)}: {timing.parity_reason}"
        for timing in verdict.plans
        if timing.parity and timing.name != verdict.baseline
    ]
    notes = [f"Note: {note}" for note in verdict.remarks]
    return Group(race_table(verdict), *(Text(line) for line in [*failures, *reasons, *notes, winner_sentence(verdict)]))


def race_table(verdict: Verdict) -> Table:
    """Returns a table with a row for each plan."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.add_column("plan", overflow="fold", min_width=min(_NAME, max(len(timing.name) for timing in verdict.plans)))
    for name in ("step", "times as fast (99 %)", "compile", "this run"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", min_width=_WORD)
    for timing in verdict.plans:
        ratio = _ratio(timing, timing.name == verdict.baseline)
        cells = [_step(timing), ratio, _time(timing.compile_s), _time(timing.run_s), _describe_verdict(timing, verdict)]
        style = "bold" if timing.name == verdict.winner else ""
        table.add_row(*(Text(cell) for cell in (timing.name, *cells)), style=style)
    return table


def _describe_verdict(timing: Timing, verdict: Verdict) -> str:
    if timing.name == verdict.baseline:
        return "the baseline"
    if timing.failure:
        return "failed"
    return timing.verdict or ("left out" if timing.left_out else "too few pairs")


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(seconds)


def _step(timing: Timing) -> str:
    return "-" if timing.step_ms is None else format_milliseconds(timing.step_ms)


def _ratio(timing: Timing, is_baseline: bool) -> str:
    if timing.ratio is None:
        return "-"
    if is_baseline:
        return "1"
    interval = "" if timing.ratio_low is None else f" ({timing.ratio_low:.2f} to {timing.ratio_high:.2f})"
    return f"{timing.ratio:.2f}{interval}"


def winner_sentence(verdict: Verdict) -> str:
    if verdict.ended is not None:
        return "No winner: what was raced isn't proven."
    if verdict.winner is None:
        return "No winner: too little was measured to say which plan is faster. Give it more time by --time-limit."
    base, winner = verdict.plan(verdict.baseline), verdict.plan(verdict.winner)
    if verdict.busy:
        best = base.name if winner is base else f"{winner.name}, {describe_ratio(winner, verdict.busy)}"
        proven = "" if winner is base else _describe_parity(winner, base)
        return f"No sure winner: beside other programs the first is {best}{proven}. Measure again when the machine is quiet."
    if winner is not base:
        return f"{winner.name} wins: {_speed(winner, base)}{_describe_parity(winner, base)}{_describe_finish(winner, base, verdict.steps)}."
    rivals = [timing for timing in verdict.plans if timing is not base]
    if not rivals:
        return f"{base.name} stays: nothing was raced against it."
    return f"{base.name} wins: {'; '.join(_why_not_winner(rival, base, verdict.steps) for rival in rivals)}."


def _speed(timing: Timing, base: Timing) -> str:
    return f"{timing.ratio:.2f} times as fast as {base.name} (99 % interval {timing.ratio_low:.2f} to {timing.ratio_high:.2f})"


def _describe_parity(timing: Timing, base: Timing) -> str:
    return f", and proven {_parity_text(timing, base)}" if timing.parity in TRUSTED_CLASSES else ""


def _parity_text(timing: Timing, base: Timing) -> str:
    """Returns the parity class, and the device of the proof's baseline if it differs from the race's."""
    device = timing.plan.get("device")
    return f"{timing.parity}" + (f" against the baseline on {device}" if device != base.plan.get("device") else "")


def _describe_finish(timing: Timing, base: Timing, steps: int | None) -> str:
    if steps is None:
        return ""
    compiled = "" if timing.compile_warm_s is None else " (loading the compiled code included)"
    ours, theirs = format_duration(timing.finishes(steps)), format_duration(base.finishes(steps))
    return f"; this run of {steps:,} steps takes {ours} with this plan{compiled}, and {theirs} with {base.name}"


def _why_not_winner(rival: Timing, base: Timing, steps: int | None) -> str:
    if rival.failure:
        return f"{rival.name} can't be run"
    if rival.verdict == "slower":
        return f"{rival.name} takes {1 / (rival.ratio or 1):.2f} times as long"
    if rival.verdict is None and rival.left_out:
        what = "behind" if rival.behind else "another plan is faster"
        return f"{rival.name} was left out after {rival.windows} pairs: {what}"
    if rival.verdict is None:
        return f"too little of {rival.name} was measured for a verdict"
    if rival.verdict != "faster":
        return f"no difference was found to {rival.name}"
    if rival.parity is not None and rival.parity not in TRUSTED_CLASSES:
        return f"{rival.name} is {rival.ratio:.2f} times as fast, but {_parity_text(rival, base)}"
    if rival.parity is None and rival.finishes(steps) < base.finishes(steps):
        return f"{rival.name} is {rival.ratio:.2f} times as fast, but it wasn't proven"
    pays = "" if rival.pays_after is None else f", which pays after {rival.pays_after:,} steps"
    longer = "start and compile" if not rival.looking_ms else "start, compile and check what callbacks change"
    return f"{rival.name} is {rival.ratio:.2f} times as fast, but takes longer to {longer}{pays}"


def race_section(verdict: Verdict) -> Section:
    """Returns the plans' speeds with their intervals, and why the winner won."""
    reasons = [f"{timing.name}: {timing.parity_reason}" for timing in verdict.plans if timing.parity_reason]
    failures = [f"{timing.name}: {timing.failure}" for timing in verdict.plans if timing.failure]
    blocks = [text(winner_sentence(verdict)), *race_figures(verdict), plans_table(verdict)]
    return Section("race", "Race", [*blocks, *lines([*reasons, *failures, *verdict.remarks])])


def plans_table(verdict: Verdict) -> Block:
    """Returns a row for each plan."""
    rows = [
        (
            timing.name,
            _step(timing),
            "-" if timing.ratio is None else f"{timing.ratio:.2f}",
            "-" if timing.ratio_low is None else f"{timing.ratio_low:.2f} to {timing.ratio_high:.2f}",
            timing.parity or "-",
            _describe_verdict(timing, verdict),
        )
        for timing in verdict.plans
    ]
    columns = ("plan", "step", "times as fast", "99 % interval", "proof", "verdict")
    marked = [number for number, timing in enumerate(verdict.plans) if timing.name == verdict.winner]
    return table("Plans", columns, rows, numbers=(1, 2, 3), marked=marked)


def race_figures(verdict: Verdict) -> list[Block]:
    """Returns a bar for each plan with the error bars of its 99 % interval."""
    timed = [timing for timing in verdict.plans if timing.ratio is not None]
    if not timed:
        return []
    ratios = [timing.ratio or 1.0 for timing in timed]
    above = [max(0.0, (one.ratio_high or ratio) - ratio) for one, ratio in zip(timed, ratios, strict=True)]
    below = [max(0.0, ratio - (one.ratio_low or ratio)) for one, ratio in zip(timed, ratios, strict=True)]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "y": list(range(len(timed))),
            "x": ratios,
            "error_x": {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "color": COLOURS[7]},
            "marker": {"color": [COLOURS[2] if one.name == verdict.winner else COLOURS[0] for one in timed]},
            "hovertemplate": "%{x:.3f} times as fast<extra></extra>",
        }
    ]
    names, baseline = [escape(one.name, quote=False) for one in timed], escape(verdict.baseline, quote=False)
    layout = {
        "xaxis": {"title": {"text": f"times as fast as {baseline}"}, "rangemode": "tozero"},
        "yaxis": {"tickvals": list(range(len(timed))), "ticktext": names, "autorange": "reversed"},
        "showlegend": False,
    }
    label = "; ".join(f"{one.name} {ratio:.2f} times as fast" for one, ratio in zip(timed, ratios, strict=True))
    shown = {"title": "Speed against the baseline, with 99 % intervals", "label": label, "data": data, "layout": layout}
    return figures([shown])


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
    races = sorted(zip(map(float, scaling.values), scaling.races, strict=True), key=lambda pair: pair[0])
    lines = []
    for number, timing in enumerate(scaling.races[0].plans):
        times = [(size, verdict.plan(timing.name).step_ms) for size, verdict in races]
        points = [(size, step_ms) for size, step_ms in times if step_ms is not None]
        lines.append(
            {
                "type": "scatter",
                "x": [size for size, _ in points],
                "y": [step_ms for _, step_ms in points],
                "name": escape(timing.name),
                "mode": "lines+markers",
                "line": {"color": LINE_COLOURS[number % len(LINE_COLOURS)]},
            }
        )
    figure = draw(lines, {})
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
