"""Compares runs: settings that differ, figures, groups that differ only in the seed, and the noise of seeds.

The comparison is shown as tables for a terminal, and as a page with the curves over each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median, variance
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.text import Text

from hotloop.core.files.run_folder import StoredRun
from hotloop.report.blocks import Block, Section, figures, lines, report_page, table, terminal_table, text
from hotloop.report.run_curves import overlaid_figures

MIN_SEEDS = 3
"""Runs with different seeds that a group needs before its spread says something."""

CONFIDENCE = 0.95

Settings = dict[str, Any]


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in their seed.

    Attributes:
        name: of the group, `A` for the first.
        runs: names.
        seeds: of the runs; None for the Task's own seed.
        figures: values by the figure's name, one for each run that has it.
        unknown: what may differ beside the seed, as runs don't record it; empty if nothing may.
    """

    name: str
    runs: list[str]
    seeds: list[Any]
    figures: dict[str, list[float]]
    unknown: str = ""

    @property
    def distinct_seeds(self) -> int:
        return len({str(seed) for seed in self.seeds})


@dataclass(frozen=True)
class FigureDifference:
    """A figure of a group against the first group's.

    Attributes:
        difference: of the means, the group's minus the first group's.
        low, high: 95 % interval (Welch); None with too few seeds.
        verdict: one sentence.
    """

    group: str
    figure: str
    difference: float
    low: float | None
    high: float | None
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """The result of `compare_runs`.

    Attributes:
        names: of the runs, as short as they stay different.
        settings: values of the settings that differ, in the order of `names`; None where a run lacks the setting.
        figures: values by figure, in the order of `names`.
    """

    names: list[str]
    settings: dict[str, list[Any]]
    figures: dict[str, list[float | None]]
    groups: list[RunGroup]
    differences: list[FigureDifference] = field(default_factory=list)


def compare_runs(runs: Sequence[StoredRun]) -> Comparison:
    names = [str(run.path) for run in runs]
    settings = [run_settings(run) for run in runs]
    figures = [run_figures(run) for run in runs]
    keys = list(dict.fromkeys(key for one in settings for key in one))
    differing = {
        key: [one.get(key) for one in settings]
        for key in keys
        if any(one.get(key) != settings[0].get(key) for one in settings)
    }
    named = list(dict.fromkeys(key for one in figures for key in one))
    groups = _groups(names, settings, figures, [_unknown_parts(run) for run in runs])
    return Comparison(
        names, differing, {key: [one.get(key) for one in figures] for key in named}, groups, _differences(groups)
    )


def run_settings(run: StoredRun) -> Settings:
    """Returns what determines a run, by names such as `plan.compile` and `parameter.width`."""
    found: Settings = {}
    if (record := run.record) is not None:
        facts, source = record.facts, record.source
        found["task.name"] = record.name
        if source is not None:
            found |= {"task.file": source.reference, "task.source": source.digest[:12]}
            found |= {f"parameter.{name}": value for name, value in source.parameters.items()}
        else:  # of a Task from Python, whose code is unknown
            found["task.parts"] = facts.fingerprint[:12]
        found["task.content"] = record.data[:12] or None
        found |= {f"option.{name}": value for name, value in record.overrides.items()}
        sizes = ("parameters", "trainable", "samples", "batch_size", "inputs", "optimizer", "data", "exact")
        found |= {f"task.{name}": getattr(facts, name) for name in sizes}
        found["task.epochs"] = run.planned_epochs
        found |= {f"version.{name}": version for name, version in record.versions.items()}
        found |= {f"switch.{name}": value for name, value in record.switches.items()}
    if run.plan is not None:
        found |= {f"plan.{axis}": value for axis, value in run.plan.model_dump().items()}
    if machine := run.last_value("machine"):
        found["machine"] = machine
    return found


def _unknown_parts(run: StoredRun) -> list[str]:
    """Returns what a run doesn't record of its code and data."""
    if (record := run.record) is None:
        return ["code", "data"]
    return ["code"] * (record.source is None) + ["data"] * (not record.data or bool(record.unknown_data))


def run_figures(run: StoredRun) -> dict[str, float]:
    """Returns the figures that runs are compared by: of the best epoch, of the test data, and the speed."""
    found: dict[str, float] = {}
    best = run.best_epoch
    if best is not None:
        figures = {key: v for key, v in best.items() if key.startswith(("train_", "validation_")) and v is not None}
        found |= {f"best epoch: {key.replace('_', ' ')}": value for key, value in figures.items()}
        found["best epoch"] = best["epoch"]
    for name, value in (run.final or {}).items():
        if name.startswith("test_") and isinstance(value, int | float) and math.isfinite(value):
            found[name.replace("_", " ")] = value
    speeds = [row["samples_per_s"] for row in run.epochs if row.get("samples_per_s")]
    if speeds:
        found["samples per second"] = median(speeds)
    found["seconds of training"] = run.seconds
    return found


_SEED_KEYS = ("option.seed", "parameter.seed")

_NO_GROUP_KEYS = (*_SEED_KEYS, "machine")


def _groups(
    names: Sequence[str],
    settings: Sequence[Settings],
    figures: Sequence[Mapping[str, float]],
    unknown: Sequence[list[str]],
) -> list[RunGroup]:
    members: dict[str, list[int]] = {}
    for number, one in enumerate(settings):
        key = repr(sorted((name, repr(value)) for name, value in one.items() if name not in _NO_GROUP_KEYS))
        members.setdefault(key, []).append(number)
    return [
        RunGroup(
            _letters(place),
            [names[number] for number in numbers],
            [_seed(settings[number]) for number in numbers],
            {
                key: [figures[number][key] for number in numbers if key in figures[number]]
                for key in dict.fromkeys(key for number in numbers for key in figures[number])
            },
            " and ".join(dict.fromkeys(part for number in numbers for part in unknown[number]))
            if len(numbers) > 1
            else "",
        )
        for place, numbers in enumerate(members.values())
    ]


def _seed(settings: Settings) -> Any:
    return next((settings[key] for key in _SEED_KEYS if key in settings), None)


def _letters(place: int) -> str:
    return chr(ord("A") + place) if place < 26 else f"{_letters(place // 26 - 1)}{_letters(place % 26)}"


def _differences(groups: Sequence[RunGroup]) -> list[FigureDifference]:
    first = groups[0]
    return [
        _difference(first, other, figure)
        for other in groups[1:]
        for figure in first.figures
        if figure != "best epoch" and first.figures[figure] and other.figures.get(figure)
    ]


def _difference(first: RunGroup, other: RunGroup, figure: str) -> FigureDifference:
    before, after = first.figures[figure], other.figures[figure]
    difference = fmean(after) - fmean(before)
    few = [one for one in (first, other) if min(one.distinct_seeds, len(one.figures[figure])) < MIN_SEEDS]
    if few:
        had = " and ".join(f"{one.name} has {min(one.distinct_seeds, len(one.figures[figure]))}" for one in few)
        said = f"noise unknown: a group needs {MIN_SEEDS} runs with different seeds, {had}"
        return FigureDifference(other.name, figure, difference, None, None, said)
    half = _half_width(before, after)
    low, high = difference - half, difference + half
    counts = f"{len(before)} and {len(after)} seeds"
    within = low <= 0 <= high
    what = " and ".join(dict.fromkeys(one.unknown for one in (first, other) if one.unknown))
    condition = f", if the {what} of a group's runs is the same, which is unknown" if what else ""
    said = f"{'within' if within else 'beyond'} the noise of seeds{condition} ({counts})"
    return FigureDifference(other.name, figure, difference, low, high, said)


def _half_width(before: Sequence[float], after: Sequence[float]) -> float:
    """Returns half the width of Welch's interval for the difference of two means."""
    from scipy.special import stdtrit

    parts = [variance(values) / len(values) for values in (before, after)]
    total = sum(parts)
    if not total:
        return 0.0
    freedom = total**2 / sum(p**2 / (len(v) - 1) for p, v in zip(parts, (before, after), strict=True))
    return float(stdtrit(freedom, 0.5 + CONFIDENCE / 2)) * math.sqrt(total)


_MAX_NAMED_COLUMNS = 3


def comparison_tables(comparison: Comparison) -> RenderableType:
    """Returns the tables; many runs are columns by number, with their names above."""
    names: list[RenderableType] = []
    if len(comparison.names) > _MAX_NAMED_COLUMNS:
        numbers = {name: f"run {number}" for number, name in enumerate(comparison.names, 1)}
        names = [Text(f"{number}: {name}") for name, number in numbers.items()]
        groups = [replace(group, runs=[numbers[name] for name in group.runs]) for group in comparison.groups]
        comparison = replace(comparison, names=list(numbers.values()), groups=groups)
    tables = [block for block in _tables(comparison) if block["rows"]]
    shown = [terminal_table(block, box=box.SIMPLE_HEAD, pad_edge=False) for block in tables]
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
    damages = [damage for run in runs for damage in run.damages]
    return report_page(sections, f"Comparison of {len(runs)} runs", ", ".join(comparison.names), damages=damages)


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
