"""`hotloop export`: writes a trained network to a file for use elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hotloop.cli.options import (
    JsonOption,
    TrustOption,
    WeightsName,
    WeightsOption,
    exit_on_error,
    print_json,
    say,
    stdout_for,
)


@exit_on_error
def export(
    run: Annotated[Path, typer.Argument(help="A run's folder.", show_default=False)],
    to: Annotated[
        Path, typer.Option("--to", help="File to write; .pt2, .onnx, .pt or .safetensors.", show_default=False)
    ],
    weights: WeightsOption = WeightsName.best,
    without_prepare: Annotated[
        bool,
        typer.Option("--without-prepare", help="Export without the Task's prepare: the file takes prepared inputs."),
    ] = False,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Fixed number of samples that the file takes at a time.", show_default="any number"),
    ] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(help="A .npy or .npz file of samples for the check.", show_default="the training data"),
    ] = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a trained network to a file that needs no hotloop.

    \b
    hotloop export runs/first --to model.pt2            torch.export.load("model.pt2").module()(images)
    hotloop export runs/first --to model.onnx           for other runtimes; pip install "hotloop[onnx]"
    hotloop export runs/first --to model.safetensors    the weights alone, as model.state_dict()
    hotloop export runs/first --to model.pt             the same, for torch.load

    A .pt2 or .onnx file takes the inputs of `hotloop predict`, and contains the Task's `prepare`. Each file is read
    back and run on real samples; a file with other outputs than the model's is not written.
    """
    from hotloop import api

    if not as_json:
        say("writing, reading back and comparing ...")
    with stdout_for(as_json):
        done = api.export(
            run,
            to,
            weights=weights.value,
            trust=trust,
            prepare=not without_prepare,
            batch_size=batch_size,
            inputs=inputs,
            say=say,
        )
    if as_json:
        print_json(done.model_dump())
        return
    for what, ports in (("takes", done.inputs), ("gives", done.outputs)):
        if ports:
            shapes = (f"{port.name}: {port.dtype} ({', '.join(map(str, port.shape))})" for port in ports)
            say(f"{what} {', '.join(shapes)}")
    if done.prepare is not None:
        without = "without the Task's prepare: inputs must be prepared"
        say("the Task's prepare is in the file" if done.prepare else without)
    sizes = ", ".join(map(str, done.batch_sizes))
    say(f"loaded again and run on batches of {sizes}: differs from the model by at most {done.difference:.2g}")
    say(f"written: {done.file} ({done.size_bytes / 1e6:.2f} MB), {done.weights} weights (epoch {done.epoch})")
