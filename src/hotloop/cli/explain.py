"""`hotloop explain`: each layer's forward and backward as matrices, checked against autograd."""

from __future__ import annotations

from typing import Annotated

import typer

from hotloop.cli.options import (
    FAILED,
    JsonOption,
    ParamOption,
    exit_on_error,
    parse_pairs,
    print_result,
    stdout_for,
)
from hotloop.core.files.source_files import file_of_reference, split_reference


@exit_on_error
def explain(
    task: Annotated[str, typer.Argument(help="file.py, file.py:name or package.module:name.", show_default=False)],
    param: ParamOption = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples in the batch, instead of the Task's.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Explain each layer's forward and backward as matrices: shapes, equations, FLOPs, bytes.

    \b
    hotloop explain examples/fashion.py
    hotloop explain examples/language.py --batch-size 4

    A real batch goes through the model and back. Each equation is then computed from the layer's inputs in plain matrix
    operations in float64, and compared with torch's result and autograd's gradient. Unknown operations are listed with
    their shapes. Everything runs on the CPU; nothing is trained.

    Exit code 1 if an equation differs from autograd.
    """
    given = parse_pairs(param or [])
    if batch_size is not None and batch_size < 1:
        raise typer.BadParameter(f"--batch-size is {batch_size}; expected 1 or more")
    file_of_reference(split_reference(task)[0])

    from hotloop.explainer.explain import explain as explain_task
    from hotloop.report.explanation import explanation_page
    from hotloop.task_file import load_task

    with stdout_for(as_json):
        explanation = explain_task(load_task(task, given).task, batch_size=batch_size)
    print_result(as_json, explanation.model_dump(), lambda: explanation_page(explanation))
    if explanation.wrong:
        raise typer.Exit(FAILED)
