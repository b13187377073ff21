"""The table of a study's trials, and its page with Optuna's figures."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import optuna
import plotly.graph_objects as go
from optuna import visualization
from optuna.trial import TrialState
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.format import format_figure, format_percent
from hotloop.core.records.study import StudyResult, TrialRecord, Value
from hotloop.report.blocks import Block, Section, facts, figure_of, figures, lines, report_page, table, text, tiles

_MAX_ROWS = 50
_CONTOUR_PARAMS = 3
"""Parameters of the contour figure, which has a field for each pair."""


def study_table(result: StudyResult) -> RenderableType:
    """Returns the table of trials."""
    names = _param_names(result)
    has_spread = any(trial.spread is not None for trial in result.trials)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("trial", *names, result.figure.replace("_", " "), *(["spread"] if has_spread else [])):
        table.add_column(Text(heading), justify="right", overflow="fold", no_wrap=heading not in names)
    table.add_column("epochs", justify="right", no_wrap=True)
    table.add_column(
        "state", overflow="fold", min_width=min(8, max((len(_state(one)) for one in result.trials), default=0))
    )
    for trial, cells in zip(_shown(result), _trial_rows(result, names, has_spread=has_spread), strict=True):
        style = "bold green" if trial.number == result.best else "dim" if trial.state == "failed" else ""
        table.add_row(*map(Text, cells), style=style)
    return table


def _param_names(result: StudyResult) -> list[str]:
    return list(dict.fromkeys(name for trial in result.trials for name in trial.params))


def _trial_rows(result: StudyResult, names: list[str], *, has_spread: bool = False) -> list[list[str]]:
    return [
        [
            str(trial.number),
            *(format_value(trial.params[name]) if name in trial.params else "" for name in names),
            _number(trial.value),
            *([_number(trial.spread)] if has_spread else []),
            str(trial.epochs),
            _state(trial),
        ]
        for trial in _shown(result)
    ]


def study_lines(result: StudyResult) -> list[str]:
    """Returns lines on the importance of the parameters, and the winner with the line that repeats it."""
    lines = []
    if (left_out := len(result.trials) - _MAX_ROWS) > 0:
        lines.append(f"the {_MAX_ROWS} best of {len(result.trials)} trials; --json has the other {left_out}")
    if result.importance:
        shares = "   ".join(f"{name} {format_percent(share)}" for name, share in result.importance.items())
        lines.append(f"importance: {shares}")
    lines += [f"not exact: {reason}" for reason in result.inexact]
    packed = [trial for trial in result.trials if trial.packed]
    if packed or any(trial.alone for trial in result.trials):
        lines.append(f"packed: {len(packed)} of {len(result.trials)} trials")
    lines += _winner_lines(result)
    return [*lines, f"study: {result.study}   page: {result.study}/study.html"]


def _winner_lines(result: StudyResult) -> list[str]:
    if result.winner is None:
        return [no_winner_line(result)]
    figure = result.figure.replace("_", " ")
    return [
        f"winner: trial {result.best}, {figure} {_number(result.winner.value)}, in {result.study}/best",
        f"repeat: {result.command}",
        *(["the line trains the winner alone: equal by its proof, not bit by bit"] if result.winner.packed else []),
    ]


def no_winner_line(result: StudyResult) -> str:
    """Returns why a study has no winner."""
    has_ended = any(trial.state in ("complete", "continued") for trial in result.trials)
    return f"no winner: {'no complete trial meets the limits of --require' if has_ended else 'no trial is complete'}"


def _shown(result: StudyResult) -> list[TrialRecord]:
    if len(result.trials) <= _MAX_ROWS:
        return result.trials
    sign = 1 if result.goal == "min" else -1

    def rank(trial: TrialRecord) -> tuple[bool, float]:
        return trial.value is None, sign * (trial.value or 0.0)

    return sorted(sorted(result.trials, key=rank)[:_MAX_ROWS], key=lambda trial: trial.number)


def _state(trial: TrialRecord) -> str:
    if trial.state == "failed":
        return f"failed: {trial.error}"
    return trial.state if trial.feasible else f"{trial.state}, over a limit"


def format_value(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _number(value: float | None) -> str:
    return "" if value is None else format_figure(value)


def write_study(path: Path, result: StudyResult, study: optuna.Study) -> None:
    """Writes the winner, the history, importance, parallel coordinates, slices, contours, curves and trials as one page."""
    write_atomic(path, study_page(result, study))


def study_page(result: StudyResult, study: optuna.Study) -> str:
    """Returns the HTML of a study's page, with the figures that its trials allow."""
    sections = [
        Section("summary", "Summary", _summary(result)),
        Section("figures", "Figures", list(_figure_blocks(result, study))),
        Section("trials", "Trials", _trial_blocks(result)),
    ]
    state = "finished" if result.ended == "finished" else "stopped"
    return report_page(sections, f"Study of {result.name}", result.study, state=state)


def _summary(result: StudyResult) -> list[Block]:
    figure, winner = result.figure.replace("_", " "), result.winner
    complete = sum(trial.state == "complete" for trial in result.trials)
    shown = [("trials", f"{len(result.trials):,}"), ("complete trials", f"{complete:,}")]
    if winner is not None:
        shown.insert(0, (f"{figure} of the winner, trial {winner.number}", _number(winner.value)))
    params = {} if winner is None else winner.params
    pairs = [
        *((name, format_value(value)) for name, value in params.items()),
        ("Goal", f"{'smallest' if result.goal == 'min' else 'largest'} {figure}"),
        ("Sampler", f"{result.sampler}, seed {result.seed}"),
        ("Pruner", result.pruner),
        ("Repeats the winner", result.command),
        ("Resumes exactly", "yes" if result.exact else "no"),
    ]
    return [*tiles(shown), facts(pairs), *lines(result.inexact)]


def _trial_blocks(result: StudyResult) -> list[Block]:
    names, trials = _param_names(result), _shown(result)
    columns = ("trial", *names, result.figure.replace("_", " "), "epochs", "state")
    marked = [place for place, trial in enumerate(trials) if trial.number == result.best]
    left_out = len(result.trials) - len(trials)
    note = [text(f"The table has the {len(trials)} best of {len(result.trials):,} trials.")] if left_out else []
    return [*note, table("Trials", columns, _trial_rows(result, names), range(len(columns) - 1), marked)]


def _figure_blocks(result: StudyResult, study: optuna.Study) -> Iterator[Block]:
    """Yields the figures: without a complete trial only the curves."""
    figure = result.figure.replace("_", " ")
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    searched = sorted({name for trial in complete for name in trial.params})
    pairs = []
    if complete:
        made = visualization.plot_optimization_history(study, target_name=figure).update_xaxes(title_text="trial")
        made.for_each_trace(lambda trace: trace.update(name="best so far"), selector={"name": "Best Value"})
        pairs.append(
            _figure(made, f"{figure} of each trial", f"The {figure} of each complete trial and the best so far")
        )
    pairs.append(_figure(_curves(result), f"{figure} of each epoch", f"The {figure} by epoch, a line for each trial"))
    yield from figures(pairs)
    if result.importance:
        names, shares = list(result.importance), [100 * share for share in result.importance.values()]
        bars = go.Bar(x=shares[::-1], y=[escape(name) for name in names[::-1]], orientation="h", marker_color="#3566b8")
        made = go.Figure(bars).update_xaxes(title_text="share of the variance of the values, %")
        said = ", ".join(f"{name} {format_percent(share)}" for name, share in result.importance.items())
        yield from figures([_figure(made, "Importance of the parameters", f"Importance by fANOVA: {said}")], "low")
    if complete and searched:
        made = visualization.plot_parallel_coordinate(study, params=searched, target_name=figure)
        made.update_layout(margin={"l": 90, "r": 30, "t": 60, "b": 30})
        yield from figures(
            [_figure(made, "Parallel coordinates", "A line for each complete trial across the parameters")]
        )
        made = visualization.plot_slice(study, params=searched, target_name=figure)
        yield from figures(
            [_figure(made, "Slices", f"The {figure} by each parameter, a point for each complete trial")]
        )
    ranked = [name for name in result.importance or searched if name in searched][:_CONTOUR_PARAMS]
    if len(complete) > 1 and len(ranked) > 1:
        made = visualization.plot_contour(study, params=ranked, target_name=figure)
        label = f"The {figure} by pairs of parameters, interpolated between the complete trials"
        yield from figures([_figure(made, "Contours", label)], "tall")


def _figure(made: go.Figure, title: str, label: str) -> dict[str, Any]:
    margin = made.layout.margin.to_plotly_json()
    shown = figure_of(made, title, label)
    return shown | {"layout": shown["layout"] | ({"margin": margin} if margin else {})}


def _curves(result: StudyResult) -> go.Figure:
    colours = {"complete": "#3566b8", "continued": "#3566b8", "pruned": "#9aa5b1", "failed": "#d9622b"}
    made = go.Figure()
    for trial in result.trials:
        params = ", ".join(f"{name}={format_value(value)}" for name, value in trial.params.items())
        is_best = trial.number == result.best
        made.add_trace(
            go.Scatter(
                x=list(range(1, len(trial.curve) + 1)),
                y=trial.curve,
                name=f"trial {trial.number}{' (winner)' if is_best else ''}",
                text=escape(f"{params}: {trial.state}"),
                mode="lines+markers",
                line={
                    "color": "#2f9e44" if is_best else colours.get(trial.state, "#9aa5b1"),
                    "width": 3 if is_best else 1,
                },
            )
        )
    return made.update_xaxes(title_text="epoch").update_yaxes(title_text=result.figure.replace("_", " "))
