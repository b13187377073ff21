"""Shows which class is predicted as which, as a figure and in tables."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

import plotly.graph_objects as go
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hotloop.core.records.training import Evaluation
from hotloop.report.html import INK, style_figure, write_page

_MAX_NUMBERED_CLASSES = 20
"""With more classes the cells are too small for numbers."""

_SCALE = [(0.0, "#ffffff"), (0.02, "#e3eef8"), (0.1, "#a6cde4"), (0.4, "#4a98c9"), (1.0, "#08306b")]
"""Steep at small shares, which are the confusions."""


@dataclass(frozen=True)
class Confusion:
    """`samples` of the class `true`, a `share` of the class, were predicted as `predicted`."""

    true: str
    predicted: str
    samples: int
    share: float


def most_frequent(evaluation: Evaluation, count: int = 5) -> list[Confusion]:
    """Returns the most frequent confusions, most frequent first."""
    names = evaluation.classes
    confusions = [
        Confusion(names[true], names[predicted], samples, samples / sum(row))
        for true, row in enumerate(evaluation.confusion)
        for predicted, samples in enumerate(row)
        if samples and true != predicted
    ]
    return sorted(confusions, key=lambda confusion: -confusion.samples)[:count]


def confusion_figure(evaluation: Evaluation) -> go.Figure:
    """Returns the confusion matrix: a row for each true class, coloured by the share of its samples."""
    names = [escape(name) for name in evaluation.classes]
    shares = [[samples / max(1, sum(row)) for samples in row] for row in evaluation.confusion]
    places = list(range(len(names)))
    written = len(names) <= _MAX_NUMBERED_CLASSES
    figure = go.Figure(
        go.Heatmap(
            z=shares,
            x=places,
            y=places,
            customdata=[
                [(names[true], names[predicted], samples, sum(row)) for predicted, samples in enumerate(row)]
                for true, row in enumerate(evaluation.confusion)
            ],
            text=[[str(samples or "") for samples in row] for row in evaluation.confusion],
            texttemplate="%{text}" if written else None,
            hovertemplate=(
                "%{customdata[0]} predicted as %{customdata[1]}<br>%{customdata[2]:,} of %{customdata[3]:,} (%{z:.1%})"
                "<extra></extra>"
            ),
            colorscale=_SCALE,
            zmin=0,
            zmax=1,
            xgap=1 if written else 0,
            ygap=1 if written else 0,
            colorbar={"tickformat": ".0%", "thickness": 14, "outlinewidth": 0},
        )
    )
    ticks = {"tickvals": places, "ticktext": names} if len(names) <= 60 else {"showticklabels": False}
    axis = {"showgrid": False, "zeroline": False, "constrain": "domain", "color": INK, **ticks}
    side = 420 if len(names) <= 10 else min(900, 260 + 22 * len(names))
    style_figure(figure, f"Confusions on {evaluation.on} data", _summary(evaluation))
    figure.update_xaxes(title_text="predicted", **axis)
    figure.update_yaxes(title_text="true", autorange="reversed", scaleanchor="x", automargin=True, **axis)
    figure.update_layout(height=side + 150, width=side + 220, plot_bgcolor="#e4e7eb" if written else "white")
    return figure


def _summary(evaluation: Evaluation) -> str:
    right = sum(row[place] for place, row in enumerate(evaluation.confusion))
    total = sum(map(sum, evaluation.confusion))
    share = f"{right / total:.2%} right, " if total else ""
    return f"{share}{total:,} samples; a row is one true class, its colours are shares of it"


def write_confusion(evaluation: Evaluation, path: Path) -> None:
    write_page(path, f"Confusions: {evaluation.run}", confusion_figure(evaluation))


_MAX_ROWS = 20
_BAR_WIDTH = 10


def class_tables(evaluation: Evaluation) -> RenderableType:
    """Returns tables of precision, recall and F1 per class and of the most frequent confusions."""
    tables = [_class_metrics(evaluation)]
    return Group(*tables, _confusions(evaluation)) if most_frequent(evaluation) else Group(*tables)


def _class_metrics(evaluation: Evaluation) -> Table:
    rates = evaluation.accuracy_per_class
    order = range(len(rates))
    title = "Metrics per class"
    if len(rates) > _MAX_ROWS:
        present = [place for place in order if rates[place] is not None]
        order = sorted(present, key=lambda place: rates[place] or 0.0)[:_MAX_ROWS]  # type: ignore[assignment]
        title = f"Metrics of the {_MAX_ROWS} worst of {len(rates)} classes"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("class", overflow="fold")
    table.add_column("samples", justify="right")
    for name in ("precision", "recall", "F1"):
        table.add_column(name, justify="right")
    table.add_column("")
    for place in order:
        shares = (evaluation.precision_per_class[place], rates[place], evaluation.f1_per_class[place])
        bar = Text("█" * round((rates[place] or 0.0) * _BAR_WIDTH), style="green")
        samples = f"{sum(evaluation.confusion[place]):,}"
        table.add_row(Text(evaluation.classes[place]), samples, *map(_percent, shares), bar)
    for name, average in (
        ("macro average", evaluation.macro_average),
        ("weighted average", evaluation.weighted_average),
    ):
        if average is not None:
            figures = map(_percent, (average.precision, average.recall, average.f1))
            table.add_row(Text(name, style="italic"), "", *figures, "")
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _confusions(evaluation: Evaluation) -> Table:
    table = Table(title="Most frequent confusions", title_justify="left", title_style="bold")
    for name in ("true", "taken for"):
        table.add_column(name, overflow="fold")
    table.add_column("samples", justify="right")
    table.add_column("of the class", justify="right")
    for one in most_frequent(evaluation):
        table.add_row(Text(one.true), Text(one.predicted), f"{one.samples:,}", f"{one.share:.1%}")
    return table
