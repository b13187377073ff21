"""Draws the learning curves of a run."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hotloop.core.callback import View
from hotloop.report.html import style_figure, write_page

_COLOURS = {"train": "#3566b8", "validation": "#d9622b"}


def curves_figure(epochs: Sequence[dict[str, Any]]) -> go.Figure:
    """Returns loss and metrics over the epochs, from the rows of a run's `epochs`."""
    metrics = _metrics(epochs)
    figure = make_subplots(rows=1, cols=len(metrics), subplot_titles=[escape(metric) for metric in metrics])
    for column, metric in enumerate(metrics, start=1):
        for part, colour in _COLOURS.items():
            figure_name = f"{part}_{metric}"
            points = [(row["epoch"], row[figure_name]) for row in epochs if row.get(figure_name) is not None]
            if points:
                x, y = zip(*points, strict=True)
                trace = go.Scatter(
                    x=x,
                    y=y,
                    name=part,
                    legendgroup=part,
                    showlegend=column == 1,
                    mode="lines+markers",
                    line={"color": colour},
                )
                figure.add_trace(trace, row=1, col=column)
    figure.update_xaxes(title_text="epoch", dtick=1 if len(epochs) <= 12 else None)
    style_figure(figure, "Learning curves")
    return figure.update_layout(height=460, hovermode="x unified")


def _metrics(epochs: Sequence[dict[str, Any]]) -> list[str]:
    names = {
        key.split("_", 1)[1]
        for row in epochs
        for key, value in row.items()
        if key.startswith(("train_", "validation_")) and value is not None
    }
    return sorted(names, key=lambda name: (name != "loss", name))


def write_curves(epochs: Sequence[dict[str, Any]], path: Path) -> None:
    write_page(path, "Learning curves", curves_figure(epochs))


def draw_curves(view: View) -> None:
    """Draws the learning curves into the run's folder when training stops; a callback."""
    if view.event == "stop" and view.history:
        write_curves([record.flat() for record in view.history], view.run / "curves.html")
