"""`hotloop race`: compares the speed of plans, and whether they give the same result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hotloop.cli.options import (
    JsonOption,
    ParamOption,
    axes_of_options,
    console,
    exit_early,
    exit_if_failed,
    exit_on_error,
    parse_pairs,
    print_json,
    print_result,
    say,
    stdout_for,
    try_write,
)
from hotloop.core.files.atomic_files import check_writable
from hotloop.core.files.source_files import file_of_reference, split_reference


@exit_on_error
def race(
    task: Annotated[str, typer.Argument(help="file.py, file.py:name or package.module:name.", show_default=False)],
    plans: Annotated[
        str | None,
        typer.Option(
            help="baseline, auto and TOML files, separated by commas.",
            show_default="baseline,auto; with --devices: baseline",
        ),
    ] = None,
    devices: Annotated[
        str | None, typer.Option(help="Race each plan on each of these devices, such as cpu,cuda.")
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(help="name=a,b,c: race at each of these sizes, passed to the file's task(name=...)."),
    ] = None,
    param: ParamOption = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="axis=value for each plan except the baseline; repeatable."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data, instead of the Task's.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples in a step, instead of the Task's.")] = None,
    time_limit: Annotated[
        str | None,
        typer.Option(
            help="Time limit of the whole race, such as 60s or 5m: preparation, measurement, proof.",
            show_default="60s for the measurement alone",
        ),
    ] = None,
    parity: Annotated[bool, typer.Option(help="Prove that each plan gives the baseline's result.")] = True,
    save: Annotated[
        Path | None, typer.Option(help="File for the picture of --scale.", show_default="race-NAME.html")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Race plans side by side: which finishes this run first.

    \b
    hotloop race examples/fashion.py                                  baseline against auto
    hotloop race examples/fashion.py --plans baseline,auto,mine.toml
    hotloop race examples/fashion.py --devices cpu,cuda               is a GPU faster?
    hotloop race examples/fashion.py --devices cpu,cuda --scale width=0.25,1,4      and from which size on?

    Windows of steps of all plans run in turn, so that disturbances affect all plans alike. Nothing is trained.
    """
    given, axes = parse_pairs(param or []), axes_of_options(settings)
    if devices is not None and "device" in axes:
        raise typer.BadParameter("the device is given by --devices and by --set")
    sizes = _parse_scale(scale, given)
    if save is not None and sizes is None:
        raise typer.BadParameter("--save names the file for the picture of --scale")
    file_of_reference(split_reference(task)[0])
    if sizes is not None:
        save = save or Path(f"race-{sizes[0]}.html")
        check_writable(save, "--save")  # before the race
    named = _split_list(plans) if plans is not None else ["baseline"] + ["auto"] * (devices is None)
    overrides = {key: v for key, v in dict(epochs=epochs, batch_size=batch_size).items() if v is not None}

    from hotloop.tuning.contenders import RaceSpec

    names = None if devices is None else _split_list(devices)
    spec = RaceSpec(named, devices=names, axes=axes, time_limit=time_limit)
    spec.requested_plans()  # reports a wrong plan before the import of torch, which takes seconds

    from hotloop.advisor.ledger import compare_with_predictions
    from hotloop.report.race import race_progress_bar
    from hotloop.task_file import load_task
    from hotloop.tuning import race as tuning_race

    with stdout_for(as_json), race_progress_bar(console) as progress:
        common: dict[str, Any] = dict(overrides=overrides, say=say, progress=progress)
        if sizes is not None:
            scaling = tuning_race.race_scales(task, given, sizes, spec, **common)
        else:
            prove = tuning_race.PROVE if parity else None
            loaded = load_task(task, given)
            verdict = tuning_race.race_loaded(loaded, spec, prove=prove, **common)
            for line in compare_with_predictions(loaded, verdict, batch_size):
                say(line)
    if save is not None:
        _show_scaling(scaling, save, as_json)
    else:
        _show(verdict, as_json)


def _show(verdict: Any, as_json: bool) -> None:
    from hotloop.report.race import race_page

    print_result(as_json, verdict.model_dump(), lambda: race_page(verdict))
    if verdict.ended is not None:
        exit_early(verdict.ended_by, f"{verdict.ended}; the results so far are shown")


def _show_scaling(scaling: Any, path: Path, as_json: bool) -> None:
    from hotloop.report.race import scaling_page, write_scaling

    _, unwritten = try_write(lambda: write_scaling(scaling, path))
    if as_json:
        print_json({**scaling.model_dump(), **_flatten(scaling), "page": None if unwritten else str(path)})
    else:
        console.print(scaling_page(scaling))
        if unwritten is None:
            say(f"picture: {path}")
    if scaling.ended is not None:
        if unwritten is not None:
            say(f"error: {unwritten}")
        exit_early(scaling.ended_by, f"{scaling.ended}; the results so far are shown")
    exit_if_failed(unwritten)


def _flatten(scaling: Any) -> dict[str, Any]:
    """Returns the plans of all sizes in a list, as for a single size; the winner if it is the same at each size."""
    plans = [
        {"scale": value, **timing.model_dump()}
        for value, verdict in zip(scaling.values, scaling.races, strict=True)
        for timing in verdict.plans
    ]
    winners = {verdict.winner for verdict in scaling.races}
    return {
        "plans": plans,
        "baseline": scaling.races[0].baseline,
        "winner": winners.pop() if len(winners) == 1 else None,
    }


def _split_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _parse_scale(scale: str | None, given: dict[str, str]) -> tuple[str, list[str]] | None:
    """Returns `width=0.25,1,4` as `("width", ["0.25", "1", "4"])`."""
    if scale is None:
        return None
    [(name, values)] = parse_pairs([scale]).items()
    if name in given:
        raise typer.BadParameter(f"{name} is given by --scale and by --param")
    return name, _split_list(values)
