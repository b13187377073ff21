"""Curves of one or several runs as plotly figures in plain dicts, which need no import of plotly."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from hotloop.core.files.run_folder import StoredRun

MAX_POINTS = 2000
"""Points of a curve in a report; a longer curve is thinned, and its extremes stay."""

COLOURS = ("#3b78d8", "#d9622b", "#2a9d6f", "#a060c8", "#b8860b", "#d0457c", "#4a9bb0", "#7a7f87")
"""Each has a contrast of 3 or more on white and on the dark background."""

_GIGABYTE = 1e9

Figure = dict[str, Any]
Points = Sequence[tuple[float, float]]


def run_figures(run: StoredRun, max_points: int = MAX_POINTS) -> list[Figure]:
    """Returns the curves that the run has figures for: loss, metrics, learning rate, gradients, speed, the system."""
    figures = [_metric_figure(run, name, max_points) for name in metric_names([run])]
    return [
        *figures,
        *_optional(
            "Learning rate", "epoch", [("learning rate", points_by_epoch(run, "learning_rate"))], max_points, zero=True
        ),
        *_optional("Gradient norm", "epoch", [("norm", _progress(run, "gradient_norm"))], max_points),
        *_optional("Speed", "epoch", [("samples per second", _speed(run))], max_points, zero=True),
        *_system_figures(run, max_points),
    ]


def overlaid_figures(runs: Sequence[StoredRun], names: Sequence[str], max_points: int = MAX_POINTS) -> list[Figure]:
    """Returns the curves of several runs over each other, a colour for each run: by step, and by time of training."""
    figures = []
    for metric in metric_names(runs):
        for part in ("validation", "train"):
            key = f"{part}_{metric}"
            curves = [points_by_epoch(run, key, "step") for run in runs]
            if not any(curves):
                continue
            title = f"{part} {metric}".replace("_", " ").capitalize()
            figures.append(_figure(title, "step", list(zip(names, curves, strict=True)), max_points))
            timed = [_by_time(run, key) for run in runs]
            figures.append(
                _figure(f"{title} by time", "seconds of training", list(zip(names, timed, strict=True)), max_points)
            )
    for title, key in (("Learning rate", "learning_rate"), ("Gradient norm", "gradient_norm")):
        read = _progress if key == "gradient_norm" else points_by_epoch
        figures += _optional(
            title, "epoch", [(name, read(run, key)) for name, run in zip(names, runs, strict=True)], max_points
        )
    speeds = [(name, _speed(run)) for name, run in zip(names, runs, strict=True)]
    figures += _optional("Speed, samples per second", "epoch", speeds, max_points, zero=True)
    return figures


def metric_names(runs: Iterable[StoredRun]) -> list[str]:
    """Returns the names of metrics without `train_` or `validation_`, the loss first."""
    names = epoch_metrics(row for run in runs for row in run.epochs)
    is_complete = "loss" in names or not any(row.get("loss") is not None for run in runs for row in run.progress)
    return names if is_complete else ["loss", *names]


def epoch_metrics(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Returns the names of metrics in the rows of epochs, the loss first."""
    names = {
        key.split("_", 1)[1]
        for row in rows
        for key, value in row.items()
        if key.startswith(("train_", "validation_")) and value is not None
    }
    return sorted(names, key=lambda name: (name != "loss", name))


def _metric_figure(run: StoredRun, metric: str, max_points: int) -> Figure:
    curves = [(part, points_by_epoch(run, f"{part}_{metric}")) for part in ("train", "validation")]
    if metric == "loss" and not any(points for _, points in curves):  # within the first epoch
        curves = [("train", _progress(run, "loss"))]
    figure = _figure(metric.replace("_", " ").capitalize(), "epoch", curves, max_points)
    best, (monitor, _) = run.best_epoch, run.monitor
    if best is not None and monitor in (f"train_{metric}", f"validation_{metric}"):
        figure["data"].append(_best_point(best["epoch"], best[monitor]))
        figure["label"] += f"; best {monitor.replace('_', ' ')} {best[monitor]:.4g} in epoch {best['epoch']}"
    return figure


def _best_point(epoch: int, value: float) -> dict[str, Any]:
    return {
        "type": "scatter",
        "x": [epoch],
        "y": [value],
        "mode": "markers",
        "name": f"best epoch ({epoch})",
        "marker": {"symbol": "star", "size": 13, "color": COLOURS[2]},
        "hovertemplate": "best: epoch %{x}, %{y:.5g}<extra></extra>",
    }


def _system_figures(run: StoredRun, max_points: int) -> list[Figure]:
    rows = run.system
    if not rows:
        return []
    began = rows[0]["time"]

    def curve(key: str, factor: float = 1.0) -> list[tuple[float, float]]:
        return [(row["time"] - began, row[key] * factor) for row in rows if _is_figure(row.get(key))]

    gpus = sorted({key for row in rows for key in row if key.startswith("gpu")})
    percent = [(key.removesuffix("_percent"), curve(key)) for key in gpus if key.endswith("_percent")]
    memory = [(key.removesuffix("_memory_bytes"), curve(key, 1 / _GIGABYTE)) for key in gpus if key.endswith("_bytes")]
    process = ("training processes", curve("memory_bytes", 1 / _GIGABYTE))
    machine = ("whole machine", curve("machine_memory_bytes", 1 / _GIGABYTE))
    seconds = "seconds since the start"
    disk = [
        (name, curve(f"disk_{key}_bytes_per_s", 1e-6))
        for name, key in (("disk read", "read"), ("disk written", "written"))
    ]
    net = [(name, curve(f"net_{key}_bytes_per_s", 1e-6)) for name, key in (("received", "received"), ("sent", "sent"))]
    return [
        *_optional(
            "Utilisation, percent", seconds, [("CPU, all cores", curve("cpu_percent")), *percent], max_points, zero=True
        ),
        *_optional("Memory, GB", seconds, [process, machine, *memory], max_points, zero=True),
        *_optional("Disk and network, MB per second", seconds, [*disk, *net], max_points, zero=True),
    ]


def _optional(
    title: str,
    x_title: str,
    curves: list[tuple[str, list[tuple[float, float]]]],
    max_points: int,
    *,
    zero: bool = False,
) -> list[Figure]:
    return [_figure(title, x_title, curves, max_points, zero=zero)] if any(points for _, points in curves) else []


def _figure(
    title: str, x_title: str, curves: Sequence[tuple[str, Points]], max_points: int, *, zero: bool = False
) -> Figure:
    """Returns a figure with its `label` for screen readers; names are escaped, since plotly's texts may have markup."""
    finite = [(name, [point for point in points if all(map(math.isfinite, point))]) for name, points in curves]
    shown = [(number, name, thinned(points, max_points)) for number, (name, points) in enumerate(finite) if points]
    data = [
        {
            "type": "scatter",
            "x": [_rounded(x) for x, _ in points],
            "y": [_rounded(y) for _, y in points],
            "name": escape(name),
            "mode": "lines+markers" if len(points) <= 30 else "lines",
            "line": {"color": COLOURS[number % len(COLOURS)], "width": 2},
            "marker": {"size": 5},
        }
        for number, name, points in shown
    ]
    ends = "; ".join(f"{name} {points[0][1]:.4g} to {points[-1][1]:.4g}" for _, name, points in shown)
    y_axis = {"rangemode": "tozero"} if zero else {}
    layout = {
        "xaxis": {"title": {"text": x_title}, **({"dtick": 1} if x_title == "epoch" and _is_short(shown) else {})},
        "yaxis": y_axis,
        "showlegend": len(shown) > 1,
        "hovermode": "x unified",
    }
    return {"title": title, "label": f"{title} over {x_title}: {ends}", "data": data, "layout": layout}


def _is_short(shown: Sequence[tuple[int, str, Points]]) -> bool:
    return max((points[-1][0] for _, _, points in shown), default=0) <= 12


def thinned(points: Points, most: int) -> Points:
    """Returns at most `most` points: of each stretch the smallest and the largest value, so that spikes stay."""
    if len(points) <= most:
        return points
    size = -(-len(points) // max(1, most // 2 - 1))
    kept = [points[0]]
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        ends = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
        kept += sorted(ends)
    return [*kept, points[-1]]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _is_figure(value: Any) -> bool:
    return isinstance(value, int | float) and value == value and abs(value) != float("inf")


def points_by_epoch(run: StoredRun, key: str, x_key: str = "epoch") -> list[tuple[float, float]]:
    return [(row[x_key], row[key]) for row in run.epochs if _is_figure(row.get(key))]


def _by_time(run: StoredRun, key: str) -> list[tuple[float, float]]:
    points, passed_s = [], 0.0
    for row in run.epochs:
        passed_s += row.get("seconds") or 0.0
        if _is_figure(row.get(key)):
            points.append((passed_s, row[key]))
    return points


def _progress(run: StoredRun, key: str) -> list[tuple[float, float]]:
    """Returns the points of progress.jsonl at fractions of epochs."""
    points = []
    for row in run.progress:
        if _is_figure(row.get(key)) and _is_figure(row.get("epoch")):
            share = (row.get("batch") or 0) / row["batches"] if row.get("batches") else 0.0
            points.append((row["epoch"] + min(1.0, share), row[key]))
    return points


def _speed(run: StoredRun) -> list[tuple[float, float]]:
    by_epoch = points_by_epoch(run, "samples_per_s")
    return by_epoch if len(by_epoch) > 1 else _progress(run, "samples_per_s") or by_epoch
