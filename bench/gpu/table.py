"""What is shown: the list of checks, and the results at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from bench.gpu.catalogue import Job
from bench.gpu.record import Stored
from bench.gpu.visit import Visit


def results(jobs: Sequence[Job], stored: Mapping[str, Stored], visit: Visit) -> Table:
    """Each part with its figure, whether it passed, and its seconds; a mark tells results of earlier visits."""
    table = Table("check", "figure", "result", "seconds", box=None, header_style="bold")
    table.columns[3].justify = "right"
    for job in jobs:
        row = stored.get(job.key)
        if job.key == visit.cut:
            table.add_row(job.key, "cut off before its end", "not done", "")
        elif row is None:
            table.add_row(job.key, "no time was left for it", "not done", "")
        else:
            before = "" if job.key in visit.ended else ", before"
            table.add_row(job.key, row["figure"], f"{row['status']}{before}", f"{row['seconds']:.0f}")
    return table


def listing(jobs: Sequence[Job], known: Mapping[str, Stored], ordered: Sequence[Job], budget_s: float | None) -> Table:
    """Each part, the seconds that it is expected to take, its known result, and whether it fits into this visit."""
    table = Table("check", "what it proves", "seconds", "so far", "this visit", box=None, header_style="bold")
    table.columns[2].justify = "right"
    planned: set[str] = set()
    left_s = budget_s
    for job in ordered:
        if left_s is None or job.part.estimate_s <= left_s:
            planned.add(job.key)
            left_s = None if left_s is None else left_s - job.part.estimate_s
    for job in jobs:
        status = known[job.key]["status"] if job.key in known else "not run"
        fits = "yes" if job.key in planned else "no"
        table.add_row(job.key, job.check.title, f"{job.part.estimate_s:.0f}", status, fits)
    return table


def shown(table: Table) -> None:
    """Prints a table on stdout; lines are as long as they need where nobody reads them on a terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(table)
