"""The runs of a folder as rows and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from hotloop.core.files.run_folder import StoredRun, find_runs
from hotloop.errors import HotloopError
from hotloop.report.progress import format_duration

SORT_KEYS = ("name", "when", "state", "epochs", "best", "plan", "time")


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """Returns a row for each run in the folder and below; a damaged run has what can be read of it."""
    return [run_row(StoredRun.read(path, has_curves=False)) for path in find_runs(folder)]


def run_row(run: StoredRun) -> dict[str, Any]:
    """Returns the figures of one run: times in seconds, `best` as the value of `figure`."""
    best, (figure, is_minimized) = run.best_epoch, run.monitor
    return {
        "run": str(run.path),
        "task": run.name,
        "created": run.record.created if run.record else "",
        "state": run.state,
        "reason": run.reason,
        "epochs": len(run.epochs),
        "planned_epochs": run.planned_epochs,
        "steps": run.step,
        "figure": figure,
        "is_minimized": is_minimized,
        "best": None if best is None else best[figure],
        "best_epoch": None if best is None else best["epoch"],
        "test": {name: value for name, value in (run.final or {}).items() if name.startswith("test_")},
        "plan": run.plan.brief() if run.plan else "",
        "seconds": run.seconds,
        "damages": run.damages,
    }


def sorted_rows(rows: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Returns the rows by one of SORT_KEYS: newest, longest, most epochs and best first; names and states by alphabet."""

    def best(row: dict[str, Any]) -> tuple[bool, str, float]:
        value = row["best"]
        return value is None, row["figure"], 0.0 if value is None else value if row["is_minimized"] else -value

    orders: dict[str, Any] = {
        "name": lambda row: row["run"],
        "state": lambda row: row["state"],
        "plan": lambda row: row["plan"],
        "epochs": lambda row: -row["epochs"],
        "time": lambda row: -row["seconds"],
        "best": best,
    }
    if key == "when":
        return sorted(rows, key=lambda row: row["created"], reverse=True)
    return sorted(rows, key=orders[key])


def runs_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns a row for each run; a figure that all runs have in common is named once, below."""
    figures = {row["figure"].replace("_", " ") for row in rows if row["best"] is not None}
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.add_column("run", overflow="fold", min_width=min(18, max((len(row["run"]) for row in rows), default=3)))
    for name in ("when", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("epochs", justify="right", no_wrap=True)
    table.add_column("best", justify="right")
    table.add_column("plan", overflow="fold", min_width=8)
    table.add_column("time", justify="right", no_wrap=True)
    styles = {"failed": "red", "killed": "yellow", "training": "blue", "finished": "green"}
    for row in rows:
        figure = f"{row['figure'].replace('_', ' ')} " if len(figures) > 1 else ""
        cells = (
            row["run"],
            row["created"][5:16].replace("T", " "),
            row["state"],
            f"{row['epochs']}/{row['planned_epochs'] or '?'}",
            "" if row["best"] is None else f"{figure}{row['best']:.4g}",
            row["plan"],
            format_duration(row["seconds"]),
        )
        texts = [Text(cell) for cell in cells]
        texts[2].stylize(styles.get(row["state"], ""))
        table.add_row(*texts)
    if len(figures) == 1:
        table.caption, table.caption_justify = Text(f"best: {figures.pop()}"), "left"
    return table


def check_folder(folder: Path) -> None:
    """Raises HotloopError if there is no such folder."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "doesn't exist"
        raise HotloopError(f"{folder} {what}", expected="a folder with runs", fix="give the folder, such as runs")
