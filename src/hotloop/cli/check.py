"""`hotloop check`: does a plan give the same result as the baseline?"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from hotloop.cli.options import (
    FAILED,
    DeviceOption,
    JsonOption,
    ParamOption,
    SetOption,
    axes_of_options,
    exit_early,
    exit_on_error,
    parse_pairs,
    print_result,
    progress_bar,
    say,
    stdout_for,
)
from hotloop.core.files.source_files import file_of_reference, split_reference


@exit_on_error
def check(
    task: Annotated[str, typer.Argument(help="file.py, file.py:name or package.module:name.", show_default=False)],
    plan: Annotated[
        str | None,
        typer.Option(
            help="Plan to check: auto, baseline or a TOML file.",
            show_default="the default of hotloop train",
        ),
    ] = None,
    settings: SetOption = None,
    device: DeviceOption = None,
    param: ParamOption = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data, instead of the Task's.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples in a step, instead of the Task's.")] = None,
    converge: Annotated[
        int,
        typer.Option(help="Also train both plans to the end with this many seeds, and compare the final figures."),
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Check whether a plan gives the same result as the baseline (eager, under torch's own settings), and say why.

    \b
    hotloop check examples/fashion.py --plan mine.toml
    hotloop check examples/fashion.py --set compile=step
    hotloop check examples/fashion.py --set precision=bf16 --device cuda --converge 5

    Single steps from at least 16 states, or from all states of a shorter training, are compared with the same steps in
    float64, then several steps in sequence. Harmless variants of the baseline measure the effect of rounding. The
    classes, best first: bitwise, fp32-equivalent, reduced-precision (products of fewer bits than the baseline's),
    unproven, broken.

    Exit code 1 for a broken plan, or if a training of --converge fails. Ctrl-C during those trainings shows the
    results so far.
    """
    given = parse_pairs(param or [])
    axes = axes_of_options(settings, device=device)
    file_of_reference(split_reference(task)[0])

    from hotloop.core.plan_request import PlanRequest

    wanted = PlanRequest.with_auto_default(plan, axes)

    from hotloop.report.plan import parity_page
    from hotloop.task import override_fields
    from hotloop.task_file import load_task
    from hotloop.tuning.race import check_requested

    overrides = {key: v for key, v in dict(epochs=epochs, batch_size=batch_size).items() if v is not None}
    with stdout_for(as_json), progress_bar("comparing", of="") as progress:
        loaded = load_task(task, given)
        parity = check_requested(
            replace(loaded, task=override_fields(loaded.task, overrides)),
            wanted,
            converge=converge,
            say=say,
            progress=lambda doing, *count: progress(*count),
        )
    print_result(as_json, parity.model_dump(), lambda: parity_page(parity))
    if (ends := parity.convergence) is not None and ends.ended is not None:
        exit_early(ends.ended_by, f"{ends.ended}; the results so far are shown")
    if parity.parity == "broken":
        raise typer.Exit(FAILED)
