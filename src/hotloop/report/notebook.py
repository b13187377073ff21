"""Tables and small pictures of results for notebooks, as HTML without scripts."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from html import escape
from typing import Any

from hotloop.core.files.run_folder import StoredRun
from hotloop.core.format import format_flops, format_time
from hotloop.core.records.explanation import Explanation
from hotloop.core.records.profile import Profile
from hotloop.core.records.race import Verdict
from hotloop.core.records.training import HTML_VIEWS, Evaluation
from hotloop.report.blocks import Block
from hotloop.report.explanation import summary as explanation_summary
from hotloop.report.explanation import title as layer_title
from hotloop.report.profile import COLOURS as PHASE_COLOURS
from hotloop.report.profile import headline, remedies_table, step_phases
from hotloop.report.progress import format_duration
from hotloop.report.race import plans_table, winner_sentence
from hotloop.report.run_curves import COLOURS, Points, metric_names, points_by_epoch, thinned

_WIDTH, _HEIGHT, _MARGIN = 420, 170, 36
"""Pixels of a picture of curves."""

_MAX_ROWS = 30

_TEXT = "currentColor"
"""The notebook's own ink, which is readable in its light and dark themes."""


def run_html(run: StoredRun) -> str:
    """Returns state, figures, and the curves of the metrics."""
    best, (monitor, _) = run.best_epoch, run.monitor
    pairs = [
        ("run", str(run.path)),
        ("state", f"{run.state} {run.reason if run.state in ('failed', 'stopped') else ''}".strip()),
        ("epochs", f"{len(run.epochs)} of {run.planned_epochs or '?'}"),
        ("best", "" if best is None else f"{monitor.replace('_', ' ')} {best[monitor]:.4g} in epoch {best['epoch']}"),
        *(
            (name, f"{value:.4g}")
            for name, value in (run.final or {}).items()
            if isinstance(value, float) and name != "time"
        ),
        ("plan", run.plan.brief() if run.plan else ""),
        ("time", format_duration(run.seconds)),
    ]
    pictures = []
    for metric in metric_names([run])[:3]:
        curves = [(part, points_by_epoch(run, f"{part}_{metric}")) for part in ("train", "validation")]
        pictures.append(curves_svg(metric.replace("_", " "), curves))
    return _table((), [(name.replace("_", " "), value) for name, value in pairs if value]) + "".join(pictures)


def evaluation_html(evaluation: Evaluation) -> str:
    """Returns the metrics, and the accuracy of each class as a bar."""
    named = [("loss", evaluation.loss), *evaluation.metrics.items()]
    figures = _table((), [(name, f"{value:.4f}") for name, value in named])
    rated = zip(evaluation.classes, evaluation.accuracy_per_class, strict=False)
    bars = [(name, rate or 0.0, "-" if rate is None else f"{rate:.1%}") for name, rate in rated]
    return (
        _sentence(f"{evaluation.samples:,} samples of the {evaluation.on} data") + figures + bars_svg(bars[:_MAX_ROWS])
    )


def verdict_html(verdict: Verdict) -> str:
    """Returns the plans with their speeds, and a bar with its interval for each."""
    timed = [one for one in verdict.plans if one.ratio is not None]
    bars = [(one.name, one.ratio or 0.0, f"{one.ratio:.2f}") for one in timed]
    intervals = [(one.ratio_low or one.ratio or 0.0, one.ratio_high or one.ratio or 0.0) for one in timed]
    return _table_of(plans_table(verdict)) + bars_svg(bars, intervals) + _sentence(winner_sentence(verdict))


def profile_html(profile: Profile) -> str:
    """Returns the phases of a step as one bar, and the remedies."""
    phases = [(phase, ms) for phase, ms in step_phases(profile) if ms]
    total, x, parts, legend = sum(ms for _, ms in phases) or 1.0, 0.0, [], []
    for phase, ms in phases:
        width, colour, shown = 600 * ms / total, PHASE_COLOURS[phase], f"{phase} {format_time(ms)}"
        parts.append(f'<rect x="{x:.1f}" width="{width:.1f}" height="28" fill="{colour}"><title>{shown}</title></rect>')
        legend.append(f'<span style="color:{colour}">■</span> {shown}')
        x += width
    picture = f'<svg role="img" aria-label="phases of a step" width="600" height="28">{"".join(parts)}</svg>'
    remedies = _table_of(remedies_table("Remedies", profile.remedies)) if profile.remedies else ""
    return _sentence(headline(profile)) + picture + f"<p>{' &nbsp; '.join(legend)}</p>" + remedies


def explanation_view(explanation: Explanation) -> str:
    """Returns each layer with its matrices and FLOPs, and whether autograd agrees."""
    rows = [
        (
            layer_title(layer),
            ", ".join(f"{one.name} {'x'.join(map(str, one.shape))}" for one in layer.matrices),
            format_flops(sum(one.flops for one in layer.equations) or None),
            "no" if any(one.agrees is False for one in layer.equations) else "yes" if layer.known else "not explained",
        )
        for layer in explanation.layers[:_MAX_ROWS]
    ]
    lines = "".join(map(_sentence, explanation_summary(explanation)))
    bars = [(layer_title(layer)[:40], sum(one.flops for one in layer.equations)) for layer in explanation.layers]
    shown = [(name, flops, format_flops(flops)) for name, flops in bars if flops][:_MAX_ROWS]
    return _table(("layer", "matrices", "FLOPs", "agrees with autograd"), rows) + bars_svg(shown) + lines


HTML_VIEWS.update(
    {Evaluation: evaluation_html, Verdict: verdict_html, Profile: profile_html, Explanation: explanation_view}
)


def as_data_frame(rows: list[dict[str, Any]]) -> Any:
    """Returns rows as a pandas DataFrame; the rows themselves without pandas."""
    if importlib.util.find_spec("pandas") is None:
        return rows
    import pandas

    return pandas.DataFrame(rows)


def curves_svg(title: str, curves: Sequence[tuple[str, Points]]) -> str:
    """Returns a picture of curves with their smallest and largest values on the axes."""
    shown = [(name, thinned(points, 200)) for name, points in curves if points]
    if not shown:
        return ""
    xs = [x for _, points in shown for x, _ in points]
    ys = [y for _, points in shown for _, y in points]
    low, high = min(ys), max(ys)
    x_span, y_span = (max(xs) - min(xs)) or 1.0, (high - low) or 1.0
    parts = []
    for number, (name, points) in enumerate(shown):
        placed = [
            (
                _MARGIN + (x - min(xs)) / x_span * (_WIDTH - 2 * _MARGIN),
                _HEIGHT - 24 - (y - low) / y_span * (_HEIGHT - 56),
            )
            for x, y in points
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        colour = COLOURS[number]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in placed if len(placed) <= 30
        ]
        parts.append(f'<text x="{_MARGIN + 90 + 90 * number}" y="14" fill="{colour}">{escape(name)}</text>')
    labels = (
        f'<text x="4" y="14" fill="{_TEXT}" font-weight="bold">{escape(title)}</text>'
        f'<text x="4" y="{_HEIGHT - 22}" fill="{_TEXT}">{low:.3g}</text><text x="4" y="36" fill="{_TEXT}">{high:.3g}</text>'
        f'<text x="{_MARGIN}" y="{_HEIGHT - 6}" fill="{_TEXT}">epoch {min(xs):g}</text>'
        f'<text x="{_WIDTH - _MARGIN}" y="{_HEIGHT - 6}" text-anchor="end" fill="{_TEXT}">{max(xs):g}</text>'
    )
    return (
        f'<svg role="img" aria-label="{escape(title)} by epoch" width="{_WIDTH}" height="{_HEIGHT}" font-size="11">'
        f"{labels}{''.join(parts)}</svg>"
    )


def bars_svg(bars: Sequence[tuple[str, float, str]], intervals: Sequence[tuple[float, float]] = ()) -> str:
    """Returns a bar for each `(name, value, text)`, with error bars for `intervals`."""
    if not bars:
        return ""
    largest = max([*(value for _, value, _ in bars), *(high for _, high in intervals)]) or 1.0
    parts = []
    for number, (name, value, shown) in enumerate(bars):
        y, width = 20 * number, 300 * value / largest
        short = name if len(name) <= 26 else f"{name[:25]}…"
        parts.append(f'<text x="0" y="{y + 14}" fill="{_TEXT}">{escape(short)}<title>{escape(name)}</title></text>')
        parts.append(f'<rect x="180" y="{y + 3}" width="{width:.1f}" height="14" fill="{COLOURS[0]}"/>')
        if intervals:
            low, high = (180 + 300 * end / largest for end in intervals[number])
            parts.append(
                f'<path d="M{low:.1f},{y + 10}H{high:.1f}M{low:.1f},{y + 5}v10M{high:.1f},{y + 5}v10" stroke="{_TEXT}"/>'
            )
        parts.append(f'<text x="490" y="{y + 14}" fill="{_TEXT}">{escape(shown)}</text>')
    return f'<svg role="img" aria-label="bars" width="580" height="{20 * len(bars) + 4}" font-size="12">{"".join(parts)}</svg>'


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{f'<thead><tr>{head}</tr></thead>' if columns else ''}<tbody>{body}</tbody></table>"


def _table_of(block: Block) -> str:
    return _table(block["columns"], block["rows"])


def _sentence(line: str) -> str:
    return f"<p>{escape(line)}</p>"
