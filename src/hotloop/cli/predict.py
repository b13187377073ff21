"""`hotloop predict`: writes a trained network's output for new inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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


@exit_on_error
def predict(
    run: Annotated[Path, typer.Argument(help="A run's folder.", show_default=False)],
    inputs: Annotated[
        Path, typer.Argument(help="A .npy file, or a .npz file with one or several arrays.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option(help="File to write.", show_default="<name of the inputs>-scores.npy, here")
    ] = None,
    weights: WeightsOption = WeightsName.best,
    device: DeviceOption = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a trained network's output for new inputs: one row per sample, float32.

    \b
    hotloop predict runs/first images.npy --out scores.npy

    The inputs are raw, like the training data: the Task's `prepare` is applied. The arrays of a .npz file are the
    model's inputs in the file's order, or by name if the Task's data has names. Of an output with `logits` only the
    logits are written; other dicts and tuples are written to a .npz file.
    """
    from hotloop import api
    from hotloop.inference.npy import check_output, write_arrays

    target = out or Path(f"{inputs.stem}-scores.npy")
    check_output(target, inputs)
    with stdout_for(as_json), progress_bar("predicting") as progress:
        scores = api.predict(run, inputs, weights=weights.value, trust=trust, device=device, say=say, progress=progress)
    arrays = scores if isinstance(scores, dict) else {"scores": scores}
    if out is None and isinstance(scores, dict):
        target = target.with_suffix(".npz")
    write_arrays(target, scores)
    shapes = {name: list(rows.shape) for name, rows in arrays.items()}
    classes = api.Run.open(run).record.classes
    if as_json:
        print_json({"run": str(run), "inputs": str(inputs), "out": str(target), "shapes": shapes, "classes": classes})
        return
    for name, rows in arrays.items():
        say(f"{name}: {rows.dtype} {tuple(rows.shape)}")
    if classes and not isinstance(scores, dict) and scores.shape[1:] == (len(classes),):
        say("columns: " + ", ".join(classes))
    say(f"written: {target}")
