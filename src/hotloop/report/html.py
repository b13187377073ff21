"""A common style of all figures, and self-contained HTML pages."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.core.files.atomic_files import write_atomic

if TYPE_CHECKING:
    import plotly.graph_objects as go  # takes half a second to import

INK = "#1f2933"
LINE_COLOURS = ("#3566b8", "#d9622b", "#2a9d6f", "#8a4fbf", "#b8860b", "#616e7c")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>body {{ margin: 0; padding: 1rem; font-family: {font}; color: {ink}; background: white; }}
.plotly-graph-div {{ min-height: 20rem; }}</style>
</head>
<body>
{figure}
</body>
</html>
"""


SCRIPT = "plotly.min.js"
"""File in a run's folder that the pages of the run share."""

CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "plotlyServerURL": "",
    "showSendToCloud": False,
    "modeBarButtonsToRemove": ["sendDataToCloud", "editInChartStudio"],
}
"""Settings of all pages, which send nothing anywhere."""


def draw(data: Sequence[dict[str, Any]], layout: dict[str, Any]) -> go.Figure:
    """Returns traces and a layout as a figure."""
    import plotly.graph_objects as go

    return go.Figure(list(data), layout)


def style_figure(figure: go.Figure, title: str, note: str = "") -> go.Figure:
    """Sets a figure's title and a line below, both plain text; returns the figure."""
    below = f"<br><span style='font-size:13px;color:#616e7c'>{escape(note)}</span>" if note else ""
    figure.update_layout(
        template="plotly_white",
        title={
            "text": escape(title) + below,
            "xref": "container",
            "yref": "container",
            "x": 0,
            "y": 1,
            "xanchor": "left",
            "yanchor": "top",
            "pad": {"t": 18, "l": 18},
        },
        font={"family": FONT, "color": INK},
        margin={"l": 60, "r": 30, "t": 90, "b": 60},
    )
    return figure


def log_axis(values: Iterable[float]) -> dict[str, Any]:
    """Returns the settings of a logarithmic axis for positive values, with at most some ten ticks as plain numbers.

    plotly's own ticks between powers of ten are single digits without their power.
    """
    positive = [value for value in values if value > 0]
    low, high = (math.log10(min(positive)), math.log10(max(positive))) if positive else (0.0, 1.0)
    first, last = math.floor(low), math.ceil(high)
    factors = (1, 2, 5) if high - low <= 3 else (1,)
    step = max(1, (last - first) // 8)
    ticks = [factor * 10.0**power for power in range(first, last + 1, step) for factor in factors]
    texts = [f"{tick:,.10g}" if 1e-4 < tick < 1e7 else f"{tick:.0e}" for tick in ticks]
    return {"type": "log", "tickvals": ticks, "ticktext": texts}


def write_page(
    path: Path, title: str, figure: go.Figure, option: str | None = None, shared_script: Path | None = None
) -> None:
    """Writes a figure as a page for any browser, also offline; errors name the command's `option`.

    A figure without a height fills the window.

    Args:
        shared_script: file of plotly's script, in the page's folder or above, which is written once and shared by pages;
            None for a page that needs no other file.
    """
    from plotly.offline import get_plotlyjs

    source: bool | str = True
    if shared_script is not None:
        script = get_plotlyjs().encode()
        if not shared_script.is_file() or shared_script.stat().st_size != len(script):
            write_atomic(shared_script, script, option)
        source = Path(os.path.relpath(shared_script, path.parent)).as_posix()
    drawn = figure.to_html(include_plotlyjs=source, full_html=False, config=CONFIG, default_height="calc(100vh - 2rem)")
    write_atomic(path, _PAGE.format(title=escape(title), font=FONT, ink=INK, figure=drawn), option)
