"""Formats the backward pass of a linear layer as a lesson: definitions, shapes, and an example in numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hotloop.core.records.explanation import LinearExample

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
