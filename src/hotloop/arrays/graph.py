"""Layers that are no chain: a value may go to several of them, and a layer may get several values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from operator import add
from typing import Any

from hotloop.arrays.backend import Array, ArrayFactory, Shape
from hotloop.arrays.layer import Layer, ShapeMismatch, check_layers
from hotloop.errors import TaskError, type_name

INPUT = "x"
"""What the graph itself gets."""


class Graph(Layer):
    """Layers by name, each with the names of those whose results it gets; several of them are added up.

        forward   Y_k  = f_k(Σ Y_j)      over the j whose results layer k gets
        backward  dY_j = Σ f_k'(dY_k)    over the k that got Y_j

    So where forward adds up, backward gives the same to each, and where forward gives the same to several, backward adds
    up. The last layer's result is the graph's. A residual sum, for one:

        Graph({"conv": (Conv(8, 3, pad=1), "x"), "relu": (ReLU(), "conv"), "sum": (Identity(), "relu", "x")})

    Args:
        nodes: (layer, name, ...) by name, where `x` is what the graph gets; each stands behind those that it names.
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
        """Shape of a sample of each value; with a maker, the weights of each layer are made on the way."""
        found = {INPUT: tuple(shape)}
        for name, (layer, given) in self.nodes.items():
            coming = found[given[0]]
            try:
                if any(found[one] != coming for one in given):
                    raise ShapeMismatch(
                        f"samples of one shape to add up, not {', '.join(str(found[one]) for one in given)}"
                    )
                after = tuple(layer.shape(coming))
            except ShapeMismatch as error:
                error.at_layer(name, layer, coming)
                raise
            if make is not None:
                layer.build(coming, make)
            found[name] = after
        return found

    def build(self, shape: Shape, make: ArrayFactory) -> None:
        self.shapes(shape, make)

    def forward(self, x: Array, training: bool = False) -> Array:
        values = {INPUT: x}
        for name, (layer, given) in self.nodes.items():
            values[name] = layer.forward(reduce(add, [values[one] for one in given]), training)
        return values[name]

    def backward(self, dy: Array) -> Array:
        coming = {next(reversed(self.nodes)): dy}
        for name, (layer, given) in reversed(self.nodes.items()):
            dx = layer.backward(coming.pop(name))
            for one in given if dx is not None else ():  # nothing comes back from an embedding
                coming[one] = coming[one] + dx if one in coming else dx
        return coming.get(INPUT)

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
            raise TaskError(
                f"{name!r} of a graph {got}", expected=f"names of what stands before it: {', '.join(known)}"
            )
        known.append(name)
        used.update(given)
    unused = [name for name in known[:-1] if name not in used]
    if unused:
        raise TaskError(f"{unused[0]!r} of a graph is used by no layer", expected="one result, that of the last layer")
