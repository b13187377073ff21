"""`hotloop evaluate`: figures and mistakes of a trained network."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotloop.cli.options import (
    DeviceOption,
    JsonOption,
    TrustOption,
    WeightsName,
    WeightsOption,
    console,
    exit_if_failed,
    exit_on_error,
    print_json,
    progress_bar,
    say,
    stdout_for,
    try_write,
)

if TYPE_CHECKING:
    from hotloop.core.records.training import Evaluation


class DataPart(StrEnum):
    test = "test"
    validation = "validation"
    train = "train"


@exit_on_error
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run's folder.", show_default=False)],
    on: Annotated[
        DataPart | None,
        typer.Option(help="Part of the data to evaluate on.", show_default="test, or validation without test data"),
    ] = None,
    weights: WeightsOption = WeightsName.best,
    device: DeviceOption = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show loss and metrics of a trained network, and its mistakes or residuals.

    \b
    hotloop evaluate runs/first
    hotloop evaluate runs/first --on validation

    A classification has precision, recall and F1 per class, top-5 accuracy from 6 classes on, and confusions. A
    regression has MAE (mean absolute error), RMSE (root mean squared error) and R² per target.

    Writes RUN/evaluation/: evaluation.json; for a classification confusion.html and mistakes.html; for a regression
    residuals.html.

    Test data is meant to be read once. A network that is selected by its test figures has biased test figures:
    select by --on validation.
    """
    from hotloop import api
    from hotloop.report.evaluation import class_tables, regression_table

    with stdout_for(as_json), progress_bar("evaluating") as progress:
        found = api.evaluate(run, on=on, weights=weights.value, trust=trust, device=device, say=say, progress=progress)
    written, unwritten = try_write(lambda: _write_pages(found, run / "evaluation"))
    files = {name: str(path) for name, path in (written or {}).items()}
    if as_json:
        print_json({**found.model_dump(), "files": files})
        exit_if_failed(unwritten)
        return
    if found.confusion:
        console.print(class_tables(found))
    if found.regression is not None:
        console.print(regression_table(found.regression))
    figures = {"loss": found.loss, **found.metrics}
    if found.top_5_accuracy is not None:
        figures["top-5 accuracy"] = found.top_5_accuracy
    if found.macro_average is not None:
        figures["macro F1"] = found.macro_average.f1
    say(f"{found.on}: " + "  ".join(f"{name} {value:.4f}" for name, value in figures.items()))
    say(f"{found.samples:,} samples, {found.weights} weights (epoch {found.epoch})")
    if found.note:
        say(found.note)
    if files:
        say("written: " + "  ".join(files.values()))
    exit_if_failed(unwritten)


def _write_pages(found: Evaluation, folder: Path) -> dict[str, Path]:
    from hotloop.core.files.atomic_files import write_atomic
    from hotloop.report.evaluation import mistake_pictures, write_confusion, write_mistakes, write_residuals
    from hotloop.report.html import SCRIPT

    files = {"evaluation": folder / "evaluation.json"}
    write_atomic(files["evaluation"], found.model_dump_json(indent=2))
    if pictures := mistake_pictures(found):
        write_atomic(folder / "pictures.json", json.dumps(pictures))
    else:
        (folder / "pictures.json").unlink(missing_ok=True)  # of an earlier evaluation
    if found.confusion:
        files["confusion"] = folder / "confusion.html"
        write_confusion(found, files["confusion"], folder.parent / SCRIPT)
    if found.classes:
        files["mistakes"] = folder / "mistakes.html"
        write_mistakes(found, files["mistakes"], folder.parent / SCRIPT)
    if found.regression is not None:
        files["residuals"] = folder / "residuals.html"
        write_residuals(found, files["residuals"], folder.parent / SCRIPT)
    return files
