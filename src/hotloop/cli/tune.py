"""`hotloop tune`: finds the fastest plan that is proven equal, and stores it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hotloop.cli.options import (
    DeviceOption,
    JsonOption,
    ParamOption,
    SetOption,
    axes_of_options,
    console,
    exit_on_error,
    parse_pairs,
    print_result,
    say,
    stdout_for,
)
from hotloop.core.files.source_files import file_of_reference, split_reference


@exit_on_error
def tune(
    task: Annotated[str, typer.Argument(help="file.py, file.py:name or package.module:name.", show_default=False)],
    param: ParamOption = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data, instead of the Task's.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples in a step, instead of the Task's.")] = None,
    settings: SetOption = None,
    device: DeviceOption = None,
    time_limit: Annotated[
        str | None,
        typer.Option(
            help="Time limit of the whole search, such as 60s or 5m.",
            show_default="the time that a better plan can save in this run",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest plan that is proven to give the same result, and store it.

    \b
    hotloop tune examples/fashion.py
    hotloop tune examples/fashion.py --time-limit 2m     search longer than this run pays for
    hotloop tune examples/fashion.py --set threads=1     with an axis set, as in hotloop train
    hotloop train examples/fashion.py                    then uses the result

    Changes of single axes are raced against the eager baseline. The faster ones are combined, compiled if the run is
    long enough, and proven (see hotloop check). The result is never a plan that is slower than the baseline.
    """
    given = parse_pairs(param or [])
    axes = axes_of_options(settings, device=device)
    file_of_reference(split_reference(task)[0])

    from hotloop.core.plan_request import PlanRequest

    wanted = PlanRequest.from_value("auto", axes)

    from hotloop.report.race import race_page, race_progress_bar
    from hotloop.task_file import load_task
    from hotloop.tuning import tune as tuning_tune

    overrides = {key: v for key, v in dict(epochs=epochs, batch_size=batch_size).items() if v is not None}
    with stdout_for(as_json), race_progress_bar(console) as progress:
        options: dict[str, Any] = dict(overrides=overrides, time_limit=time_limit, say=say, progress=progress)
        verdict = tuning_tune.tune_loaded(load_task(task, given), wanted.plan, **options)
    print_result(as_json, verdict.model_dump(), lambda: race_page(verdict))
