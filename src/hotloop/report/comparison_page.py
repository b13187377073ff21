"""Shows a comparison of runs: tables for a terminal, and a page with the curves over each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hotloop.core.files.run_folder import StoredRun
from hotloop.report.report_page import Block, Section, figures, lines, render, table, text
from hotloop.report.run_comparison import Comparison
from hotloop.report.run_curves import overlaid_figures

_MAX_NAMED_COLUMNS = 3


def comparison_tables(comparison: Comparison) -> RenderableType:
    """Returns the tables; many runs are columns by number, with their names above."""
    names: list[RenderableType] = []
    if len(comparison.names) > _MAX_NAMED_COLUMNS:
        numbers = {name: f"run {number}" for number, name in enumerate(comparison.names, 1)}
        names = [Text(f"{number}: {name}") for name, number in numbers.items()]
        groups = [replace(group, runs=[numbers[name] for name in group.runs]) for group in comparison.groups]
        comparison = replace(comparison, names=list(numbers.values()), groups=groups)
    shown = [_rich(block) for block in _tables(comparison) if block["rows"]]
    return Group(*names, *shown, *(Text(line) for line in comparison_lines(comparison)))


def comparison_report(comparison: Comparison, runs: Sequence[StoredRun]) -> str:
    """Returns the HTML of the comparison's page."""
    settings, shown, groups, differences = _tables(comparison)
    numbered = [f"{number}: {name}" for number, name in enumerate(comparison.names, 1)]
    sections = [
        Section("difference", "Settings that differ", [settings] if settings["rows"] else [text("None.")]),
        Section("figures", "Figures", [shown]),
        Section("groups", "Groups", [groups, differences, *lines(comparison_lines(comparison))]),
        Section("curves", "Curves", figures(overlaid_figures(runs, numbered, 600)) or [text("No figures yet.")]),
    ]
    values: dict[str, Any] = dict(state="", failure=None, next_step=None)
    heading = f"Comparison of {len(runs)} runs"
    damages = [damage for run in runs for damage in run.damages]
    subtitle = ", ".join(comparison.names)
    return render(
        "report.html.j2", sections, title=heading, heading=heading, subtitle=subtitle, damages=damages, **values
    )


def _tables(comparison: Comparison) -> tuple[Block, Block, Block, Block]:
    numbers = range(1, len(comparison.names) + 1)
    settings = table(
        "Settings that differ",
        ("setting", *comparison.names),
        [(name, *map(_setting, values)) for name, values in comparison.settings.items()],
    )
    shown = table(
        "Figures",
        ("figure", *comparison.names),
        [(name, *("-" if v is None else f"{v:.5g}" for v in values)) for name, values in comparison.figures.items()],
        numbers=numbers,
    )
    groups = table(
        _groups_title(comparison),
        ("group", "runs", "seeds", *_mean_names(comparison)),
        [
            (
                group.name,
                ", ".join(group.runs),
                ", ".join("the Task's" if seed is None else str(seed) for seed in group.seeds),
                *(_mean(group.figures.get(name, [])) for name in _mean_names(comparison)),
            )
            for group in comparison.groups
        ],
    )
    rows = [
        (
            one.group,
            one.figure,
            f"{one.difference:+.4g}",
            "" if one.low is None else f"{one.low:+.4g} to {one.high:+.4g}",
            one.verdict.partition(":")[0].partition(" (")[0],
        )
        for one in comparison.differences
    ]
    columns = ("group", "figure", "difference", "95 % interval", "verdict")
    differences = table(f"Differences from group {comparison.groups[0].name}", columns, rows, numbers=(2, 3))
    return settings, shown, groups, differences


def comparison_lines(comparison: Comparison) -> list[str]:
    """Returns the numbers of seeds behind the verdicts, each sentence once."""
    found = []
    for one in comparison.differences:
        _, _, few = one.verdict.partition("noise unknown: ")
        _, _, counts = one.verdict.rpartition(" (")
        found.append(f"Noise unknown: {few}." if few else f"Group {one.group}: {counts.rstrip(')')} compared.")
    found += [
        f"Whether the {group.unknown} of the runs in group {group.name} is the same is unknown."
        for group in comparison.groups
        if group.unknown
    ]
    if len(comparison.groups) == 1:
        group, count = comparison.groups[0], comparison.groups[0].distinct_seeds
        known = "The runs differ in nothing" if not group.unknown else "The runs are not known to differ in anything"
        found.append(f"{known} but seed and machine: one group with {count} different seeds.")
    return list(dict.fromkeys(found))


def _groups_title(comparison: Comparison) -> str:
    if any(group.unknown for group in comparison.groups):
        return "Groups of runs without a known difference but the seed"
    return "Groups of runs that differ only in the seed"


def _mean_names(comparison: Comparison) -> list[str]:
    names = [name for name in comparison.figures if name.startswith(("best epoch: validation", "test "))]
    return names[:3]


def _mean(values: Sequence[float]) -> str:
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.5g}"
    return f"{fmean(values):.5g} ({min(values):.5g} to {max(values):.5g})"


def _setting(value: Any) -> str:
    return "-" if value is None else str(value)


def _rich(block: Block) -> RenderableType:
    shown = Table(title=block["caption"], title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(block["columns"]):
        shown.add_column(Text(column), justify="right" if number in block["numbers"] else "left", overflow="fold")
    for row in block["rows"]:
        shown.add_row(*(Text(cell) for cell in row))
    return shown
