"""The interface of a layer, and combinations of layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hotloop.arrays.backend import Array, ArrayFactory, Shape
from hotloop.errors import TaskError, type_name


class Layer:
    """A function y = f(x, weights) and its derivative.

    A layer's docstring gives its matrices: n is the number of samples in a batch; X and Y are input and output; dX is
    the derivative of the loss with respect to X, of the shape of X.

    Attributes:
        weights: trained arrays by name; each changes in place.
        gradients: derivatives of the loss, by the weights' names, after `backward`.
        buffers: other arrays that training changes, such as running means.
    """

    def __init__(self) -> None:
        self.weights: dict[str, Array] = {}
        self.gradients: dict[str, Array] = {}
        self.buffers: dict[str, Array] = {}

    def shape(self, shape: Shape) -> Shape:
        """Returns the shape of an output sample for the shape of an input sample.

        Raises:
            ShapeMismatch: the layer doesn't accept the shape.
        """
        return shape

    def build(self, shape: Shape, make: ArrayFactory) -> None:
        """Makes weights and buffers for samples of this shape."""

    def forward(self, x: Array, training: bool = False) -> Array:
        """Returns Y of X, both (n, ...); stores the inputs of `backward` in training."""
        raise NotImplementedError

    def backward(self, dy: Array) -> Array:
        """Returns dX of dY and fills `gradients`; requires a `forward` in training."""
        raise NotImplementedError

    def leaves(self, name: str = "") -> Iterator[tuple[str, Layer]]:
        """Yields name and layer of each layer without inner layers."""
        yield name, self

    def __repr__(self) -> str:
        return type(self).__name__


class ShapeMismatch(Exception):
    """A layer doesn't accept the shape of its input.

    Attributes:
        needs: the accepted shapes.
        place, layer, shape: the layer and the shape of its input; the outer chains set these.
    """

    def __init__(self, needs: str) -> None:
        super().__init__(needs)
        self.needs = needs
        self.place = ""
        self.layer: Layer | None = None
        self.shape: Shape = ()

    def at_layer(self, place: int | str, layer: Layer, shape: Shape) -> None:
        self.place = f"{place}.{self.place}" if self.place else str(place)
        if self.layer is None:
            self.layer, self.shape = layer, shape


class Chain(Layer):
    """Layers in sequence: Y = f_k(... f_2(f_1(X))).

    Backward is the chain rule: each layer turns the derivative of its output into that of its input, last to first.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        check_layers(layers)
        self.layers = list(layers)

    def shape(self, shape: Shape) -> Shape:
        for place in range(len(self.layers)):
            shape = self._after(place, shape)
        return shape

    def build(self, shape: Shape, make: ArrayFactory) -> None:
        for place, layer in enumerate(self.layers):
            after = self._after(place, shape)
            layer.build(shape, make)
            shape = after

    def _after(self, place: int, shape: Shape) -> Shape:
        try:
            return tuple(self.layers[place].shape(shape))
        except ShapeMismatch as error:
            error.at_layer(place, self.layers[place], shape)
            raise

    def forward(self, x: Array, training: bool = False) -> Array:
        for layer in self.layers:
            x = layer.forward(x, training)
        return x

    def backward(self, dy: Array) -> Array:
        for layer in reversed(self.layers):
            dy = layer.backward(dy)
        return dy

    def leaves(self, name: str = "") -> Iterator[tuple[str, Layer]]:
        for place, layer in enumerate(self.layers):
            yield from layer.leaves(f"{name}.{place}" if name else str(place))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.layers!r})"


def check_integers(of: str, least: int, **values: Any) -> None:
    """Checks that the values are whole numbers of at least `least`; `of` names their owner.

    Raises:
        TaskError: with the first other value.
    """
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise TaskError(f"{name}={value!r} of {of}", expected=f"a whole number of {least} or more")


def check_layers(given: Any) -> None:
    """Checks for a list of layers.

    Raises:
        TaskError: with the first other value.
    """
    if not isinstance(given, Sequence):
        raise TaskError(
            f"{type_name(given)} in place of a list of layers", expected="a list", fix="write [Dense(100), ...]"
        )
    for layer in given:
        if not isinstance(layer, Layer):
            shown = f"the class {layer.__name__}" if isinstance(layer, type) else type_name(layer)
            raise TaskError(
                f"{shown} stands among the layers",
                expected="layers",
                fix="make an instance of the class, such as Dense(100)",
            )


class Residual(Chain):
    """The residual sum (He et al.: Deep Residual Learning, CVPR 2016, figure 2): Y = X + F(X), F a chain of layers.

    forward   Y  = X + F(X)      X, Y (n, ...), of the same shape
    backward  dX = dY + F'(dY)   F' is the backward of the chain
    """

    def shape(self, shape: Shape) -> Shape:
        after = super().shape(shape)
        if after != tuple(shape):
            raise ShapeMismatch(f"what its layers give back in the same shape; they give {after}")
        return after

    def forward(self, x: Array, training: bool = False) -> Array:
        return x + super().forward(x, training)

    def backward(self, dy: Array) -> Array:
        return dy + super().backward(dy)


def shape_after(layers: Layer, shape: Shape) -> Shape:
    """Returns the shape of an output sample of the layers.

    Raises:
        TaskError: a layer doesn't accept its input's shape.
    """
    try:
        return tuple(layers.shape(shape))
    except ShapeMismatch as error:
        raise TaskError(
            f"layer {error.place}, {error.layer!r}, gets samples of shape {tuple(error.shape)}",
            expected=error.needs,
            fix="change that layer, the one before it, or the data",
        ) from None
