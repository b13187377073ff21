"""A graph of layers: several layers may use a value, and a layer may sum several values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from operator import add
from typing import Any

from hotloop.arrays.backend import Array, ArrayFactory, Shape
from hotloop.arrays.layer import Layer, ShapeMismatch, check_layers
from hotloop.errors import TaskError, type_name

INPUT = "x"
"""Name of the graph's input."""


class Graph(Layer):
    """Layers by name, each with the names of its inputs, which are summed.

        forward   Y_k  = f_k(Σ Y_j)      over the inputs j of layer k
        backward  dY_j = Σ f_k'(dY_k)    over the layers k with the input j

    The last layer's result is the graph's. A residual sum:

        Graph({"conv": (Conv(8, 3, pad=1), "x"), "relu": (ReLU(), "conv"), "sum": (Identity(), "relu", "x")})

    Args:
        nodes: (layer, input, ...) by name, where `x` is the graph's input; each node follows its inputs.
    """

    def __init__(self, nodes: Mapping[str, tuple[Any, ...]]) -> None:
        super().__init__()
        _check(nodes)
        self.nodes: dict[str, tuple[Layer, tuple[str, ...]]] = {
            name: (layer, tuple(given)) for name, (layer, *given) in nodes.items()
        }

    def shape(self, shape: Shape) -> Shape:
        return self.shapes(shape)[next(reversed(self.nodes))]

    def shapes(self, shape: Shape, make: ArrayFactory | None = None) -> dict[str, Shape]:
        """Returns the shape of a sample of each value; builds each layer's weights if `make` is given."""
        shapes = {INPUT: tuple(shape)}
        for name, (layer, inputs) in self.nodes.items():
            summed = shapes[inputs[0]]
            try:
                if any(shapes[source] != summed for source in inputs):
                    raise ShapeMismatch(
                        f"samples of one shape to add up, not {', '.join(str(shapes[s]) for s in inputs)}"
                    )
                after = tuple(layer.shape(summed))
            except ShapeMismatch as error:
                error.at_layer(name, layer, summed)
                raise
            if make is not None:
                layer.build(summed, make)
            shapes[name] = after
        return shapes

    def build(self, shape: Shape, make: ArrayFactory) -> None:
        self.shapes(shape, make)

    def forward(self, x: Array, training: bool = False) -> Array:
        values = {INPUT: x}
        for name, (layer, inputs) in self.nodes.items():
            values[name] = layer.forward(reduce(add, [values[source] for source in inputs]), training)
        return values[name]

    def backward(self, dy: Array) -> Array:
        gradients = {next(reversed(self.nodes)): dy}
        for name, (layer, inputs) in reversed(self.nodes.items()):
            dx = layer.backward(gradients.pop(name))
            for source in inputs if dx is not None else ():  # an embedding has no dX
                gradients[source] = gradients[source] + dx if source in gradients else dx
        return gradients.get(INPUT)

    def leaves(self, name: str = "") -> Iterator[tuple[str, Layer]]:
        for place, (layer, _) in self.nodes.items():
            yield from layer.leaves(f"{name}.{place}" if name else place)

    def __repr__(self) -> str:
        return f"Graph({', '.join(self.nodes)})"


def _check(nodes: Any) -> None:
    if not isinstance(nodes, Mapping) or not nodes:
        raise TaskError(
            f"{type_name(nodes)} in place of a graph's layers",
            expected="a dict of them",
            fix='write {"conv": (Conv(8, 3), "x"), ...}',
        )
    known, used = [INPUT], set()
    for name, node in nodes.items():
        layer, *given = node if isinstance(node, tuple) and node else (node,)
        check_layers([layer])
        unknown = [one for one in given if one not in known]
        if not given or unknown or name == INPUT:
            got = f"gets {unknown[0]!r}" if unknown else "gets nothing" if not given else "has the input's name"
            raise TaskError(f"{name!r} of a graph {got}", expected=f"names of layers before it: {', '.join(known)}")
        known.append(name)
        used.update(given)
    unused = [name for name in known[:-1] if name not in used]
    if unused:
        raise TaskError(f"{unused[0]!r} of a graph is used by no layer", expected="one result, that of the last layer")
