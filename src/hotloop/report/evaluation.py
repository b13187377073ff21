"""Shows an evaluation, as tables, pages and a section of a report: classes and confusions, mistakes, a regression's errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from hotloop.core.records.training import Evaluation, Mistake, Picture, Regression
from hotloop.report.blocks import Block, Section, figures, heading, table, terminal_table, text, tiles
from hotloop.report.html import INK, draw, style_figure, write_page

if TYPE_CHECKING:
    import plotly.graph_objects as go

_MAX_NUMBERED_CLASSES = 20
"""With more classes the cells are too small for numbers."""

_SCALE = [(0.0, "#ffffff"), (0.02, "#e3eef8"), (0.1, "#a6cde4"), (0.4, "#4a98c9"), (1.0, "#08306b")]
"""Steep at small shares, which are the confusions."""

_MAX_ROWS, _BAR_WIDTH = 20, 10

_MISTAKE_COLUMNS, _MISTAKE_PX = 6, 150

_POINT_COLOR, _BAR_COLOR, _LINE_COLOR = "#2b6cb0", "#4a98c9", "#9aa5b1"

_PNG = re.compile(r"data:image/png;base64,[A-Za-z0-9+/=]+")

_RESIDUALS_PX = 420
"""Height of a target's figures."""


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


def confusion_figure(evaluation: Evaluation) -> dict[str, Any]:
    """Returns the confusion matrix: a row for each true class, coloured by the share of its samples."""
    names = [escape(name) for name in evaluation.classes]
    places = list(range(len(names)))
    is_written = len(names) <= _MAX_NUMBERED_CLASSES
    matrix = {
        "type": "heatmap",
        "z": [[samples / max(1, sum(row)) for samples in row] for row in evaluation.confusion],
        "x": places,
        "y": places,
        "customdata": [
            [(names[true], names[predicted], samples, sum(row)) for predicted, samples in enumerate(row)]
            for true, row in enumerate(evaluation.confusion)
        ],
        "text": [[str(samples or "") for samples in row] for row in evaluation.confusion],
        **({"texttemplate": "%{text}"} if is_written else {}),
        "hovertemplate": (
            "%{customdata[0]} predicted as %{customdata[1]}<br>%{customdata[2]:,} of %{customdata[3]:,} (%{z:.1%})"
            "<extra></extra>"
        ),
        "colorscale": _SCALE,
        "zmin": 0,
        "zmax": 1,
        "xgap": int(is_written),
        "ygap": int(is_written),
        "colorbar": {"tickformat": ".0%", "thickness": 14, "outlinewidth": 0},
    }
    ticks = {"tickvals": places, "ticktext": names} if len(names) <= 60 else {"showticklabels": False}
    axis = {"showgrid": False, "zeroline": False, "constrain": "domain", "color": INK, **ticks}
    true = {"autorange": "reversed", "scaleanchor": "x", "automargin": True}
    layout = {
        "xaxis": {"title": {"text": "predicted"}, **axis},
        "yaxis": {"title": {"text": "true"}, **true, **axis},
    }
    worst = "; ".join(f"{one.true} taken for {one.predicted} {one.samples} times" for one in most_frequent(evaluation))
    title = "Rows: true class. Columns: predicted class."
    return {"title": title, "label": f"Confusions: {worst}", "data": [matrix], "layout": layout}


def _summary(evaluation: Evaluation) -> str:
    right = sum(row[place] for place, row in enumerate(evaluation.confusion))
    total = sum(map(sum, evaluation.confusion))
    share = f"{right / total:.2%} right, " if total else ""
    return f"{share}{total:,} samples; a row is one true class, its colours are shares of it"


def write_confusion(evaluation: Evaluation, path: Path, shared_script: Path | None = None) -> None:
    chart, classes = confusion_figure(evaluation), len(evaluation.classes)
    side = 420 if classes <= 10 else min(900, 260 + 22 * classes)
    figure = draw(chart["data"], chart["layout"])
    style_figure(figure, f"Confusions on {evaluation.on} data", _summary(evaluation))
    background = "#e4e7eb" if classes <= _MAX_NUMBERED_CLASSES else "white"
    figure.update_layout(height=side + 150, width=side + 220, plot_bgcolor=background)
    write_page(path, f"Confusions: {evaluation.run}", figure, shared_script=shared_script)


def class_tables(evaluation: Evaluation) -> RenderableType:
    """Returns tables of precision, recall and F1 per class and of the most frequent confusions."""
    confusions = [_confusions(evaluation)] if most_frequent(evaluation) else []
    return Group(_class_metrics(evaluation), *confusions)


def _class_metrics(evaluation: Evaluation) -> Table:
    rates = evaluation.accuracy_per_class
    order = range(len(rates))
    title = "Metrics per class"
    if len(rates) > _MAX_ROWS:
        present = [place for place in order if rates[place] is not None]
        order = sorted(present, key=lambda place: rates[place] or 0.0)[:_MAX_ROWS]  # type: ignore[assignment]
        title = f"Metrics of the {_MAX_ROWS} worst of {len(rates)} classes"
    numbers = (Column(name, justify="right") for name in ("samples", "precision", "recall", "F1"))
    columns: list[Column | str] = [Column("class", overflow="fold"), *numbers, ""]
    table = Table(*columns, title=title, title_justify="left", title_style="bold")
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
    rows = [(one.true, one.predicted, f"{one.samples:,}", f"{one.share:.1%}") for one in most_frequent(evaluation)]
    columns = ("true", "taken for", "samples", "of the class")
    return terminal_table(table("Most frequent confusions", columns, rows, numbers=(2, 3)))


def regression_table(regression: Regression) -> Table:
    """Returns a table of the errors of each target."""
    return terminal_table(_errors(regression))


def _errors(regression: Regression) -> Block:
    columns = ("target", "MAE", "RMSE", "R²", "mean residual", "std of residuals")
    rows = []
    for target in regression.targets:
        figures = (target.mae, target.rmse, target.r2, target.residual_mean, target.residual_std)
        rows.append((target.name, *("-" if figure is None else f"{figure:.4g}" for figure in figures)))
    return table("Errors per target", columns, rows, numbers=range(1, len(columns)))


def mistakes_figure(evaluation: Evaluation) -> go.Figure:
    """Returns the mistakes of an evaluation, worst first."""
    pictured = bool(evaluation.mistakes) and all(mistake.picture is not None for mistake in evaluation.mistakes)
    figure = _grid(evaluation) if pictured else _mistakes_table(evaluation)
    what = "Most confident mistakes" if evaluation.mistakes else "No mistakes"
    style_figure(figure, f"{what} on {evaluation.on} data", _note(evaluation, pictured))
    return figure.update_layout(margin={"l": 18, "r": 18, "t": 130 if pictured else 90, "b": 20})


def _note(evaluation: Evaluation, pictured: bool) -> str:
    if not evaluation.mistakes:
        return f"{evaluation.samples:,} samples, all classified correctly"
    order = "Black: the true class. Red: the predicted class and its probability. " if pictured else ""
    return f"{order}The worst {len(evaluation.mistakes)} of {evaluation.samples:,} samples."


def _grid(evaluation: Evaluation) -> go.Figure:
    import plotly.graph_objects as go  # takes half a second to import
    from plotly.subplots import make_subplots

    mistakes, names = evaluation.mistakes, evaluation.classes
    columns = min(_MISTAKE_COLUMNS, len(mistakes))
    rows = -(-len(mistakes) // columns)
    figure = make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=[_caption(mistake, names) for mistake in mistakes],
        horizontal_spacing=0.015,
        vertical_spacing=min(0.3 / rows, 0.45 / max(1, rows - 1)) if rows > 1 else 0,
    )
    for place, mistake in enumerate(mistakes):
        assert mistake.picture is not None
        trace = go.Image(source=_png(mistake.picture), hovertemplate=f"sample {mistake.index}<extra></extra>")
        figure.add_trace(trace, row=place // columns + 1, col=place % columns + 1)
    figure.update_xaxes(visible=False, constrain="domain")
    figure.update_yaxes(visible=False, constrain="domain")
    figure.update_annotations(font={"size": 12})
    return figure.update_layout(
        height=rows * (_MISTAKE_PX + 50) + 130, width=max(640, columns * (_MISTAKE_PX + 15)) + 36
    )


def _caption(mistake: Mistake, names: list[str]) -> str:
    says = f"{escape(names[mistake.predicted])} {mistake.confidence:.1%}"
    return f"<b>{escape(names[mistake.true])}</b><br><span style='color:#c0392b'>{says}</span>"


def _png(picture: Picture) -> str:
    import numpy as np
    import plotly.express as px  # takes long to import

    shape = (picture.height, picture.width, picture.channels)
    pixels = np.frombuffer(picture.pixels, np.uint8).reshape(shape)
    grey = picture.channels == 1
    shown = px.imshow(pixels[:, :, 0] if grey else pixels, binary_string=True, binary_backend="pypng", zmin=0, zmax=255)
    return str(shown.data[0].source)


def mistake_pictures(evaluation: Evaluation) -> dict[int, str]:
    """Returns the images of mistakes as data addresses, by the sample's index."""
    return {one.index: _png(one.picture) for one in evaluation.mistakes if one.picture is not None}


def _mistakes_table(evaluation: Evaluation) -> go.Figure:
    names = [escape(name) for name in evaluation.classes]
    found = evaluation.mistakes
    columns = {
        "sample": [f"{mistake.index}" for mistake in found],
        "true": [names[mistake.true] for mistake in found],
        "predicted": [names[mistake.predicted] for mistake in found],
        "confidence": [f"{mistake.confidence:.1%}" for mistake in found],
    }
    header = {"values": [f"<b>{name}</b>" for name in columns], "fill": {"color": "#e4e7eb"}, "height": 30}
    cells = {"values": list(columns.values()), "fill": {"color": "white"}, "height": 26}
    rows = {"type": "table", "header": {**header, "align": "left"}, "cells": {**cells, "align": "left"}}
    return draw([rows], {"height": 150 + 30 * (len(found) + 1), "width": 700})


def write_mistakes(evaluation: Evaluation, path: Path, shared_script: Path | None = None) -> None:
    write_page(path, f"Mistakes: {evaluation.run}", mistakes_figure(evaluation), shared_script=shared_script)


def residuals_figure(evaluation: Evaluation) -> go.Figure:
    """Returns for each target the predictions against the true values, and a histogram of the residuals."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    assert evaluation.regression is not None
    targets = evaluation.regression.targets
    titles = [
        f"{escape(target.name)}: {title}" for target in targets for title in ("predicted against true", "residuals")
    ]
    spacing = min(0.12, 0.3 / len(targets))
    figure = make_subplots(rows=len(targets), cols=2, subplot_titles=titles, vertical_spacing=spacing)
    for row, target in enumerate(targets, 1):
        low, high = min(*target.true, *target.predicted), max(*target.true, *target.predicted)
        points = go.Scatter(
            x=target.true, y=target.predicted, mode="markers", marker={"color": _POINT_COLOR, "size": 5, "opacity": 0.5}
        )
        line = go.Scatter(x=[low, high], y=[low, high], mode="lines", line={"color": _LINE_COLOR}, hoverinfo="skip")
        edges = target.histogram_edges
        bars = go.Bar(
            x=[(left + right) / 2 for left, right in pairwise(edges)],
            y=target.histogram_samples,
            width=[right - left for left, right in pairwise(edges)],
            marker={"color": _BAR_COLOR},
        )
        figure.add_trace(line, row=row, col=1)
        figure.add_trace(points, row=row, col=1)
        figure.add_trace(bars, row=row, col=2)
        figure.update_xaxes(title_text="true", row=row, col=1)
        figure.update_yaxes(title_text="predicted", row=row, col=1)
        figure.update_xaxes(title_text="true − predicted", row=row, col=2)
        figure.update_yaxes(title_text="samples", row=row, col=2)
    note = f"{evaluation.samples:,} samples; points on the grey line are exact"
    style_figure(figure, f"Residuals on {evaluation.on} data", note)
    return figure.update_layout(height=_RESIDUALS_PX * len(targets) + 100, width=1000, showlegend=False, bargap=0)


def write_residuals(evaluation: Evaluation, path: Path, shared_script: Path | None = None) -> None:
    write_page(path, f"Residuals: {evaluation.run}", residuals_figure(evaluation), shared_script=shared_script)


def evaluation_section(evaluation: Evaluation, pictures: Mapping[int, str]) -> Section:
    """Returns the figures, the classes, the confusion matrix and the worst mistakes.

    Args:
        pictures: data addresses of PNG images by a sample's index.
    """
    named = [("loss", f"{evaluation.loss:.4f}"), *((name, f"{v:.4f}") for name, v in evaluation.metrics.items())]
    what = f"{evaluation.samples:,} samples of the {evaluation.on} data, {evaluation.weights} weights"
    blocks = [text(f"{what} (epoch {evaluation.epoch})."), *tiles(named)]
    blocks += [text(evaluation.note)] if evaluation.note else []
    if evaluation.confusion:
        blocks += [
            heading("Classes"),
            _class_table(evaluation),
            heading("Confusion matrix"),
            *figures([confusion_figure(evaluation)], "tall"),
        ]
    blocks += [heading("Errors"), _errors(evaluation.regression)] if evaluation.regression else []
    if evaluation.mistakes:
        blocks += [heading("Worst mistakes"), *_mistakes(evaluation, pictures)]
    return Section("evaluation", "Evaluation", blocks)


def _class_table(evaluation: Evaluation) -> Block:
    columns: dict[str, list[float | None]] = {
        "accuracy": evaluation.accuracy_per_class,
        "precision": evaluation.precision_per_class,
        "recall": evaluation.recall_per_class,
        "F1": evaluation.f1_per_class,
    }
    known = {name: values for name, values in columns.items() if len(values) == len(evaluation.classes)}
    rows = [
        (
            name,
            f"{sum(evaluation.confusion[place]):,}",
            *(_percent(values[place]) for values in known.values()),
        )
        for place, name in enumerate(evaluation.classes)
    ]
    return table("Classes", ("class", "samples", *known), rows, numbers=range(1, 2 + len(known)))


def _mistakes(evaluation: Evaluation, pictures: Mapping[int, str]) -> list[Block]:
    named = [
        {
            "index": one.index,
            "true": _class_name(evaluation, one.true),
            "predicted": _class_name(evaluation, one.predicted),
            "confidence": f"{one.confidence:.1%}",
            "address": pictures.get(one.index, ""),
        }
        for one in evaluation.mistakes
    ]
    pictured = [one for one in named if _PNG.fullmatch(str(one["address"]))]
    for one in pictured:
        one["alt"] = f"sample {one['index']}: {one['true']}, taken for {one['predicted']}"
    blocks: list[Block] = [{"kind": "mistakes", "mistakes": pictured}] if pictured else []
    rest = [one for one in named if one not in pictured]
    rows = [(one["index"], one["true"], one["predicted"], one["confidence"]) for one in rest]
    return (
        [*blocks, table("Mistakes", ("sample", "true", "predicted", "confidence"), rows, numbers=(0, 3))]
        if rows
        else blocks
    )


def _class_name(evaluation: Evaluation, number: int) -> str:
    return evaluation.classes[number] if 0 <= number < len(evaluation.classes) else str(number)
