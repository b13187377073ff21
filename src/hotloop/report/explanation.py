"""Formats an Explanation for a terminal: the lesson of a linear layer, and each layer's matrices, equations and comparison with autograd."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hotloop.core.format import format_bytes, format_flops, format_shape
from hotloop.core.records.explanation import Equation, Explanation, LayerExplanation, LinearExample, MatrixRecord

_MAX_HEAVIEST = 3

_HTML_WIDTH = 120
"""Columns of the HTML page, in a monospaced font."""


def explanation_page(explanation: Explanation) -> RenderableType:
    """Returns a block for each call of a module, and a summary."""
    top = Text(f"{explanation.task}: a batch of {', '.join(explanation.batch)}; {explanation.parameters:,} parameters")
    legend = Text(
        "On the right of each equation: FLOPs, bytes, and its largest difference from torch (Z) or autograd (gradients),"
        " divided by the largest number. The equations are computed in plain matrix operations, in float64.",
        style="dim",
    )
    lesson = [] if explanation.example is None else [Text(linear_lesson(explanation.example)), Text()]
    blocks = [
        part for _, layers in groupby(explanation.layers, attrgetter("module", "call")) for part in _block(list(layers))
    ]
    return Group(
        *lesson, top, legend, Text(), *blocks, *_numpy_code(explanation), *(Text(line) for line in summary(explanation))
    )


def explanation_html(explanation: Explanation) -> str:
    """Returns the page as HTML that needs no other file."""
    console = Console(file=io.StringIO(), record=True, width=_HTML_WIDTH, force_terminal=True)
    console.print(explanation_page(explanation))
    return console.export_html()


def _numpy_code(explanation: Explanation) -> Iterator[RenderableType]:
    if not explanation.written:
        return
    names = ", ".join(f"hotloop.arrays.{name}" for name in explanation.written)
    yield Text(f"The same layers as array code, to read and run: {names}.")
    yield Text()


def _block(layers: list[LayerExplanation]) -> Iterator[RenderableType]:
    """Yields one call of a module; consecutive operations that only move numbers share a line."""
    if len(layers) == 1:
        yield from _layer_lines(layers[0], title(layers[0]))
    else:
        yield Text(_module(layers[0]), style="bold")
        for is_shape_ops, group in groupby(layers, _is_shape_op):
            if is_shape_ops:
                yield _indented(_shape_ops_line(list(group)))
                continue
            for layer in group:
                for part in _layer_lines(layer, f"{layer.operation}{_parameters_text(layer)}{_where(layer)}"):
                    yield Padding(part, (0, 0, 0, 2))
    yield Text()


def _is_shape_op(layer: LayerExplanation) -> bool:
    return layer.known and not any(one.flops or one.agrees is False for one in layer.equations)


def _shape_ops_line(layers: list[LayerExplanation]) -> str:
    names = ", ".join(dict.fromkeys(layer.operation for layer in layers))
    *ins, _ = layers[0].matrices
    out = layers[-1].matrices[-1]
    return f"moves: {names}: {', '.join(format_shape(one.shape) for one in ins)} -> {format_shape(out.shape)}"


def _layer_lines(layer: LayerExplanation, heading: str) -> Iterator[RenderableType]:
    unknown = ("", "") if layer.known else ("  not explained", "yellow")
    yield Text.assemble((heading, "bold"), unknown)
    yield _indented(_matrices(layer.matrices))
    if gradients := _gradient_shapes(layer):
        yield _indented(gradients)
    yield from (_indented(note) for note in layer.notes)
    if layer.equations:
        yield Padding(_equations(layer), (0, 0, 0, 2))


def title(layer: LayerExplanation) -> str:
    """Returns the module and its class, and the operation if the class doesn't name the operation."""
    does = "" if layer.kind.lower() == layer.operation.replace("_", "") else f": {layer.operation}"
    return f"{_module(layer)}{does}{_parameters_text(layer)}{_where(layer)}"


def _module(layer: LayerExplanation) -> str:
    kind = f" ({layer.kind})" if layer.kind else ""
    again = f", call {layer.call}" if layer.call > 1 else ""
    return f"{layer.module or 'the model'}{kind}{again}"


def _parameters_text(layer: LayerExplanation) -> str:
    return f", {layer.parameters:,} parameters" if layer.parameters else ""


def _where(layer: LayerExplanation) -> str:
    file = layer.where.replace("\\", "/").rpartition("/")[2]
    return f"  ({file})" if file else ""


def _matrices(matrices: list[MatrixRecord]) -> str:
    return "   ".join(f"{one.name} {format_shape(one.shape)}" for one in matrices)


def _gradient_shapes(layer: LayerExplanation) -> str:
    """Returns the shapes of dZ and of the layer's gradients; empty for a layer without a backward pass."""
    outputs = [one.shape for one in layer.matrices if one.name == "Z"]
    names = {one.name for one in layer.matrices}
    found = [("dZ", shape) for shape in outputs[:1]]
    found += [(one.result, one.shape) for one in layer.backward if one.result.removeprefix("d") in names]
    return "   ".join(f"{name} {format_shape(shape)}" for name, shape in found) if len(found) > 1 else ""


def _indented(text: str) -> Padding:
    return Padding(Text(text), (0, 0, 0, 2))


def _equations(layer: LayerExplanation) -> Table:
    shown = Table.grid(padding=(0, 1), expand=True)
    shown.add_column(no_wrap=True, min_width=4)
    shown.add_column(ratio=1, overflow="fold")
    for width in (10, 8, 7):
        shown.add_column(justify="right", no_wrap=True, min_width=width)
    for one in layer.equations:
        error = Text(_relative_error_text(one), style="bold red" if one.agrees is False else "")
        cells = (
            f"{one.result} =",
            one.text,
            format_flops(one.flops) if one.flops else "",
            format_bytes(one.bytes) if one.bytes else "",
        )
        shown.add_row(*(Text(cell) for cell in cells), error)
    return shown


def _relative_error_text(one: Equation) -> str:
    if one.difference is None:
        return ""
    return "0" if one.difference == 0 else f"{relative_error(one):.0e}"


def relative_error(one: Equation) -> float:
    """Returns the difference from autograd over the largest compared number."""
    assert one.difference is not None
    return one.difference / one.largest if one.largest else one.difference


def summary(explanation: Explanation) -> list[str]:
    """Returns the totals, the agreement with autograd, and the unexplained layers."""
    forward = sum(one.flops for layer in explanation.layers for one in layer.forward)
    lines = [
        f"Forward {format_flops(forward)}, backward {format_flops(explanation.flops - forward)}, {format_bytes(explanation.bytes)} read and written.",
        *_heaviest(explanation),
        *_agreement(explanation),
    ]
    unknown = [title(layer) for layer in explanation.layers if not layer.known]
    if unknown:
        lines.append(f"Not explained: {'; '.join(dict.fromkeys(unknown))}.")
    return lines + [f"Note: {note}" for note in explanation.notes]


def _heaviest(explanation: Explanation) -> Iterator[str]:
    if not explanation.flops:
        return
    totals = {_name(layer): 0.0 for layer in explanation.layers}
    for layer in explanation.layers:
        totals[_name(layer)] += sum(one.flops for one in layer.equations)
    first = sorted(totals.items(), key=lambda item: -item[1])[:_MAX_HEAVIEST]
    shares = ", ".join(f"{name} {100 * count / explanation.flops:.0f} %" for name, count in first if count)
    yield f"Most arithmetic: {shares}."


def _name(layer: LayerExplanation) -> str:
    return f"{layer.module or 'the model'} ({layer.operation})"


def _agreement(explanation: Explanation) -> Iterator[str]:
    wrong = explanation.wrong
    checked = sum(one.agrees is not None for layer in explanation.layers for one in layer.equations)
    for layer, one in wrong:
        yield f"WRONG: {one.result} of {title(layer)} is off by {relative_error(one):.1e} of its largest number."
    if checked and not wrong:
        worst = ""
        if explanation.difference:
            worst = f"; furthest off is {explanation.worst}, by {explanation.difference:.0e} of its largest number"
        yield f"All {checked} equations that can be compared agree with torch and autograd{worst}."
    alike, total = explanation.gradients
    if alike == total:
        yield f"The network's own gradients of all {total} parameters are the sums of these equations."
    else:
        yield f"Of {total} parameters, the gradients of {alike} are the sums of these equations; not {', '.join(explanation.unexplained)}."


_IDEA = """\
The backward pass of a linear layer: N samples, I inputs, O outputs, loss L

  given   X   N x I  row x_n: the input of sample n
          W   O x I  weights
          b   O      bias
          Z   N x O  Z = X W^T + b; row z_n: the output for sample n
          dZ  N x O  row dz_n: the gradient of L by z_n
  wanted  dX  N x I  dX = dZ W, row by row dx_n = dz_n W
          dW  O x I  dW = dZ^T X = sum of dz_n^T x_n over n, an outer product a sample
          db  O      db = sum of dz_n over n

If L is a mean over the batch, dZ contains the factor 1/N; no other equation has it.
dX is the dZ of the layer before. The first layer has no dX: its X is data.
dA is the gradient of L by A, with A's shape. A B is a matrix product, A * B is
element by element, ^T is the transpose."""


def linear_lesson(example: LinearExample) -> str:
    """Returns the lesson as lines of at most 80 columns."""
    return "\n".join([_IDEA, "", *_numbers(example)])


def _numbers(example: LinearExample) -> Iterator[str]:
    first, second = example.outer
    yield "Example: N = 2, I = 3, O = 2, L = mean over n of |z_n - t_n|^2 / 2"
    for blocks in (
        {"X": example.x, "W": example.w, "b": [example.b], "T": example.t},
        {"Z = X W^T + b": example.z, "dZ = (Z - T) / 2": example.dz},
        {"dz_1^T x_1": first, "dz_2^T x_2": second, "their sum dW = dZ^T X": example.dw},
        {"dX = dZ W": example.dx, "db": [example.db]},
    ):
        yield from ("", *_side_by_side(blocks))
    agrees = "the same numbers" if example.difference == 0 else f"numbers that differ by up to {example.difference:.0e}"
    yield from ("", f"autograd computes {agrees} for dX, dW and db.")


def _side_by_side(matrices: Mapping[str, Sequence[Sequence[float]]]) -> Iterator[str]:
    """Yields a line of titles, and a line for each row of the matrices, which have at most two."""
    blocks = []
    for name, rows in matrices.items():
        lines = [name, *("".join(f"{value:>5g}" for value in row) for row in rows)]
        width = max(map(len, lines))
        blocks.append([line.ljust(width) for line in [*lines, *[""] * (3 - len(lines))]])
    for parts in zip(*blocks, strict=True):
        yield f"  {'     '.join(parts)}".rstrip()
