"""`hotloop plan`: the choice of `--plan auto` for a Task on this machine, and plans that can't run."""

from __future__ import annotations

from typing import Annotated

import typer

from hotloop.cli.options import (
    DeviceOption,
    JsonOption,
    ParamOption,
    SetOption,
    axes_of_options,
    exit_on_error,
    parse_pairs,
    print_result,
    say,
    stdout_for,
)
from hotloop.core.files.source_files import file_of_reference, split_reference


@exit_on_error
def plan(
    task: Annotated[str, typer.Argument(help="file.py, file.py:name or package.module:name.", show_default=False)],
    param: ParamOption = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data, instead of the Task's.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples in a step, instead of the Task's.")] = None,
    settings: SetOption = None,
    device: DeviceOption = None,
    show_all: Annotated[
        bool, typer.Option("--all", help="Show every axis of the plan, also those without an effect here.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the plan that --plan auto would choose here, and plans that can't run, with reasons.

    \b
    hotloop plan examples/fashion.py
    hotloop plan examples/fashion.py --set residency=host    with an axis set, as in hotloop train
    hotloop plan examples/fashion.py --epochs 100            a longer run may compile
    hotloop plan examples/fashion.py --all                   every axis of the plan

    \b
    Which plan does a run use?
    option       plan                       compiles            searches first    proven
    (none)       stored result, else rules  only a stored plan  no                a stored plan
    --plan auto  stored result, else rules  beside the          no: in the run's  a stored or a
                 and compiled plans later   training            own steps         compiled plan
    --tune       stored result, else the    if the search       yes, unless a     a stored plan,
                 winner of a search         expects a gain      result is stored  the winner

    A stored result is the fastest plan that an earlier search proved equal, for a Task in a file, this machine and
    these versions. The rules choose by facts of Task and machine, without a measurement; their plan isn't proven:
    hotloop check proves it. A search without a winner leaves the baseline, or the rules if too little was measured.

    Nothing is trained or measured. The lines after `as a file` can be saved, changed, and given to --plan.
    """
    given = parse_pairs(param or [])
    axes = axes_of_options(settings, device=device)
    file_of_reference(split_reference(task)[0])

    from hotloop.core.plan_request import PlanRequest

    wanted = PlanRequest.from_value("auto", axes)

    from hotloop import api
    from hotloop.report.plan import plan_document, plan_page
    from hotloop.task_file import load_task

    overrides = {key: v for key, v in dict(epochs=epochs, batch_size=batch_size).items() if v is not None}
    with stdout_for(as_json):
        forecast = api.plan_loaded_task(load_task(task, given), wanted, overrides, say)
    print_result(as_json, plan_document(forecast), lambda: plan_page(forecast, axes, has_all_axes=show_all))
