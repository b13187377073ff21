"""`hotloop race`: how fast plans are side by side, and whether they give the same result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hotloop.cli.options import (
    AsJson,
    Param,
    attempted,
    axes,
    console,
    end_early,
    end_with,
    guarded,
    pairs,
    print_json,
    say,
    stdout_for,
)
from hotloop.core.files.atomic_files import check_writable
from hotloop.core.files.source_files import file_named, split


@guarded
def race(
    task: Annotated[str, typer.Argument(help="file.py, file.py:name or package.module:name.", show_default=False)],
    plans: Annotated[
        str | None,
        typer.Option(
            help="baseline, auto, arrays and TOML files, separated by commas.",
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
    param: Param = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="axis=value on top of each plan but the baseline; repeatable."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data, instead of the Task's.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples in a step, instead of the Task's.")] = None,
    time_limit: Annotated[
        str | None,
        typer.Option(
            help="For all of it, such as 60s or 5m: preparing, measuring, proving.",
            show_default="60s for what is measured; preparing and proving come on top",
        ),
    ] = None,
    parity: Annotated[bool, typer.Option(help="Prove that each plan gives the baseline's result.")] = True,
    save: Annotated[Path | None, typer.Option(help="The picture of --scale.", show_default="race-NAME.html")] = None,
    as_json: AsJson = False,
) -> None:
    """Race plans side by side: which finishes this run first.

    \b
    hotloop race examples/fashion.py                                  baseline against auto
    hotloop race examples/fashion.py --plans baseline,auto,mine.toml
    hotloop race examples/fashion.py --devices cpu,cuda               does a GPU pay?
    hotloop race examples/fashion.py --devices cpu,cuda --scale width=0.25,1,4      and from which size on?

    Windows of steps of all plans run in turn, so that what disturbs one disturbs all. Nothing is trained.
    """
    given, on_top = pairs(param or []), axes(settings)
    if devices is not None and "device" in on_top:
        raise typer.BadParameter("the device is given by --devices and by --set")
    sizes = _sizes(scale, given)
    if save is not None and sizes is None:
        raise typer.BadParameter("--save is for the picture of --scale")
    file_named(split(task)[0])
    if sizes is not None:
        save = save or Path(f"race-{sizes[0]}.html")
        check_writable(save, "--save")  # not after minutes of racing
    named = _listed(plans) if plans is not None else ["baseline"] + ["auto"] * (devices is None)
    overrides = {key: v for key, v in dict(epochs=epochs, batch_size=batch_size).items() if v is not None}

    from hotloop.tuning.contenders import Contest

    contest = Contest(named, devices=None if devices is None else _listed(devices), axes=on_top, time_limit=time_limit)
    contest.entries()  # a wrong plan shows at once, before the seconds that importing torch takes

    from hotloop.report.race import watched
    from hotloop.task_file import load_task
    from hotloop.tuning import race as contests

    with stdout_for(as_json), watched(console) as moved:
        common: dict[str, Any] = dict(overrides=overrides, say=say, progress=moved)
        if sizes is not None:
            scaling = contests.raced_scales(task, given, sizes, contest, **common)
        else:
            verdict = contests.raced(
                load_task(task, given), contest, prove=contests.PROVE if parity else None, **common
            )
    if save is not None:
        _show_scaling(scaling, save, as_json)
    else:
        _show(verdict, as_json)


def _show(verdict: Any, as_json: bool) -> None:
    from hotloop.report.race import page

    if as_json:
        print_json(verdict.model_dump())
    else:
        console.print(page(verdict))
    if verdict.ended is not None:
        end_early(verdict.ended_by, f"{verdict.ended}; what was raced before is shown")


def _show_scaling(scaling: Any, path: Path, as_json: bool) -> None:
    from hotloop.report.race_scaling import page, write_picture

    _, unwritten = attempted(lambda: write_picture(scaling, path))
    if as_json:
        print_json({**scaling.model_dump(), **_flat(scaling), "page": None if unwritten else str(path)})
    else:
        console.print(page(scaling))
        if unwritten is None:
            say(f"picture: {path}")
    if scaling.ended is not None:
        if unwritten is not None:
            say(f"error: {unwritten}")
        end_early(scaling.ended_by, f"{scaling.ended}; what was raced before is shown")
    end_with(unwritten)


def _flat(scaling: Any) -> dict[str, Any]:
    """The plans of all sizes in one list, as a race of one size has them; the winner if it is the same at each."""
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


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _sizes(scale: str | None, given: dict[str, str]) -> tuple[str, list[str]] | None:
    """`width=0.25,1,4` as `("width", ["0.25", "1", "4"])`."""
    if scale is None:
        return None
    [(name, values)] = pairs([scale]).items()
    if name in given:
        raise typer.BadParameter(f"{name} is given by --scale and by --param")
    return name, _listed(values)
