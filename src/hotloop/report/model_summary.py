"""Formats a ModelSummary: the tree of layers as a table, and the totals of a training step."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hotloop.core.format import format_bytes, format_flops, format_shape
from hotloop.core.records.model_summary import ModelSummary, ModuleRow

_PRINTED_WIDTH = 100
"""Columns of the text of `print(summary)`."""


class PrintableSummary(ModelSummary):
    """A model summary whose text is its table."""

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=_PRINTED_WIDTH, color_system=None)
        console.print(summary_page(self))
        return console.file.getvalue().rstrip("\n")  # type: ignore[attr-defined]


def summary_page(summary: ModelSummary, depth: int | None = None) -> RenderableType:
    """Returns the tree of layers, down to `depth`, and the totals."""
    rows = summary.rows if depth is None else summary.folded(depth)
    title = Text(f"{summary.task}: a batch of {', '.join(summary.batch)}", style="bold")
    return Group(title, _table(rows), *(Text(line) for line in _totals(summary)))


def _table(rows: list[ModuleRow]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    table.add_column("layer", overflow="fold", ratio=None)
    table.add_column("output", overflow="fold")
    for name in ("parameters", "forward", "activations"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            Padding(Text(_label(row)), (0, 0, 0, 2 * row.depth)),
            ", ".join(map(format_shape, row.output)),
            f"{row.parameters:,}" if row.parameters else "",
            format_flops(row.flops) if row.flops else "",
            format_bytes(row.activations) if row.activations else "",
        )
    return table


def _label(row: ModuleRow) -> str:
    name = row.name.rpartition(".")[2] or "the model"
    frozen = row.parameters - row.trainable
    marks = [
        *([f"{row.calls} calls"] if row.calls > 1 else []),
        *([f"shared: the same as {row.shared_with}"] if row.shared_with else []),
        *(["frozen"] if frozen and not row.trainable else [f"{frozen:,} frozen"] if frozen else []),
        *row.notes,
    ]
    return f"{name} ({row.kind})" + "".join(f", {mark}" for mark in marks)


def _totals(summary: ModelSummary) -> Iterator[str]:
    memory = summary.memory
    buffers = f", and {summary.buffers:,} numbers in buffers" if summary.buffers else ""
    yield ""
    yield f"Parameters: {summary.parameters:,}: {summary.trainable:,} trainable, {summary.frozen:,} frozen{buffers}."
    forward, backward = summary.forward_flops, summary.backward_flops
    yield (
        f"FLOPs of a training step: forward {format_flops(forward)}, backward {format_flops(backward)} (matrix products,"
        " convolutions, attention, recurrent layers; a multiplication and an addition are 2)."
    )
    parts = {
        "parameters": memory.parameters,
        "buffers": memory.buffers,
        "gradients": memory.gradients,
        f"state of {summary.optimizer}": memory.optimizer_state,
        "averaged weights": memory.average,
        "activations": memory.activations,
        "batch": memory.batch,
    }
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    yield f"Memory of a training step: {format_bytes(memory.total)}: {listed}."
    yield from (f"Note: {note}." for note in summary.notes)
