"""What the layers of a network compute, forward and backward: frozen, versioned records. They need no torch to be read."""

from __future__ import annotations

from pydantic import Field

from hotloop.core.records.training import Record


class MatrixRecord(Record):
    """A tensor that takes part in a layer.

    Attributes:
        name: in the layer's equations, such as `X`, `W` or `Z`.
        shape: for this batch.
        parameter: by which name the model knows it; empty for what isn't a parameter.
    """

    name: str
    shape: list[int]
    parameter: str = ""


class Equation(Record):
    """How one matrix is computed.

    Attributes:
        result: its name; `dW` is the gradient of `W`.
        text: the right side, such as `dZ^T X`.
        shape: of the result.
        flops: multiplications and additions, a function such as `exp` being one.
        bytes: operands read once and the result written once, in the dtype that trains.
        difference: the largest between this equation, in plain matrix operations in float64 on this batch, and what torch
            and its autograd compute in float64; None where nothing was compared, as for what stands between.
        largest: the largest number that they were compared in.
        agrees: whether the difference is no more than rounding; None where nothing was compared.
    """

    result: str
    text: str
    shape: list[int]
    flops: float
    bytes: float
    difference: float | None = None
    largest: float | None = None
    agrees: bool | None = None


class LayerExplanation(Record):
    """One operation of the network in one forward pass and its backward.

    Attributes:
        module: by which name the model knows the innermost module that calls it; empty for the model itself, and `(loss)`
            outside of it.
        kind: class of that module.
        operation: as torch calls it, such as `linear`.
        call: how many times the module had been called before, plus one; modules may be shared.
        where: the user's line that led to it, as `file:line`.
        known: whether it is explained; otherwise its matrices are all that is said of it.
        parameters: numbers in its parameters.
        notes: what this equation leaves out, or why nothing was compared.
    """

    module: str
    kind: str
    operation: str
    call: int = 1
    where: str = ""
    known: bool = True
    parameters: int = 0
    matrices: list[MatrixRecord] = Field(default_factory=list)
    forward: list[Equation] = Field(default_factory=list)
    backward: list[Equation] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)

    @property
    def equations(self) -> list[Equation]:
        return [*self.forward, *self.backward]


class Explanation(Record):
    """The layers of a Task's model, for one batch.

    Attributes:
        task: its name.
        batch: shapes of the batch's tensors.
        parameters: trainable numbers.
        layers: in the order of the forward pass.
        flops: of all equations, forward and backward.
        bytes: likewise.
        worst: the equation furthest from autograd, as `module: result`, with its difference over the largest number.
        difference: that ratio.
        gradients: how many parameters' gradients, summed over all that use them, are the ones that the network's own
            backward gave, within the rounding of the dtype that trains; of how many.
        unexplained: parameters whose gradients aren't, or that take part in what isn't known.
        written: the matrices of each layer of `hotloop.arrays` that does what one of these does, by its name.
    """

    version: int = 1
    task: str
    batch: list[str]
    parameters: int
    layers: list[LayerExplanation]
    flops: float
    bytes: float
    worst: str = ""
    difference: float | None = None
    gradients: tuple[int, int] = (0, 0)
    unexplained: list[str] = Field(default_factory=list)
    written: dict[str, str] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)

    @property
    def wrong(self) -> list[tuple[LayerExplanation, Equation]]:
        """Equations that differ from autograd by more than rounding."""
        return [(layer, one) for layer in self.layers for one in layer.equations if one.agrees is False]
