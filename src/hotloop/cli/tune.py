"""`hotloop tune`: finds the fastest plan that is proven equal, and remembers it."""

from __future__ import annotations

from typing import Annotated

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
    print_json,
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
            help="For the whole search, such as 60s or 5m.", show_default="what a better plan can win back in this run"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest plan that is proven to give the same result, and remember it.

    \b
    hotloop tune examples/fashion.py
    hotloop tune examples/fashion.py --time-limit 2m     look further than this run pays for
    hotloop tune examples/fashion.py --set threads=1     with an axis set, as in hotloop train
    hotloop train examples/fashion.py                    then uses what was found

    Changes of single axes are raced against the eager baseline, those that pay are put together, compiled where the run is
    long enough, and proven (see hotloop check). It never ends with a plan that is slower than that.
    """
    given = parse_pairs(param or [])
    on_top = axes_of_options(settings, device=device)
    file_of_reference(split_reference(task)[0])

    from hotloop.core.plan_request import PlanRequest

    wanted = PlanRequest.from_value("auto", on_top)

    from hotloop.report.race import race_page, race_progress_bar
    from hotloop.task_file import load_task
    from hotloop.tuning import tune as tuning_tune

    overrides = {key: v for key, v in dict(epochs=epochs, batch_size=batch_size).items() if v is not None}
    with stdout_for(as_json), race_progress_bar(console) as moved:
        verdict = tuning_tune.tune_loaded(
            load_task(task, given),
            wanted.plan,
            overrides=overrides,
            time_limit=time_limit,
            say=say,
            progress=moved,
        )
    if as_json:
        print_json(verdict.model_dump())
    else:
        console.print(race_page(verdict))
