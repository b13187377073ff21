"""Shows advice on hardware: the answer, a table of machines, two pictures, and the score of earlier predictions."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hotloop.core.format import format_bytes, format_digits, format_flops, format_percent
from hotloop.core.records.advice import HardwareAdvice, MachineAdvice, Score
from hotloop.report.html import LINE_COLOURS, log_axis, style_figure, write_page


def advice_page(advice: HardwareAdvice) -> RenderableType:
    """Returns the answer, the table, and notes."""
    head = (
        f"{advice.subject}: {advice.parameters:,} parameters, {format_flops(advice.flops)} in a step of batch "
        f"{advice.batch_size:,}, {advice.steps:,} steps, plan {advice.plan}, {advice.precision}"
    )
    memory = ", ".join(f"{name} {format_bytes(value)}" for name, value in advice.memory.items() if value)
    lines = [
        *_mark_lines(advice),
        f"Memory of the step: {memory}",
        *_price_lines(advice),
        *(f"Note: {note}" for note in [*advice.notes, *filter(None, [advice.busy])]),
    ]
    return Group(
        Text(advice.answer, style="bold"), Text(head), advice_table(advice), expense_table(advice), *map(Text, lines)
    )


def _mark_lines(advice: HardwareAdvice) -> list[str]:
    """Returns the cheapest and the fastest machines that meet the conditions, one line for each."""
    has_batches = len({row.batch_size for row in advice.machines}) > 1
    lines = []
    for mark in dict.fromkeys(mark for row in advice.machines for mark in row.marks):
        rows = [row for row in advice.machines if mark in row.marks]
        names = (f"{row.name}, batch {row.batch_size:,}" if has_batches else row.name for row in rows)
        lines.append(f"{mark.capitalize()}: {'; '.join(names)}")
    return lines


def _price_lines(advice: HardwareAdvice) -> list[str]:
    sources = dict.fromkeys(f"{row.chip}: {row.price_source}" for row in advice.machines if row.price_source)
    found = [f"Prices per hour and chip: {'; '.join(sources)}. --prices replaces them"] if sources else []
    here = [row for row in advice.machines if row.form == "here"]
    if here:
        ways = dict.fromkeys(f"{row.name}: {row.source}" for row in here)
        others = ["other machines: predicted"] if len(here) < len(advice.machines) else []
        found.append("; ".join([*ways, *others]))
    return found


def advice_table(advice: HardwareAdvice) -> Table:
    """Returns a row of 80 columns for each machine and batch size: times, memory and cost of the run; marked rows are bold."""
    has_batches = len({row.batch_size for row in advice.machines}) > 1
    table = _table()
    table.add_column("machine", overflow="fold", min_width=8)
    if has_batches:
        table.add_column("batch", justify="right", no_wrap=True)
    for name in ("step ms (90 %)", "run", "memory GB", "cost"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    for row in advice.machines:
        table.add_row(
            *(row.name, *((f"{row.batch_size:,}",) if has_batches else ())),
            f"{format_digits(row.step_ms)} ({format_digits(row.low_ms)}–{format_digits(row.high_ms)})",
            format_run(row.run_s),
            _memory(row),
            _small(row.cost),
            row.bound,
            style=_style(row),
        )
    return table


def expense_table(advice: HardwareAdvice) -> Table:
    """Returns cost per 1,000 steps, energy and CO2 of each machine and batch size."""
    has_carbon = any(row.carbon_kg is not None for row in advice.machines)
    table = _table()
    table.add_column("machine", overflow="fold")
    for name in ("batch", "cost per 1,000 steps", "energy kWh", *(("CO2 kg",) if has_carbon else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for row in advice.machines:
        table.add_row(
            row.name,
            f"{row.batch_size:,}",
            _small(row.cost_per_1000_steps),
            _small(row.energy_kwh),
            *((_small(row.carbon_kg),) if has_carbon else ()),
            style=_style(row),
        )
    return table


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)


def _style(row: MachineAdvice) -> str:
    return "bold" if row.marks else "" if row.meets else "dim"


def _memory(row: MachineAdvice) -> str:
    """Returns the needed and the existing memory of each chip in GB, such as `0.09/24`, and how the step fits."""
    there = "?" if row.memory_there_bytes is None else format_digits(row.memory_there_bytes / 1e9)
    needed = row.memory_bytes / 1e9
    fits = "" if row.fits == "fits" else f" {_fits(row)}"
    return f"{'<0.01' if needed < 0.01 else format_digits(needed)}/{there}{fits}"


def _fits(row: MachineAdvice) -> str:
    if row.fits == "no":
        return "no fit"
    if row.fits == "fits with accumulation":
        return f"in {row.accumulation} pieces"
    return f"sharded over {row.gpus}" if row.fits == "sharded" else row.fits


def _small(value: float | None) -> str:
    """Returns a cost, an energy or a mass: two decimals, or two digits of small values."""
    return "" if value is None else "0" if value == 0 else f"{value:,.2f}" if value >= 0.1 else f"{value:.2g}"


def format_run(seconds: float) -> str:
    """Returns `45 s`, `12 min`, `3.4 h` or `2.1 days`."""
    for limit, unit, size in ((100, "s", 1), (6000, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{format_digits(seconds / size)} {unit}"
    return f"{format_digits(seconds / 86_400)} days"


def advice_figure(advice: HardwareAdvice) -> go.Figure:
    """Returns time against cost with the front of the best machines, and step against batch size with the crossing."""
    figure = make_subplots(
        rows=1, cols=2, subplot_titles=("Time and cost of the run", "Step against batch size"), horizontal_spacing=0.1
    )
    priced = [row for row in advice.machines if row.cost is not None and row.fits != "no"]
    _draw_costs(figure, priced)
    for number, curve in enumerate(advice.curves):
        line = {"color": LINE_COLOURS[number % len(LINE_COLOURS)], "dash": "dot" if curve.is_cpu else "solid"}
        figure.add_trace(
            go.Scatter(x=curve.batch_sizes, y=curve.step_ms, name=escape(curve.name), mode="lines", line=line),
            row=1,
            col=2,
        )
    if advice.pays_from:
        figure.add_vline(x=advice.pays_from, line_dash="dot", line_color="#616e7c", row=1, col=2)
        figure.add_annotation(
            x=math.log10(advice.pays_from), y=1, yref="y2 domain", xref="x2", xanchor="left", yanchor="top",
            showarrow=False, text=f"a GPU probably pays from batch {advice.pays_from:,} on",
        )  # fmt: skip
    figure.update_xaxes(title_text="hours", **log_axis(row.run_s / 3600 for row in priced), row=1, col=1)
    figure.update_yaxes(title_text="cost", rangemode="tozero", row=1, col=1)
    sizes, steps_ms = (
        [value for curve in advice.curves for value in getattr(curve, name)] for name in ("batch_sizes", "step_ms")
    )
    figure.update_xaxes(title_text="batch size", **log_axis(sizes), row=1, col=2)
    figure.update_yaxes(title_text="milliseconds of a step", **log_axis(steps_ms), row=1, col=2)
    return style_figure(figure, f"{advice.subject}: hardware", advice.answer).update_layout(
        height=560, margin={"t": 130}
    )


def _draw_costs(figure: go.Figure, rows: list[MachineAdvice]) -> None:
    hours = [row.run_s / 3600 for row in rows]
    labels = [escape(f"{row.name}, batch {row.batch_size:,}") for row in rows]
    figure.add_trace(
        go.Scatter(
            x=hours,
            y=[row.cost for row in rows],
            text=[escape(row.name) for row in rows],
            hovertext=labels,
            hoverinfo="text+x+y",
            mode="markers+text",
            textposition="top center",
            marker={"size": 9, "color": [LINE_COLOURS[1] if row.marks else LINE_COLOURS[0] for row in rows]},
            showlegend=False,
        ),
        row=1,
        col=1,
    )
    best = cost_front(rows)
    figure.add_trace(
        go.Scatter(
            x=[row.run_s / 3600 for row in best],
            y=[row.cost for row in best],
            mode="lines",
            line={"color": LINE_COLOURS[1], "dash": "dash"},
            name="front: no machine is both faster and cheaper",
        ),
        row=1,
        col=1,
    )


def cost_front(rows: list[MachineAdvice]) -> list[MachineAdvice]:
    """Returns the machines that no other machine undercuts in both time and cost, the fastest first."""
    front: list[MachineAdvice] = []
    for row in sorted(rows, key=lambda row: (row.run_s, row.cost or 0.0)):
        if not front or (row.cost or 0.0) < (front[-1].cost or 0.0):
            front.append(row)
    return front


def write_advice(advice: HardwareAdvice, path: Path) -> None:
    write_page(path, f"Hardware for {advice.subject}", advice_figure(advice), "--out")


def score_page(score: Score) -> RenderableType:
    """Returns a row for each measured prediction, and error and coverage of all."""
    if not score.measured:
        count = len(score.predictions)
        stored = f"{count} prediction{' is' if count == 1 else 's are'} stored, and " if count else ""
        return Text(f"{stored}no prediction has been measured yet: run hotloop train or hotloop race on such a chip")
    table = _table()
    for name in ("Task", "batch", "chip", "predicted ms (90 %)", "measured", "error"):
        table.add_column(name, justify="left" if name in ("Task", "chip") else "right")
    for one in score.predictions:
        if one.measured is None:
            continue
        table.add_row(
            Text(str(one.key.get("task", ""))),
            f"{one.key.get('batch_size', '')}",
            Text(one.chip),
            f"{format_digits(one.step_ms)} ({format_digits(one.low_ms)} to {format_digits(one.high_ms)})",
            format_digits(one.measured),
            f"{100 * (one.step_ms / one.measured - 1):+.0f} %",
        )
    line = (
        f"{score.measured} measured: median error {format_percent(score.median_error)}, mean error "
        f"{format_percent(score.mean_error)}, {format_percent(score.coverage)} within the 90 % interval"
    )
    return Group(table, Text(line))
