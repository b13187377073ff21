"""`hotloop predict`: writes a trained network's output for new inputs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotloop.cli.options import (
    DeviceOption,
    JsonOption,
    TrustOption,
    WeightsName,
    WeightsOption,
    exit_on_error,
    print_json,
    progress_bar,
    say,
    stdout_for,
)
from hotloop.errors import DataError

if TYPE_CHECKING:
    from hotloop.core.records.training import RunRecord


class OutputFormat(StrEnum):
    npy = "npy"
    csv = "csv"


@exit_on_error
def predict(
    run: Annotated[Path, typer.Argument(help="A run's folder.", show_default=False)],
    inputs: Annotated[
        Path,
        typer.Argument(
            help="A .npy or .npz file; an image or a folder of images, or a CSV file, if the training data was such.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="File to write.", show_default="<name of the inputs>-scores.npy or -predictions.csv, here"),
    ] = None,
    output_format: Annotated[
        OutputFormat | None,
        typer.Option(
            "--format",
            help="csv: a table of classes and probabilities, or of targets. npy: the model's output as an array.",
            show_default="by the name of --out, else npy",
        ),
    ] = None,
    weights: WeightsOption = WeightsName.best,
    device: DeviceOption = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a trained network's output for new inputs: one row per sample.

    \b
    hotloop predict runs/first images.npy --out scores.npy
    hotloop predict runs/pets new-photos/ --format csv

    The inputs are raw, like the training data: the Task's `prepare` is applied. The arrays of a .npz file are the
    model's inputs in the file's order, or by name if the Task's data has names. Of an output with `logits` only the
    logits are written; other dicts and tuples are written to a .npz file.

    A CSV file has a row per sample: the image's file or the row's number, then for a classification the most probable
    class and the probability of each class, and for a regression the targets.
    """
    from hotloop import api
    from hotloop.inference.npy import check_output, write_arrays
    from hotloop.inference.prediction_table import OutputColumns, prediction_table

    target, is_table = _target(inputs, out, output_format)
    check_output(target, inputs)
    with stdout_for(as_json), progress_bar("predicting") as progress:
        scores = api.predict(run, inputs, weights=weights.value, trust=trust, device=device, say=say, progress=progress)
    record = api.Run.open(run).record
    arrays = scores if isinstance(scores, dict) else {"scores": scores}
    columns: dict[str, str] = {}
    if isinstance(scores, dict):
        if is_table:
            raise DataError(
                f"the model has several outputs: {', '.join(scores)}",
                expected="one output for a CSV file",
                fix="choose --format npy, or give the Task a predict(model, inputs) that picks one",
            )
        target = target if out is not None else target.with_suffix(".npz")
        write_arrays(target, scores)
    else:
        outputs = OutputColumns.of(
            scores.shape, record.classes, record.reader.get("targets", ()), record.has_class_scores
        )
        if is_table:
            table = prediction_table(scores, outputs, _sample_names(record, inputs))
            columns = table.columns
            table.write(target)
        else:
            is_known = bool(outputs.classes and record.classes) or outputs.targets == tuple(
                record.reader.get("targets", ())
            )
            columns = dict.fromkeys(outputs.classes or outputs.targets, "score" if outputs.classes else "target")
            columns = columns if is_known else {}
            write_arrays(target, scores)
    shapes = {name: list(rows.shape) for name, rows in arrays.items()}
    if as_json:
        document: dict[str, Any] = {"run": str(run), "inputs": str(inputs), "out": str(target), "shapes": shapes}
        print_json(document | {"classes": record.classes, "columns": columns})
        return
    for name, rows in arrays.items():
        say(f"{name}: {rows.dtype} {tuple(rows.shape)}")
    if columns:
        say("columns: " + ", ".join(_described(columns) if is_table else columns))
    say(f"written: {target}")


def _target(inputs: Path, out: Path | None, output_format: OutputFormat | None) -> tuple[Path, bool]:
    """Returns the path of the output, and whether it is a CSV file.

    Raises:
        DataError: the name's end and the format differ.
    """
    is_table = output_format == OutputFormat.csv if output_format else out is not None and out.suffix == ".csv"
    if out is None:
        return Path(f"{inputs.absolute().stem}-{'predictions.csv' if is_table else 'scores.npy'}"), is_table
    if is_table != (out.suffix == ".csv") and out.suffix in (".npy", ".npz", ".csv"):
        assert output_format is not None
        raise DataError(
            f"--format {output_format.value} and --out {out}",
            expected="a name with the end of the format",
            fix="leave one of them out",
        )
    return out, is_table


def _sample_names(record: RunRecord, inputs: Path) -> list[str]:
    """Returns the files of images; empty for other inputs."""
    from hotloop.data.readers.stored_reader import reader_from_json
    from hotloop.inference.npy import is_array_file

    reader = reader_from_json(record.reader)
    return [] if reader is None or is_array_file(inputs) else reader.names(inputs)


def _described(columns: dict[str, str]) -> list[str]:
    """Returns the names of a table's columns, with their meanings where the names don't show them."""
    from hotloop.inference.prediction_table import PROBABILITY

    return [name if name.startswith(PROBABILITY) else f"{name} ({meaning})" for name, meaning in columns.items()]
