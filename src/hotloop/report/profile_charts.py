"""Draws a Profile: the phases of a step, the module tree, and the roofline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import get_args

import plotly.graph_objects as go

from hotloop.core.format import format_flops, format_percent, format_time
from hotloop.core.records.profile import ModuleTime, Profile
from hotloop.core.records.profile_terms import Phase
from hotloop.errors import HotloopError
from hotloop.report.html import style_figure, write_page
from hotloop.report.profile import COLOURS, headline, parent_of

_ROOT = "(model)"
_MAX_NAMED = 6
"""Number of roofline points with a visible name; the others show it on hover."""


def phases_figure(profile: Profile) -> go.Figure:
    """Returns the step as one bar, divided into phases."""
    figure = go.Figure()
    for phase in get_args(Phase):
        took = profile.phases.get(phase)
        if took is None:
            continue
        figure.add_trace(
            go.Bar(
                x=[took],
                y=["step"],
                orientation="h",
                name=f"{phase} {format_time(took)}",
                marker={"color": COLOURS[phase]},
                hovertemplate=f"{phase}: {format_time(took)}<extra></extra>",
            )
        )
    figure.update_layout(barmode="stack", height=320, legend={"orientation": "h", "y": -0.4, "traceorder": "normal"})
    figure.update_xaxes(title_text="milliseconds")
    figure.update_yaxes(showticklabels=False)
    return style_figure(figure, "Where a step's time goes", headline(profile))


def modules_figure(profile: Profile) -> go.Figure:
    """Returns the module tree: widths are forward and backward times, colours are shares of the step."""
    names = {one.name for one in profile.modules}
    ids = [one.name or _ROOT for one in profile.modules]
    figure = go.Figure(
        go.Icicle(
            ids=ids,
            labels=[escape(one.name.rpartition(".")[2] or one.kind) for one in profile.modules],
            parents=[_parent_id(one.name, names) for one in profile.modules],
            values=[_own_ms(one, profile.modules) for one in profile.modules],
            branchvalues="remainder",
            sort=False,
            tiling={"orientation": "v"},
            marker={"colors": [one.share for one in profile.modules], "colorscale": "Blues", "cmin": 0, "cmax": 1},
            customdata=[[escape(_hover_text(one))] for one in profile.modules],
            hovertemplate="%{customdata[0]}<extra></extra>",
            texttemplate="%{label}<br>%{customdata[0]}",
        )
    )
    style_figure(figure, "Time of each module, forward and backward", headline(profile))
    return figure.update_layout(margin={"l": 18, "r": 18, "b": 18})


def _parent_id(name: str, names: set[str]) -> str:
    """Returns the parent's id; empty at the top, and for a model among several, such as `generator`."""
    above = parent_of(name, names) if name else None
    return "" if above is None else above or _ROOT


def _own_ms(one: ModuleTime, modules: Sequence[ModuleTime]) -> float:
    """Returns the time without inner modules: as measured, else the time minus the children's."""
    if one.own_forward_ms is not None and one.own_backward_ms is not None:
        return max(0.0, one.own_forward_ms + one.own_backward_ms)
    names = {other.name for other in modules}
    inside = sum(_total_ms(other) for other in modules if other.name and parent_of(other.name, names) == one.name)
    return max(0.0, _total_ms(one) - inside)


def _total_ms(one: ModuleTime) -> float:
    return (one.forward_ms or 0.0) + (one.backward_ms or 0.0)


def _hover_text(one: ModuleTime) -> str:
    parts = [f"{one.kind}, {format_time(_total_ms(one))}, {format_percent(one.share)} of the step"]
    parts += [format_flops(one.flops)] * (one.flops is not None)
    parts += [f"{format_percent(one.limit_share)} of the limit"] * (one.limit_share is not None)
    return ", ".join(parts)


def roofline_figure(profile: Profile) -> go.Figure:
    """Returns the modules' FLOP/s against FLOPs per byte, below the machine's measured limits."""
    leaves = [one for one in _leaf_modules(profile.modules) if one.flops and one.bytes and _total_ms(one)]
    named = {one.name for one in sorted(leaves, key=lambda one: -one.share)[:_MAX_NAMED]}
    figure = go.Figure()
    intensities = [(one.flops or 0.0) / (one.bytes or 1.0) for one in leaves]
    span = (min([0.05, *intensities]) / 2, max([100.0, *intensities]) * 2)
    bandwidth = profile.limits.bytes_per_s
    for number, (precision, rate) in enumerate(profile.limits.flop_per_s.items()):
        corner = rate / bandwidth if bandwidth else span[0]
        points = [(x, min(rate, x * bandwidth) if bandwidth else rate) for x in sorted({*span, corner}) if x >= span[0]]
        figure.add_trace(
            go.Scatter(
                x=[x for x, _ in points],
                y=[y for _, y in points],
                mode="lines",
                name=f"limit, {precision}",
                line={"color": "#616e7c", "dash": ("solid", "dash", "dot", "dashdot")[number % 4]},
            )
        )
    figure.add_trace(
        go.Scatter(
            x=intensities,
            y=[1000 * (one.flops or 0.0) / _total_ms(one) for one in leaves],
            mode="markers+text",
            name="modules",
            text=[escape(one.name) if one.name in named else "" for one in leaves],
            textposition=[("top center", "bottom center")[number % 2] for number in range(len(leaves))],
            marker={"size": [8 + 40 * min(1.0, one.share) for one in leaves], "color": "#3566b8", "opacity": 0.7},
            customdata=[[escape(f"{one.name}: {_hover_text(one)}")] for one in leaves],
            hovertemplate="%{customdata[0]}<extra></extra>",
        )
    )
    figure.update_xaxes(title_text="FLOPs for each byte", type="log", dtick=1, exponentformat="power")
    figure.update_yaxes(title_text="FLOP/s", type="log", dtick=1, exponentformat="power")
    note = (
        "Limits as measured on this machine; bytes count tensors once, so operations on cached data can be above "
        "a limit."
    )
    return style_figure(figure, "Share of this machine's limits that modules reach", note).update_layout(height=560)


def _leaf_modules(modules: Sequence[ModuleTime]) -> list[ModuleTime]:
    names = {one.name for one in modules}
    around = {parent_of(name, names) for name in names if name}
    return [one for one in modules if one.name not in around]


def write_charts(profile: Profile, folder: Path) -> list[Path]:
    """Writes the figures with content, each as one self-contained page."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HotloopError(
            f"{folder} can't be made a folder ({error.strerror})", fix="name another by --pictures"
        ) from error
    known = any(one.flops and one.bytes and _total_ms(one) for one in _leaf_modules(profile.modules))
    pictures: dict[str, tuple[bool, Callable[[Profile], go.Figure]]] = {
        "phases": (bool(profile.phases), phases_figure),
        "modules": (bool(profile.modules), modules_figure),
        "roofline": (known, roofline_figure),
    }
    written = []
    for name, (has_content, draw) in pictures.items():
        if has_content:
            path = folder / f"{name}.html"
            write_page(path, f"{name.capitalize()} of {profile.source}", draw(profile), "--pictures")
            written.append(path)
    return written
