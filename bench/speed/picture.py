"""A summary as one picture: how many times as fast hotloop is as each peer, workload by workload."""

from __future__ import annotations

from pathlib import Path

from bench.speed.summary import Summary
from hotloop.core.files.atomic_files import write_atomic


def draw(found: Summary, path: Path) -> None:
    """Writes a page; the script that draws it is fetched when it is looked at."""
    import plotly.graph_objects as go

    from hotloop.report.html import style_figure

    figure = go.Figure()
    for name in dict.fromkeys(line.name for lines in found.lines.values() for line in lines if line.ratio):
        lines = {workload: found.line(workload, name) for workload in found.lines}
        ratios = {workload: line.ratio for workload, line in lines.items() if line is not None and line.ratio}
        figure.add_scatter(
            name=name,
            x=list(ratios),
            y=[ratio.median for ratio in ratios.values()],
            error_y={
                "symmetric": False,
                "array": [None if ratio.high is None else ratio.high - ratio.median for ratio in ratios.values()],
                "arrayminus": [None if ratio.low is None else ratio.median - ratio.low for ratio in ratios.values()],
            },
            mode="markers",
            marker={"size": 9},
        )
    figure.add_hline(y=1, line_dash="dot")
    figure.update_layout(scattermode="group", yaxis={"type": "log", "title": "times as fast as the peer"})
    style_figure(
        figure,
        "hotloop's step against others'",
        "Above 1 hotloop is faster; medians of paired windows with 95 % intervals, where there are pairs enough for one",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, figure.to_html(include_plotlyjs="cdn", config={"displaylogo": False, "responsive": True}))
