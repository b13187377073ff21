"""Shows a regression's errors: a table, and a page with predictions against targets and residuals."""

from __future__ import annotations

from html import escape
from itertools import pairwise
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots
from rich.table import Table
from rich.text import Text

from hotloop.core.records.training import Evaluation, Regression
from hotloop.report.html import style_figure, write_page

_POINT_COLOR, _BAR_COLOR, _LINE_COLOR = "#2b6cb0", "#4a98c9", "#9aa5b1"
_ROW_HEIGHT_PX = 420


def regression_table(regression: Regression) -> Table:
    """Returns a table of the errors of each target."""
    table = Table(title="Errors per target", title_justify="left", title_style="bold")
    table.add_column("target", overflow="fold")
    for name in ("MAE", "RMSE", "R²", "mean residual", "std of residuals"):
        table.add_column(name, justify="right")
    for target in regression.targets:
        figures = (target.mae, target.rmse, target.r2, target.residual_mean, target.residual_std)
        table.add_row(Text(target.name), *("-" if figure is None else f"{figure:.4g}" for figure in figures))
    return table


def residuals_figure(evaluation: Evaluation) -> go.Figure:
    """Returns for each target the predictions against the true values, and a histogram of the residuals."""
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
    return figure.update_layout(height=_ROW_HEIGHT_PX * len(targets) + 100, width=1000, showlegend=False, bargap=0)


def write_residuals(evaluation: Evaluation, path: Path, shared_script: Path | None = None) -> None:
    write_page(path, f"Residuals: {evaluation.run}", residuals_figure(evaluation), shared_script=shared_script)
