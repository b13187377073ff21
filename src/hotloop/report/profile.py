"""Shows a Profile: on a terminal the phases of a step, modules, operators, the bound, and remedies; the same as figures."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, get_args

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from hotloop.core.format import format_bytes, format_flops, format_percent, format_time
from hotloop.core.records.profile import (
    COUNTS,
    CTRL_C,
    LineTime,
    ModuleTime,
    OperatorTime,
    Profile,
    RareUpdate,
    Remedy,
)
from hotloop.core.records.profile_terms import Phase
from hotloop.errors import HotloopError
from hotloop.report.blocks import Block, Section, figures, heading, lines, table, text
from hotloop.report.html import draw, style_figure, write_page

COLOURS: dict[str, str] = {
    "data": "#d9622b",
    "batch": "#e39a6f",
    "copy": "#b8860b",
    "forward": "#3566b8",
    "loss": "#7aa0dc",
    "backward": "#2a9d6f",
    "update": "#8a4fbf",
    "logging": "#c75b8b",
    "synchronisation": "#b03a2e",
    "waiting": "#e0a030",
    "communication": "#5d6d7e",
    "python": "#b7950b",
    "unattributed": "#9aa5b1",
}
_MODULES, _OPERATORS, _LINES, _REMEDIES, _NOTES, _RANKS = 24, 10, 12, 8, 5, 16
"""Numbers of shown rows; --json has all."""
NOTHING = "Nothing was found that would win more than a few percent."
NOTHING_IN_TASK = "Nothing was found in the Task itself that would win more than a few percent; other plans may win."
_MARKS = ("Optimizer.step#", "Optimizer.zero_grad#")
"""Names of marks in torch's profiler that aren't operators."""
_MIN_MODULE_SHARE = 0.05
"""Least share of a rare update's time for a phase to be named."""
_SMALL = 0.005
"""Least share of the step for a module to get a row."""


def profile_page(profile: Profile, module: str | None = None) -> RenderableType:
    """Returns the whole page, the most important last, at the prompt.

    Args:
        module: the module whose operators are shown; None for all.
    """
    busy = [Text(profile.busy, style="bold")] if profile.busy else []
    parts: list[RenderableType] = [*busy, Text(headline(profile), style="bold"), *map(Text, _circumstances(profile))]
    if profile.phases:
        parts += [Text(), phases_table(profile)]
    if profile.ranks:
        parts += [Text(), ranks_table(profile)]
    parts += [Text(line) for line in _irregular_time(profile)]
    if profile.modules:
        parts += [Text(), modules_table(profile)]
    parts += [Text(line) for line in _updates(profile)]
    if profile.operators:
        parts += [Text(), operators_table(profile, module)]
    elif profile.lines:
        parts += [Text(), lines_table(profile.lines)]
    if profile.functions:
        parts += [Text(), lines_table(profile.functions, "function, with all of its lines")]
    return Group(*parts, *_verdict(profile), *_remedies(profile), Text(), *map(Text, _endnotes(profile)))


def headline(profile: Profile) -> str:
    under = f" ({profile.plan})" if profile.plan else ""
    what = f"{profile.source}{under} on {profile.device}"
    if profile.step_ms is None:
        return f"{what}: no single training steps were found"
    samples = profile.samples_per_step
    rate = f", {1000 * samples / profile.step_ms:,.0f} samples/s" if samples else ""
    return f"{what}: a step takes {format_time(profile.step_ms)}{rate} (median of {profile.steps:,})"


def _circumstances(profile: Profile) -> Iterator[str]:
    if profile.batch:
        of_one = " on rank 0, whose phases, modules and operators these are" if profile.ranks else ""
        yield f"batch {', '.join(profile.batch)}{of_one}"
    if profile.step_where:
        yield f"a step ends at {relative_place(profile.step_where)}"


def relative_place(where: str) -> str:
    """Returns a place relative to the current folder; other places and names of modules stay."""
    try:
        return str(Path(where).relative_to(Path.cwd()))
    except ValueError:
        return where


def _short(where: str) -> str:
    return where.replace("\\", "/").rpartition("/")[2]


def step_phases(profile: Profile) -> list[tuple[str, float]]:
    """Returns the phases of a step in their order, with their milliseconds."""
    return [(phase, profile.phases[phase]) for phase in get_args(Phase) if phase in profile.phases]


def phases_table(profile: Profile) -> Table:
    """Returns a table with a bar for each phase; all bars together are the step."""
    shown = Table.grid(padding=(0, 1), expand=True)
    shown.add_column(no_wrap=True)
    shown.add_column(ratio=1)
    shown.add_column(justify="right", no_wrap=True)
    shown.add_column(justify="right", no_wrap=True)
    total = sum(profile.phases.values()) or 1.0
    begin = 0.0
    for phase, took in step_phases(profile):
        bar = Bar(total, begin, begin + took, color=COLOURS[phase])
        shown.add_row(Text(phase), bar, Text(format_time(took)), Text(format_percent(took / total)))
        begin += took
    return shown


def _wide_table(first: str, numbers: Sequence[str]) -> Table:
    columns = [Column(first, ratio=1, no_wrap=True), *(Column(name, justify="right", no_wrap=True) for name in numbers)]
    return Table(*columns, box=None, padding=(0, 1, 0, 0), header_style="bold", expand=True)


def ranks_table(profile: Profile) -> Table:
    """Returns a row for each rank: waiting, communication and its own work."""
    shown = _wide_table("rank", ("waiting", "communication", "own work", "most of it"))
    for rank, one in enumerate(profile.ranks[:_RANKS]):
        own = {name: ms for name, ms in one.phases.items() if name not in ("waiting", "communication")}
        most = max(own, key=own.__getitem__, default=None)
        spent = [format_time(one.phases.get("waiting", 0.0)), format_time(one.phases.get("communication", 0.0))]
        cells = [*spent, format_time(sum(own.values())), "" if most is None else f"{most} {format_time(own[most])}"]
        shown.add_row(*map(Text, [f"{rank} slowest" if rank == profile.slowest else f"{rank}", *cells]))
    if len(profile.ranks) > _RANKS:
        shown.add_row(Text(f"{len(profile.ranks) - _RANKS} more", style="dim"))
    return shown


def _irregular_time(profile: Profile) -> Iterator[str]:
    apart = profile.apart
    named = (
        ("warm-up", apart.warm_up_s),
        ("compiling", apart.compile_s),
        ("evaluation", apart.evaluation_s),
        ("checkpoints", apart.checkpoint_s),
        ("other work between steps", apart.other_s),
    )
    said = [f"{name} {format_time(1000 * seconds)}" for name, seconds in named if seconds >= 0.01]
    if said:
        yield f"Apart from steps: {', '.join(said)}."
    for one in apart.updates:
        yield f"Every {one.every:.3g} steps {one.kind} steps as well, at {one.where}{_describe_longer_step(one)}."


def _describe_longer_step(one: RareUpdate) -> str:
    """Returns by how much a rare update lengthens a step, with the phases, the largest first."""
    if one.ms is None:
        return ""
    most = sorted(one.phases.items(), key=lambda phase: -phase[1])
    parts = [f"{name} {format_time(ms)}" for name, ms in most if ms >= _MIN_MODULE_SHARE * one.ms]
    return f": {format_time(one.ms)} more" + (f", of which {', '.join(parts)}" if parts else "")


def modules_table(profile: Profile) -> Table:
    """Returns the module tree by name; small modules are counted in one row."""
    shown = _wide_table("module", ("forward", "backward", "share", "FLOPs", "bytes", "of limit"))
    rows = modules_to_show(profile.modules)
    for one in rows:
        share = format_percent(one.share)
        more = [share, format_flops(one.flops), format_bytes(one.bytes), format_percent(one.limit_share)]
        cells = (_label(one, profile.modules), format_time(one.forward_ms), format_time(one.backward_ms), *more)
        shown.add_row(*(Text(cell) for cell in cells))
    left = len(profile.modules) - len(rows)
    if left:
        shown.add_row(Text(f"{left} more, each below {format_percent(_min_share(rows))}", style="dim"))
    return shown


def modules_to_show(all_modules: Sequence[ModuleTime]) -> list[ModuleTime]:
    """Returns the modules with the largest shares and the modules around them, in the network's order."""
    ranked = sorted((one for one in all_modules if one.share >= _SMALL), key=lambda one: -one.share)[:_MODULES]
    names = {one.name for one in ranked}
    names |= {other.name for one in ranked for other in all_modules if _is_inside(one.name, other.name)}
    return [one for one in all_modules if one.name in names]


def _min_share(rows: Sequence[ModuleTime]) -> float:
    return max(_SMALL, min(one.share for one in rows)) if len(rows) >= _MODULES else _SMALL


def _is_inside(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


def parent_of(name: str, names: set[str]) -> str | None:
    """Returns the nearest of the named modules around a module; lists of modules are never called, so never named."""
    while name:
        name = name.rpartition(".")[0]
        if name in names:
            return name
    return None


def _label(one: ModuleTime, all_modules: Sequence[ModuleTime]) -> str:
    """Returns the module's name indented by its depth, its class, and its number of calls if not 1."""
    names = {other.name for other in all_modules}
    depth, above = 0, parent_of(one.name, names) if one.name else None
    around = above
    while around is not None:
        depth, around = depth + 1, parent_of(around, names) if around else None
    own = one.name.removeprefix(f"{above}.") if above else one.name or "the model"
    calls = "" if one.calls in (0, 1) else f" x{one.calls:g}"
    shared = " *" if one.fused_with else ""
    return f"{'  ' * depth}{own} {one.kind}{calls}{shared}"


def _updates(profile: Profile) -> Iterator[str]:
    """Yields the update time of each optimizer and parameter group, as far as torch separates them."""
    if any(one.fused_with for one in profile.modules):
        yield "* shares a kernel with others; its time was split by their arithmetic."
    for one in profile.optimizers:
        how = f" ({one.implementation})" if one.implementation else ""
        place = f" at {_short(one.where)}" if one.where else ""
        yield f"Update by {one.kind}{how}{place}: {format_time(one.ms)} a step."
        for group in one.groups if len(one.groups) > 1 or any(group.ms is not None for group in one.groups) else []:
            took = "in one call with the others" if group.ms is None else format_time(group.ms)
            yield f"  group {group.name}: {group.tensors} tensors, {group.numbers:,} numbers, {took}"
    update_ms = profile.phases.get("update", 0.0)
    rest_ms = update_ms - sum(one.ms for one in profile.optimizers)
    if profile.optimizers and rest_ms > _MIN_MODULE_SHARE * update_ms:
        yield f"The rest of the update (zero_grad, clipping, schedules): {format_time(rest_ms)} a step."


def operators_table(profile: Profile, module: str | None) -> RenderableType:
    """Returns the operators with the most time, of one module or of all, with shapes and the user's line."""
    rows = [one for one in profile.operators if module in (None, one.module) or _is_inside(one.module, module or "")]
    known = [one for one in rows if not one.name.startswith(_MARKS)]  # the update has its own line
    ranked = sorted(known, key=lambda one: -one.ms)[:_OPERATORS]
    title = "operators" if module is None else f"operators in {module or 'the model'}"
    shown = _wide_table(title, ("calls", "time", "share", "FLOPs", "bytes"))
    for one in ranked:
        share = one.ms / profile.step_ms if profile.step_ms else None
        shown_name = Text.assemble(one.name.removeprefix("aten::"), "\n", (_operator_details(one), "dim"))
        costs = format_percent(share), format_flops(one.flops), format_bytes(one.bytes)
        shown.add_row(shown_name, *map(Text, (f"{one.calls:.3g}", format_time(one.ms), *costs)))
    return shown if ranked else Text(f"No operator of {module!r} was recorded; see the names above.")


def _operator_details(one: OperatorTime) -> str:
    where = f" {_short(one.where)}" if one.where else ""
    inside = f" in {one.module}" if one.module else ""
    return f"  {one.phase}{inside}{where} {' '.join(one.shapes[:3])}"


def lines_table(found: Sequence[LineTime], named: str = "line") -> Table:
    """Returns the user's lines with the most time, or functions by their first lines."""
    shown = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", expand=True)
    shown.add_column(named, ratio=1, overflow="fold")
    shown.add_column("function", overflow="fold")
    shown.add_column("with calls", justify="right", no_wrap=True)
    shown.add_column("own", justify="right", no_wrap=True)
    for one in sorted(found, key=lambda line: -line.own_ms)[:_LINES]:
        cells = (relative_place(one.where), one.function, format_time(one.ms), format_time(one.own_ms))
        shown.add_row(*(Text(cell) for cell in cells))
    return shown


def _verdict(profile: Profile) -> Iterator[RenderableType]:
    if profile.step_ms is None:
        return
    yield Text()
    is_known = profile.bound != "unknown"
    bound = f"Limit of the step: {profile.bound}." if is_known else "The limit of the step is unknown."
    yield Text(bound, style="bold")
    yield from (_indented(sentence) for sentence in profile.bound_evidence)


def _indented(text: str, by: int = 2) -> Padding:
    return Padding(Text(text), (0, 0, 0, by))


def _remedies(profile: Profile) -> Iterator[RenderableType]:
    """Yields the remedies by their gain; remedies of little gain follow in a line each."""
    counted = [one for one in profile.remedies if not one.note]
    if counted:
        yield Text()
        yield Text("Remedies, the largest gain first:", style="bold")
    for number, one in enumerate(counted[:_REMEDIES], start=1):
        yield Text(f"{number}. {one.cause}: up to {format_percent(one.gain)} of the step")
        yield from (_indented(text, 3) for text in _details(one))
    if len(counted) > _REMEDIES:
        yield Text(f"{len(counted) - _REMEDIES} more: --json")
    if not counted and profile.step_ms is not None:
        yield Text(NOTHING_IN_TASK if profile.plan else NOTHING)
    yield from (Text(line) for line in profile.advice)
    notes = _alternate_causes([one for one in profile.remedies if one.note])
    for one in notes[:_NOTES]:
        said = f"{one.cause}, {_format_place(one.where)} ({format_percent(one.gain)} of the step)"
        yield Text(f"Costs little here: {said}." if one.gain < COUNTS else f"Perhaps: {said}: {one.remedy}.")
    if len(notes) > _NOTES:
        yield Text(f"{len(notes) - _NOTES} more that cost little here: --json")


def _alternate_causes(notes: list[Remedy]) -> list[Remedy]:
    """Reorders notes so that each cause takes turns: no cause hides behind many notes of another."""
    turns: Counter[str] = Counter()
    numbered = []
    for one in notes:
        cause = one.cause.partition(":")[0]
        numbered.append((turns[cause], one))
        turns[cause] += 1
    return [one for _, one in sorted(numbered, key=lambda pair: pair[0])]


def _format_place(where: str) -> str:
    if where.rpartition(":")[2].isdigit() and ":" in where:
        return f"at {relative_place(where)}"
    return f"in {relative_place(where)}" if where.endswith(".py") else f"in the module {where or '(the model)'}"


def _details(one: Remedy) -> Iterator[str]:
    if one.where:
        yield _format_place(one.where)
    yield one.remedy
    if one.axes:
        yield "plan: " + " ".join(f"--set {axis}={str(value).lower()}" for axis, value in one.axes.items())
    if one.evidence:
        yield one.evidence
    if one.won is not None:
        ratio, low, high = one.won
        yield f"raced: {ratio:.2f} times as fast ({low:.2f} to {high:.2f})"


def _endnotes(profile: Profile) -> Iterator[str]:
    if profile.attributed is not None and profile.attributed < 0.995:
        yield f"{format_percent(1 - profile.attributed)} of the step is unattributed."
    if profile.overhead is not None:
        over = profile.overhead
        yield (
            f"Recording made a step {over.ratio:.3f} times as long (95 %: {over.low:.3f} to {over.high:.3f}; "
            f"{over.instrumented} recorded steps, and {over.clean} unrecorded steps in turn)."
        )
    if profile.trace:
        yield f"Trace of a few steps: {relative_place(profile.trace)} (open it in ui.perfetto.dev or chrome://tracing)."
    if profile.stopped:
        ended = "Measuring ended early" if profile.stopped == CTRL_C else "Recording ended before the script"
        yield f"{ended}: {profile.stopped}."
    if profile.exit_code:
        yield f"The script {_describe_exit(profile.exit_code)}."
    yield from (f"Note: {note}" for note in profile.notes)


def _describe_exit(code: int) -> str:
    return f"ended with exit code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"


def profile_section(profile: Profile) -> Section:
    """Returns the phases of a step, what bounds the step, the remedies, the modules and the operators."""
    return Section("profile", "Profile", list(_profile_blocks(profile)))


def _profile_blocks(profile: Profile) -> Iterator[Block]:
    yield text(headline(profile))
    if profile.bound != "unknown":
        yield text(f"Bound by {profile.bound}.")
    yield from lines([*profile.bound_evidence, *profile.notes, *filter(None, [profile.busy, profile.stopped])])
    if profile.phases:
        yield from figures([phases_figure(profile)], "low")
    yield from _remedy_blocks("Remedies", profile.remedies)
    yield from _remedy_blocks("To be measured", profile.candidates)
    yield from lines(profile.advice)
    if profile.modules:
        yield from figures([modules_figure(profile)], "tall")
        rows = sorted(profile.modules, key=lambda one: -one.share)[:60]
        yield table(
            "Modules by time",
            ("module", "kind", "share", "forward", "backward", "FLOPs"),
            [
                (
                    one.name or "the model",
                    one.kind,
                    format_percent(one.share),
                    format_time(one.forward_ms),
                    format_time(one.backward_ms),
                    format_flops(one.flops),
                )
                for one in rows
            ],
            numbers=(2, 3, 4, 5),
        )
    if profile.operators:
        yield heading("Operators")
        yield table(
            "Operators by time",
            ("operator", "phase", "module", "line", "time"),
            [
                (one.name, one.phase, one.module, one.where, format_time(one.ms))
                for one in sorted(profile.operators, key=lambda one: -one.ms)[:25]
            ],
            numbers=(4,),
        )


def _remedy_blocks(title: str, remedies: Sequence[Remedy]) -> list[Block]:
    return [heading(title), remedies_table(title, remedies)] if remedies else []


def remedies_table(title: str, remedies: Sequence[Remedy]) -> Block:
    rows = [(one.cause, one.where, one.remedy, format_percent(one.gain), one.evidence) for one in remedies]
    return table(title, ("cause", "where", "remedy", "at most", "evidence"), rows, numbers=(3,))


_ROOT = "(model)"
_MAX_NAMED = 6
"""Number of roofline points with a visible name; the others show it on hover."""


def phases_figure(profile: Profile) -> dict[str, Any]:
    """Returns the step as one bar, divided into phases."""
    phases = step_phases(profile)
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "x": [ms],
            "y": ["step"],
            "name": f"{phase} {format_time(ms)}",
            "marker": {"color": COLOURS[phase]},
            "hovertemplate": f"{phase}: {format_time(ms)}<extra></extra>",
        }
        for phase, ms in phases
    ]
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "milliseconds"}},
        "yaxis": {"showticklabels": False},
        "legend": {"orientation": "h", "y": -0.5, "traceorder": "normal"},
        "margin": {"l": 10, "r": 10, "t": 5, "b": 40},
    }
    label = "Phases of a step: " + ", ".join(f"{phase} {format_time(ms)}" for phase, ms in phases)
    return {"title": "Where a step's time goes", "label": label, "data": data, "layout": layout}


def modules_figure(profile: Profile) -> dict[str, Any]:
    """Returns the module tree: widths are forward and backward times, colours are shares of the step."""
    modules, names = profile.modules, {one.name for one in profile.modules}
    tree = {
        "type": "icicle",
        "ids": [one.name or _ROOT for one in modules],
        "labels": [escape(one.name.rpartition(".")[2] or one.kind) for one in modules],
        "parents": [_parent_id(one.name, names) for one in modules],
        "values": [_own_ms(one, modules) for one in modules],
        "branchvalues": "remainder",
        "sort": False,
        "tiling": {"orientation": "v"},
        "marker": {"colors": [one.share for one in modules], "colorscale": "Blues", "cmin": 0, "cmax": 1},
        "customdata": [[escape(_hover_text(one))] for one in modules],
        "hovertemplate": "%{customdata[0]}<extra></extra>",
        "texttemplate": "%{label}<br>%{customdata[0]}",
    }
    title = "Time of each module, forward and backward"
    return {"title": title, "label": "Tree of modules by time", "data": [tree], "layout": {}}


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


def roofline_figure(profile: Profile) -> dict[str, Any]:
    """Returns the modules' FLOP/s against FLOPs per byte, below the machine's measured limits."""
    leaves = _measured_leaves(profile.modules)
    named = {one.name for one in sorted(leaves, key=lambda one: -one.share)[:_MAX_NAMED]}
    intensities = [(one.flops or 0.0) / (one.bytes or 1.0) for one in leaves]
    span = (min([0.05, *intensities]) / 2, max([100.0, *intensities]) * 2)
    bandwidth = profile.limits.bytes_per_s
    data: list[dict[str, Any]] = []
    for number, (precision, rate) in enumerate(profile.limits.flop_per_s.items()):
        corner = rate / bandwidth if bandwidth else span[0]
        xs = [x for x in sorted({*span, corner}) if x >= span[0]]
        dash = ("solid", "dash", "dot", "dashdot")[number % 4]
        data.append(
            {
                "type": "scatter",
                "x": xs,
                "y": [min(rate, x * bandwidth) if bandwidth else rate for x in xs],
                "mode": "lines",
                "name": f"limit, {precision}",
                "line": {"color": "#616e7c", "dash": dash},
            }
        )
    data.append(
        {
            "type": "scatter",
            "x": intensities,
            "y": [1000 * (one.flops or 0.0) / _total_ms(one) for one in leaves],
            "mode": "markers+text",
            "name": "modules",
            "text": [escape(one.name) if one.name in named else "" for one in leaves],
            "textposition": [("top center", "bottom center")[number % 2] for number in range(len(leaves))],
            "marker": {"size": [8 + 40 * min(1.0, one.share) for one in leaves], "color": "#3566b8", "opacity": 0.7},
            "customdata": [[escape(f"{one.name}: {_hover_text(one)}")] for one in leaves],
            "hovertemplate": "%{customdata[0]}<extra></extra>",
        }
    )
    axis = {"type": "log", "dtick": 1, "exponentformat": "power"}
    layout = {
        "xaxis": {"title": {"text": "FLOPs for each byte"}, **axis},
        "yaxis": {"title": {"text": "FLOP/s"}, **axis},
    }
    title = "Share of this machine's limits that modules reach"
    return {"title": title, "label": title, "data": data, "layout": layout}


def _measured_leaves(modules: Sequence[ModuleTime]) -> list[ModuleTime]:
    names = {one.name for one in modules}
    around = {parent_of(name, names) for name in names if name}
    return [one for one in modules if one.name not in around and one.flops and one.bytes and _total_ms(one)]


def write_charts(profile: Profile, folder: Path) -> list[Path]:
    """Writes the figures with content, each as one self-contained page."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HotloopError(
            f"{folder} can't be made a folder ({error.strerror})", fix="name another by --pictures"
        ) from error
    limits_note = (
        "Limits as measured on this machine; bytes count tensors once, so operations on cached data can be above "
        "a limit."
    )
    head = headline(profile)
    pictures: dict[str, tuple[Any, Any, str, dict[str, Any]]] = {
        "phases": (profile.phases, phases_figure, head, {"height": 320, "legend": {"y": -0.4}}),
        "modules": (profile.modules, modules_figure, head, {"margin": {"l": 18, "r": 18, "b": 18}}),
        "roofline": (_measured_leaves(profile.modules), roofline_figure, limits_note, {"height": 560}),
    }
    written = []
    for name, (has_content, make, note, layout) in pictures.items():
        if has_content:
            chart, path = make(profile), folder / f"{name}.html"
            figure = style_figure(draw(chart["data"], chart["layout"]), chart["title"], note)
            title = f"{name.capitalize()} of {profile.source}"
            write_page(path, title, figure.update_layout(layout), "--pictures")
            written.append(path)
    return written
