"""How each class fares, as a table for a terminal, and which are taken for which, in words."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hotloop.records import Evaluation
from hotloop.report.confusion import most_frequent

_SHOWN = 20
_BAR = 20


def class_tables(evaluation: Evaluation) -> RenderableType:
    """Accuracy per class, and the most frequent confusions."""
    return Group(_accuracies(evaluation), _confusions(evaluation))


def _accuracies(evaluation: Evaluation) -> Table:
    rates = evaluation.accuracy_per_class
    order = range(len(rates))
    title = "Accuracy per class"
    if len(rates) > _SHOWN:
        seen = [place for place in order if rates[place] is not None]
        order = sorted(seen, key=lambda place: rates[place] or 0.0)[:_SHOWN]  # type: ignore[assignment]
        title = f"Accuracy of the {_SHOWN} worst of {len(rates)} classes"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("class", overflow="fold")
    table.add_column("samples", justify="right")
    table.add_column("accuracy", justify="right")
    table.add_column("")
    for place in order:
        rate = rates[place]
        shown = "-" if rate is None else f"{rate:.1%}"
        bar = Text("█" * round((rate or 0.0) * _BAR), style="green")
        table.add_row(Text(evaluation.classes[place]), f"{sum(evaluation.confusion[place]):,}", shown, bar)
    return table


def _confusions(evaluation: Evaluation) -> Table:
    table = Table(title="Most frequent confusions", title_justify="left", title_style="bold")
    for name in ("true", "taken for"):
        table.add_column(name, overflow="fold")
    table.add_column("samples", justify="right")
    table.add_column("of the class", justify="right")
    for found in most_frequent(evaluation):
        table.add_row(Text(found.true), Text(found.predicted), f"{found.samples:,}", f"{found.share:.1%}")
    return table
