"""`hotloop tune`: finds the fastest plan that is proven equal, and remembers it."""

from __future__ import annotations

from typing import Annotated

import typer

from hotloop.cli.options import AsJson, Device, Param, Set, axes, console, guarded, pairs, print_json, say, stdout_for
from hotloop.core.files.source_files import file_named, split


@guarded
def tune(
    task: Annotated[str, typer.Argument(help="file.py, file.py:name or package.module:name.", show_default=False)],
    param: Param = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data, instead of the Task's.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples in a step, instead of the Task's.")] = None,
    settings: Set = None,
    device: Device = None,
    time_limit: Annotated[
        str | None,
        typer.Option(
            help="For the whole search, such as 60s or 5m.", show_default="what a better plan can win back in this run"
        ),
    ] = None,
    as_json: AsJson = False,
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
    given = pairs(param or [])
    on_top = axes(settings, device=device)
    file_named(split(task)[0])

    from hotloop.core.plan_request import Wanted

    wanted = Wanted.of("auto", on_top)

    from hotloop.report.race import page, watched
    from hotloop.task_file import load_task
    from hotloop.tuning import tune as seeking

    overrides = {key: v for key, v in dict(epochs=epochs, batch_size=batch_size).items() if v is not None}
    with stdout_for(as_json), watched(console) as moved:
        verdict = seeking.tuned(
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
        console.print(page(verdict))
