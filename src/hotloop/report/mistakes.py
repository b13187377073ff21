"""Shows the most confident mistakes: a grid of images, or a table for other inputs."""

from __future__ import annotations

from html import escape
from pathlib import Path

import numpy as np
import plotly.express as px
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hotloop.core.records.training import Evaluation, Mistake, Picture
from hotloop.report.html import style_figure, write_page

_COLUMNS = 6
_CELL = 150  # pixels


def mistakes_figure(evaluation: Evaluation) -> go.Figure:
    """Returns the mistakes of an evaluation, worst first."""
    pictured = bool(evaluation.mistakes) and all(mistake.picture is not None for mistake in evaluation.mistakes)
    figure = _grid(evaluation) if pictured else _table(evaluation)
    what = "Most confident mistakes" if evaluation.mistakes else "No mistakes"
    style_figure(figure, f"{what} on {evaluation.on} data", _note(evaluation, pictured))
    return figure.update_layout(margin={"l": 18, "r": 18, "t": 130 if pictured else 90, "b": 20})


def _note(evaluation: Evaluation, pictured: bool) -> str:
    if not evaluation.mistakes:
        return f"{evaluation.samples:,} samples, all classified correctly"
    order = "Black: the true class. Red: the predicted class and its probability. " if pictured else ""
    return f"{order}The worst {len(evaluation.mistakes)} of {evaluation.samples:,} samples."


def _grid(evaluation: Evaluation) -> go.Figure:
    mistakes, names = evaluation.mistakes, evaluation.classes
    columns = min(_COLUMNS, len(mistakes))
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
    return figure.update_layout(height=rows * (_CELL + 50) + 130, width=max(640, columns * (_CELL + 15)) + 36)


def _caption(mistake: Mistake, names: list[str]) -> str:
    says = f"{escape(names[mistake.predicted])} {mistake.confidence:.1%}"
    return f"<b>{escape(names[mistake.true])}</b><br><span style='color:#c0392b'>{says}</span>"


def _png(picture: Picture) -> str:
    shape = (picture.height, picture.width, picture.channels)
    pixels = np.frombuffer(picture.pixels, np.uint8).reshape(shape)
    grey = picture.channels == 1
    shown = px.imshow(pixels[:, :, 0] if grey else pixels, binary_string=True, binary_backend="pypng", zmin=0, zmax=255)
    return str(shown.data[0].source)


def _table(evaluation: Evaluation) -> go.Figure:
    names = [escape(name) for name in evaluation.classes]
    found = evaluation.mistakes
    columns = {
        "sample": [f"{mistake.index}" for mistake in found],
        "true": [names[mistake.true] for mistake in found],
        "predicted": [names[mistake.predicted] for mistake in found],
        "confidence": [f"{mistake.confidence:.1%}" for mistake in found],
    }
    figure = go.Figure(
        go.Table(
            header={
                "values": [f"<b>{name}</b>" for name in columns],
                "fill_color": "#e4e7eb",
                "align": "left",
                "height": 30,
            },
            cells={"values": list(columns.values()), "fill_color": "white", "align": "left", "height": 26},
        )
    )
    return figure.update_layout(height=150 + 30 * (len(found) + 1), width=700)


def write_mistakes(evaluation: Evaluation, path: Path) -> None:
    write_page(path, f"Mistakes: {evaluation.run}", mistakes_figure(evaluation))
