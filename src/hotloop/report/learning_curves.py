"""Draws the learning curves of a run, and a learning-rate range test."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hotloop.core.callback import View
from hotloop.core.files.run_folder import StoredRun
from hotloop.core.records.study import LearningRateRange
from hotloop.report.html import SCRIPT, log_axis, style_figure, write_page
from hotloop.report.run_curves import epoch_metrics

_COLOURS = {"train": "#3566b8", "validation": "#d9622b"}


def curves_figure(epochs: Sequence[dict[str, Any]], best: tuple[str, int] | None = None) -> go.Figure:
    """Returns loss and metrics over the epochs, from the rows of a run's `epochs`; a schedule has its learning rate.

    Args:
        best: the monitored figure and its best epoch, which gets a star.
    """
    metrics = epoch_metrics(epochs)
    rates = [(row["epoch"], row["learning_rate"]) for row in epochs if row.get("learning_rate") is not None]
    is_scheduled = len({rate for _, rate in rates}) > 1
    titles = [escape(metric) for metric in metrics] + ["learning rate"] * is_scheduled
    figure = make_subplots(rows=1, cols=len(titles), subplot_titles=titles)
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
        _mark_best(figure, epochs, metric, column, best)
    if is_scheduled:
        x, y = zip(*rates, strict=True)
        line = {"color": _COLOURS["train"]}
        figure.add_trace(go.Scatter(x=x, y=y, showlegend=False, mode="lines", line=line), row=1, col=len(titles))
        figure.update_yaxes(rangemode="tozero", row=1, col=len(titles))
    figure.update_xaxes(title_text="epoch", dtick=1 if len(epochs) <= 12 else None)
    style_figure(figure, "Learning curves")
    return figure.update_layout(height=460, hovermode="x unified")


def _mark_best(
    figure: go.Figure, epochs: Sequence[dict[str, Any]], metric: str, column: int, best: tuple[str, int] | None
) -> None:
    if best is None or best[0].split("_", 1)[-1] != metric:
        return
    value = next((row[best[0]] for row in epochs if row["epoch"] == best[1]), None)
    star = {"symbol": "star", "size": 14, "color": "#2a9d6f"}
    trace = go.Scatter(x=[best[1]], y=[value], mode="markers", marker=star, name=f"best: epoch {best[1]}")
    figure.add_trace(trace, row=1, col=column)


def write_curves(
    epochs: Sequence[dict[str, Any]],
    path: Path,
    best: tuple[str, int] | None = None,
    shared_script: Path | None = None,
) -> None:
    write_page(path, "Learning curves", curves_figure(epochs, best), shared_script=shared_script)


def draw_curves(view: View) -> None:
    """Draws the learning curves into the run's folder when training stops; a callback."""
    if view.event == "stop" and view.history:
        run = StoredRun.read(view.run)
        best = None if run.best_epoch is None else (run.monitor[0], int(run.best_epoch["epoch"]))
        sampled = {row["epoch"]: row for row in run.epochs if row.get("train_accuracy") is not None}
        rows = [sampled.get(record.epoch, {}) | record.flat() for record in view.history]
        write_curves(rows, view.run / "curves.html", best, view.run / SCRIPT)


def learning_rate_lines(found: LearningRateRange) -> list[str]:
    """Returns the recommendation and how a second run confirms it."""
    if found.recommended is None:
        return ["no learning rate lowers the loss: check the Task"]
    loss = f"loss {found.first_loss:.4f} to {found.last_loss:.4f}"
    lines = [f"recommended: {found.recommended:.3g}, confirmed by {found.steps} steps with it: {loss}"]
    return [*lines, f"train: {found.command}"] if found.command else lines


def write_learning_rates(path: Path, found: LearningRateRange) -> None:
    """Writes the loss over the learning rate as one page."""
    line = go.Scatter(x=found.rates, y=found.losses, mode="lines", line={"color": "#3566b8"}, name="smoothed loss")
    made = go.Figure(line).update_xaxes(title_text="learning rate", **log_axis(found.rates))
    made.update_yaxes(title_text="smoothed loss")
    if found.recommended is not None:
        made.add_vline(x=found.recommended, line_dash="dash", annotation_text=f"recommended: {found.recommended:.3g}")
    title = f"{found.name}: learning-rate range test"
    write_page(path, title, style_figure(made, title, learning_rate_lines(found)[0]))
