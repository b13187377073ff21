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
    as_json: JsonOption = False,
) -> None:
    """Show the plan that --plan auto would choose here, and plans that can't run, with reasons.

    \b
    hotloop plan examples/fashion.py
    hotloop plan examples/fashion.py --set residency=host     with an axis set, as in hotloop train

    Earlier results of hotloop race and hotloop tune count, as in hotloop train. Nothing is trained or measured.
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
    print_result(as_json, plan_document(forecast), lambda: plan_page(forecast))
