"""`hotloop compare`: runs side by side."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hotloop.cli.options import JsonOption, console, exit_on_error, print_json, say


@exit_on_error
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, two or more.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="Write a page with the curves over each other.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare runs: what differs in Task, parameters, plan and versions, and in the figures.

    \b
    hotloop compare runs/a runs/b
    hotloop compare runs/* --out comparison.html

    Runs that differ only in their seed form a group. With three seeds or more in each of two groups, the comparison says
    whether a difference is within the noise of seeds.
    """
    from hotloop.core.files.atomic_files import check_writable, write_atomic
    from hotloop.core.files.run_folder import StoredRun
    from hotloop.report.run_comparison import compare_runs, comparison_report, comparison_tables

    if len(runs) < 2:
        raise typer.BadParameter("a comparison needs two runs or more")
    folders = [path.resolve() for path in runs]
    if repeated := [path for number, path in enumerate(runs) if folders[number] in folders[:number]]:
        raise typer.BadParameter(f"{repeated[0]} is the folder of a run that is given twice: give each run once")
    if out is not None:
        check_writable(out, "--out")
    stored = [StoredRun.read(path) for path in runs]
    found = compare_runs(stored)
    if out is not None:
        write_atomic(out, comparison_report(found, stored), "--out")
    damages = [damage for run in stored for damage in run.damages]
    if as_json:
        print_json({**asdict(found), "damages": damages, "page": None if out is None else str(out)})
        return
    console.print(comparison_tables(found))
    for damage in damages:
        say(damage)
    say("curves: add --out comparison.html" if out is None else f"written: {out}")
