"""`hotloop summary`: the layers of a network with shapes, parameters, FLOPs and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hotloop.cli.options import (
    JsonOption,
    ParamOption,
    TrustOption,
    exit_on_error,
    parse_pairs,
    print_result,
    say,
    stdout_for,
)
from hotloop.core.files.source_files import file_of_reference, split_reference


@exit_on_error
def summary(
    task: Annotated[
        str, typer.Argument(help="file.py, file.py:name, package.module:name, or a run's folder.", show_default=False)
    ],
    param: ParamOption = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples in the batch, instead of the Task's.")] = None,
    depth: Annotated[
        int | None,
        typer.Option(help="Levels of the tree; deeper layers are added to the layer above.", show_default="all"),
    ] = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show a network's layers: output shapes, parameters, FLOPs and memory.

    \b
    hotloop summary examples/fashion.py
    hotloop summary examples/fashion.py --batch-size 1      the shapes and the memory of one sample
    hotloop summary examples/with_timm.py --depth 2         two levels of a deep network
    hotloop summary runs/first                              the network of a run

    A line is a layer; its numbers are its own, without those of the layers inside, so the sum of a column is the
    total. Parameters that several layers share count once. `forward` is FLOPs, and `activations` is the memory that the
    forward pass stores for the backward pass.

    hotloop runs one training step of a new network on the CPU, and discards the result.
    """
    given = parse_pairs(param or [])
    for name, value, least in (("--batch-size", batch_size, 1), ("--depth", depth, 0)):
        if value is not None and value < least:
            raise typer.BadParameter(f"{name} is {value}; expected {least} or more")
    is_folder = _is_folder(task)
    if is_folder and given:
        raise typer.BadParameter("--param is for a Task's file; a run's folder has the values of its run")
    if not is_folder:
        file_of_reference(split_reference(task)[0])

    from hotloop import api
    from hotloop.report.model_summary import summary_page
    from hotloop.task_file import load_task

    with stdout_for(as_json):
        owner = Path(task) if is_folder else load_task(task, given).task
        found = api.summary(owner, batch_size=batch_size, trust=trust, say=say)
    if depth is not None and as_json:
        found = found.model_copy(update={"rows": found.folded(depth)})
    print_result(as_json, found.model_dump(), lambda: summary_page(found, depth))


def _is_folder(reference: str) -> bool:
    """Returns whether a reference is a run's folder, rather than a file or a module."""
    path = Path(reference)
    if path.is_dir():
        return not (path / "__init__.py").is_file()
    return "/" in reference and not reference.partition(":")[0].endswith(".py")
