"""`hotloop list`: the runs in a folder."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hotloop.cli.options import JsonOption, console, exit_on_error, print_json, say


class SortKey(StrEnum):
    name = "name"
    when = "when"
    state = "state"
    epochs = "epochs"
    best = "best"
    plan = "plan"
    time = "time"


class RunState(StrEnum):
    training = "training"
    finished = "finished"
    stopped = "stopped"
    failed = "failed"
    killed = "killed"
    new = "new"


@exit_on_error
def list(
    folder: Annotated[Path, typer.Argument(help="A folder with runs in it or below.")] = Path("runs"),
    sort: Annotated[SortKey, typer.Option(help="Newest, best, longest and most epochs first.")] = SortKey.when,
    state: Annotated[RunState | None, typer.Option(help="Only runs in this state.", show_default=False)] = None,
    contains: Annotated[
        str | None, typer.Option(help="Only runs with this text in folder, Task or plan.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List runs: when, state, epochs, best figure, plan and time.

    \b
    hotloop list
    hotloop list experiments --sort best
    hotloop list --state failed --contains resnet
    """
    from hotloop.report.run_list import check_folder, list_runs, runs_table, sorted_rows

    check_folder(folder)
    rows = [
        row
        for row in list_runs(folder)
        if state in (None, row["state"])
        and (contains is None or any(contains in row[name] for name in ("run", "task", "plan")))
    ]
    rows = sorted_rows(rows, sort.value)
    if as_json:
        print_json({"runs": rows})
        return
    if rows:
        console.print(runs_table(rows))
    else:
        say(f"no runs in {folder}" + (" that match" if state or contains else ""))
    for row in rows:
        for damage in row["damages"]:
            say(damage)
