"""`hotloop advise`: which hardware a training needs, and what time, memory and cost it takes there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotloop.cli.options import (
    JsonOption,
    ParamOption,
    SetOption,
    axes_of_options,
    console,
    exit_if_failed,
    exit_on_error,
    parse_pairs,
    print_json,
    print_result,
    say,
    stdout_for,
    try_write,
)
from hotloop.cli.profile import _script_path
from hotloop.core.files.atomic_files import check_writable

if TYPE_CHECKING:
    from hotloop.advisor.advice import AdviceRequest
    from hotloop.core.records.advice import HardwareAdvice


@exit_on_error
def advise(
    file: Annotated[
        str | None,
        typer.Argument(help="A Task (file.py, file.py:name, package.module:name), or any script.", show_default=False),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Behind --: the script's own.", show_default=False)
    ] = None,
    chips: Annotated[
        str | None,
        typer.Option(help="Chips to compare, comma-separated, such as 'RTX 4090,H100'.", show_default="common ones"),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            help="Numbers of chips in a machine, such as 1,8.",
            show_default="1, and more where a single one isn't enough",
        ),
    ] = None,
    batch_sizes: Annotated[
        str | None, typer.Option(help="Batch sizes to compare, such as 32,256,2048.", show_default="the Task's")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the data, instead of the Task's or the script's.")
    ] = None,
    deadline: Annotated[str | None, typer.Option(help="Longest run, such as 8h.")] = None,
    budget: Annotated[float | None, typer.Option(help="Highest cost of the run, in the prices' currency.")] = None,
    prices: Annotated[
        Path | None,
        typer.Option(help="A CSV file with columns name and price per hour.", show_default="dated US dollars"),
    ] = None,
    carbon: Annotated[float | None, typer.Option(help="Grams of CO2 per kWh of your region's power.")] = None,
    plan: Annotated[
        str | None, typer.Option(help="Of the step: baseline or a TOML file.", show_default="baseline")
    ] = None,
    settings: SetOption = None,
    precision: Annotated[str, typer.Option(help="Of products: fp32, tf32, fp16, bf16 or fp8.")] = "fp32",
    param: ParamOption = None,
    steps: Annotated[int | None, typer.Option(help="Steps of a script to time.", show_default="20")] = None,
    out: Annotated[Path | None, typer.Option(help="Write a page with pictures to this file.")] = None,
    score: Annotated[
        bool, typer.Option("--score", help="Show how well earlier predictions fitted the measured steps.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Advise on hardware: would a GPU pay, which, how long, how much memory, at which cost.

    \b
    hotloop advise examples/fashion.py                                  this machine, and chips that aren't here
    hotloop advise examples/fashion.py --chips "RTX 4090,H100" --gpus 1,8 --batch-sizes 32,256,2048
    hotloop advise examples/fashion.py --deadline 8h --budget 50 --prices mine.csv
    hotloop advise examples/fashion.py --out advice.html                pictures for any browser
    hotloop advise train.py -- --lr 0.1                                 any PyTorch script with its own arguments
    hotloop advise --score                                              predictions against later runs

    A step is traced without memory, so the model needn't fit here. Other machines' times are predictions with 90 %
    intervals. A later hotloop train or hotloop race compares them with the measured step.
    """
    if score:
        if file is not None:
            raise typer.BadParameter("--score is about all earlier predictions: give no Task")
        _show_score(as_json)
        return
    if file is None:
        raise typer.BadParameter("give a Task or a script, or --score")
    path = _script_path(file, bool(arguments))
    for name, value in {"plan": plan, "set": settings, "param": param, "batch-sizes": None}.items():
        if path is not None and value:
            raise typer.BadParameter(f"--{name} is for a Task, and {file} is run as a script")
    if path is None and steps is not None:
        raise typer.BadParameter("--steps is for a script; a Task's run has its epochs")
    if steps is not None and steps < 1:
        raise typer.BadParameter(f"--steps is {steps}; expected 1 or more")
    if epochs is not None and epochs < 1:
        raise typer.BadParameter(f"--epochs is {epochs}; expected 1 or more")
    for option, number in {"--budget": budget, "--carbon": carbon}.items():
        if number is not None and not 0 <= number < float("inf"):
            raise typer.BadParameter(f"{option} is {number}; expected 0 or more")
    given, axes = parse_pairs(param or []), axes_of_options(settings)
    names = _names(chips)
    counts, sizes = _numbers(gpus, "--gpus"), _numbers(batch_sizes, "--batch-sizes")
    if out is not None:
        check_writable(out, "--out")

    from hotloop.advisor.chips import PRECISIONS, find_chip, read_prices
    from hotloop.core.format import parse_seconds
    from hotloop.core.plan_request import PlanRequest

    for name in names:
        find_chip(name)  # reports an unknown chip before the import of torch
    if precision not in PRECISIONS:
        raise typer.BadParameter(f"--precision is {precision}; expected one of {', '.join(PRECISIONS)}")
    wanted = PlanRequest.from_value(plan, axes)
    if wanted.is_auto:
        raise typer.BadParameter("--plan auto depends on the machine; give baseline or a TOML file")
    known: dict[str, Any] = dict(
        chips=names,
        gpus=counts,
        batch_sizes=sizes,
        deadline_s=None if deadline is None else parse_seconds(deadline, "deadline"),
        budget=budget,
        prices=None if prices is None else read_prices(prices),
        precision=precision,
        plan=wanted.plan,
        carbon_g_per_kwh=carbon,
    )

    from hotloop.advisor.advice import AdviceRequest

    request = AdviceRequest(**known)
    with stdout_for(as_json), _progress() as progress:
        if path is not None:
            found = _advise_script(path, arguments or [], steps or 20, epochs, request, progress, as_json)
        else:
            found = _advise_task(file, given, epochs, request, progress)
    _show(found, out, as_json)


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def _numbers(text: str | None, option: str) -> tuple[int, ...]:
    parts = _names(text)
    wrong = next((part for part in parts if not part.isdecimal() or int(part) < 1), None)
    if wrong is not None or (text is not None and not parts):
        raise typer.BadParameter(f"{option} is {text!r}; expected whole numbers of 1 or more, such as 1,8")
    return tuple(map(int, parts))


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """Shows a bar on a terminal, and elsewhere a line for each part of the work."""
    from hotloop.report.race import race_progress_bar

    said: set[str] = set()

    def line(doing: str, share: float) -> None:
        part = doing.partition(":")[0]
        if part not in said:
            said.add(part)
            say(part)

    with race_progress_bar(console) as moved:
        yield moved if console.is_terminal else line


def _advise_task(
    file: str, given: dict[str, str], epochs: int | None, request: AdviceRequest, progress: Callable[[str, float], None]
) -> HardwareAdvice:
    from dataclasses import replace

    from hotloop.advisor.advice import advise_task
    from hotloop.task import override_fields
    from hotloop.task_file import load_task

    loaded = load_task(file, given)
    overrides = {} if epochs is None else {"epochs": epochs}
    return advise_task(
        replace(loaded, task=override_fields(loaded.task, overrides)), request, say=say, progress=progress
    )


def _advise_script(
    path: Path | str,
    arguments: list[str],
    steps: int,
    epochs: int | None,
    request: AdviceRequest,
    progress: Callable[[str, float], None],
    as_json: bool,
) -> HardwareAdvice:
    import sys

    from hotloop.advisor.advice import advise_script

    stdout = sys.stderr.fileno() if as_json else None
    return advise_script(path, arguments, steps, epochs, request, stdout=stdout, say=say, progress=progress)


def _show(found: HardwareAdvice, out: Path | None, as_json: bool) -> None:
    from hotloop.report.advice import advice_page, write_advice

    unwritten = None
    if out is not None:
        _, unwritten = try_write(lambda: write_advice(found, out))
    page = None if out is None or unwritten else str(out)
    if as_json:
        print_json({"answer": found.answer, **found.model_dump(), "page": page})
    else:
        console.print(advice_page(found))
        if page is not None:
            say(f"picture: {page}")
    exit_if_failed(unwritten)


def _show_score(as_json: bool) -> None:
    from hotloop.advisor.ledger import load_predictions
    from hotloop.core.records.advice import Score
    from hotloop.report.advice import score_page

    predictions, notes = load_predictions()
    for note in notes:
        say(note)
    found = Score.from_predictions(predictions)
    print_result(as_json, found.model_dump(), lambda: score_page(found))
