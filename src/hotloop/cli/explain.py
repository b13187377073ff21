"""`hotloop explain`: each layer's forward and backward as matrices, checked against autograd."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotloop.cli.options import (
    FAILED,
    JsonOption,
    ParamOption,
    exit_if_failed,
    exit_on_error,
    parse_pairs,
    print_result,
    stdout_for,
    try_write,
)
from hotloop.core.files.source_files import file_of_reference, split_reference

if TYPE_CHECKING:
    from hotloop.core.records.explanation import Explanation


@exit_on_error
def explain(
    task: Annotated[str, typer.Argument(help="file.py, file.py:name or package.module:name.", show_default=False)],
    param: ParamOption = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples in the batch, instead of the Task's.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write the page to this file.", show_default=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """Explain each layer's forward and backward as matrices: shapes, equations, FLOPs, bytes.

    \b
    hotloop explain examples/fashion.py --batch-size 8
    hotloop explain examples/fashion.py --html fashion.html    the same as a page for a browser
    hotloop explain examples/language.py --batch-size 4

    The page begins with the backward pass of a linear layer in numbers: given dZ, the gradient of the loss by the
    layer's output, the layer computes dW = dZ^T X, db = sum of the rows of dZ, and dX = dZ W for the layer before. Then
    each layer of the network follows with its own shapes and equations.

    A real batch goes through the model and back, on the CPU. Each equation is then computed from the layer's inputs in
    plain matrix operations in float64, and compared with torch's result and autograd's gradient. Unknown operations are
    listed with their shapes. Nothing is trained.

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
    _, unwritten = try_write(lambda: _write_page(explanation, html))
    print_result(as_json, explanation.model_dump(), lambda: explanation_page(explanation))
    exit_if_failed(unwritten)
    if explanation.wrong:
        raise typer.Exit(FAILED)


def _write_page(explanation: Explanation, path: Path | None) -> None:
    if path is None:
        return
    from hotloop.core.files.atomic_files import write_atomic
    from hotloop.report.explanation import explanation_html

    write_atomic(path, explanation_html(explanation))
