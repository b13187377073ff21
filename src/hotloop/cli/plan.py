"""`hotloop plan`: how `--plan auto` would run a Task on this machine, and what can't be run."""

from __future__ import annotations

from typing import Annotated

import typer

from hotloop.cli.options import AsJson, Device, Param, Set, axes, console, guarded, pairs, print_json, say, stdout_for
from hotloop.core.files.source_files import file_named, split


@guarded
def plan(
    task: Annotated[str, typer.Argument(help="file.py, file.py:name or package.module:name.", show_default=False)],
    param: Param = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data, instead of the Task's.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples in a step, instead of the Task's.")] = None,
    settings: Set = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Show what --plan auto would run here, and why; and what can't be run, and why.

    \b
    hotloop plan examples/fashion.py
    hotloop plan examples/fashion.py --set residency=host     with an axis set, as in hotloop train

    What an earlier race or hotloop tune found counts, as in hotloop train. Nothing is trained, and nothing is measured.
    """
    given = pairs(param or [])
    on_top = axes(settings, device=device)
    file_named(split(task)[0])

    from hotloop.core.plan_request import Wanted

    wanted = Wanted.of("auto", on_top)

    from hotloop import api
    from hotloop.report.plan import document, page
    from hotloop.task_file import load_task

    overrides = {key: v for key, v in dict(epochs=epochs, batch_size=batch_size).items() if v is not None}
    with stdout_for(as_json):
        found = api.planned(load_task(task, given), wanted, overrides, say)
    if as_json:
        print_json(document(found))
    else:
        console.print(page(found))
