"""Draws a learning-rate range test."""

from __future__ import annotations

from pathlib import Path

import plotly.graph_objects as go

from hotloop.core.records.study import LearningRateRange
from hotloop.report.html import log_axis, style_figure, write_page


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
