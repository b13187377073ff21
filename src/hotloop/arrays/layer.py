"""What a layer is, and how layers are put together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hotloop.arrays.backend import Array, ArrayFactory, Shape
from hotloop.errors import TaskError, type_name


class Layer:
    """A function y = f(x, weights) and its derivative, written out.

    A docstring of a layer gives its matrices. There, n is the number of samples in a batch; X and Y are what the layer
    gets and gives; dX stands for the derivative of the loss with respect to X, and has the shape of X.

    Attributes:
        weights: what is trained, by name; each changes in place.
        gradients: derivatives of the loss, by the weights' names, after `backward`.
        buffers: what training changes otherwise, such as running means.
    """

    def __init__(self) -> None:
        self.weights: dict[str, Array] = {}
        self.gradients: dict[str, Array] = {}
        self.buffers: dict[str, Array] = {}

    def shape(self, shape: Shape) -> Shape:
        """Shape of a sample that comes out, for one that goes in.

        Raises:
            Unfit: no such sample can go in.
        """
        return shape

    def build(self, shape: Shape, make: ArrayFactory) -> None:
        """Makes weights and buffers for samples of this shape."""

    def forward(self, x: Array, training: bool = False) -> Array:
        """Y of X, both (n, ...); in training, what `backward` needs is kept."""
        raise NotImplementedError

    def backward(self, dy: Array) -> Array:
        """dX of dY; fills `gradients`. Comes after `forward` in training, with the dY of its Y."""
        raise NotImplementedError

    def leaves(self, name: str = "") -> Iterator[tuple[str, Layer]]:
        """Name and layer of each layer that is not made of others."""
        yield name, self

    def __repr__(self) -> str:
        return type(self).__name__


class ShapeMismatch(Exception):
    """A layer can't take samples of the shape that it gets.

    Attributes:
        needs: what it could take.
        place, layer, shape: which layer got which shape; the chains that it is in fill that in.
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
    """Layers one after the other: Y = f_k(... f_2(f_1(X))).

    Backward is the chain rule: each layer turns the derivative of what it gave into that of what it got, last to first.
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
    """Refuses what isn't a whole number of at least so much; `of` is whose numbers they are.

    Raises:
        TaskError: naming the first.
    """
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise TaskError(f"{name}={value!r} of {of}", expected=f"a whole number of {least} or more")


def check_layers(given: Any) -> None:
    """Refuses what isn't a list of layers.

    Raises:
        TaskError: naming what stands there instead.
    """
    if not isinstance(given, Sequence):
        raise TaskError(
            f"{type_name(given)} in place of a list of layers", expected="a list", fix="write [Dense(100), ...]"
        )
    for layer in given:
        if not isinstance(layer, Layer):
            shown = f"the class {layer.__name__}" if isinstance(layer, type) else type_name(layer)
            raise TaskError(
                f"{shown} stands among the layers", expected="layers", fix="make one of it, such as Dense(100)"
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
    """Shape of a sample that comes out of the layers.

    Raises:
        TaskError: a layer can't take what the one before it gives.
    """
    try:
        return tuple(layers.shape(shape))
    except ShapeMismatch as error:
        raise TaskError(
            f"layer {error.place}, {error.layer!r}, gets samples of shape {tuple(error.shape)}",
            expected=error.needs,
            fix="change that layer, the one before it, or the data",
        ) from None
