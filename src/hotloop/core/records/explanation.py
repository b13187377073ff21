"""Equations of a network's layers, forward and backward: frozen, versioned records, readable without torch."""

from __future__ import annotations

from pydantic import Field

from hotloop.core.records.training import Record


class MatrixRecord(Record):
    """A tensor of a layer.

    Attributes:
        name: in the equations, such as `X`, `W` or `Z`.
        parameter: the model's name for a parameter; empty for other tensors.
    """

    name: str
    shape: list[int]
    parameter: str = ""


class Equation(Record):
    """The computation of one matrix.

    Attributes:
        result: the matrix's name; `dW` is the gradient of `W`.
        text: the right side, such as `dZ^T X`.
        flops: multiplications and additions; a function such as `exp` counts as one.
        bytes: operands read once and the result written once, in the dtype of the training.
        difference: largest difference between the equation (plain matrix operations, float64) and torch's result and
            autograd in float64; None without a comparison, as for intermediate results.
        largest: largest compared number.
        agrees: whether the difference is within rounding; None without a comparison.
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
    """One operation of the network, forward and backward.

    Attributes:
        module: name of the innermost calling module; empty for the model itself, `(loss)` outside the model.
        kind: the module's class.
        operation: torch's name, such as `linear`.
        call: number of this call of the module, from 1.
        where: the user's line, as `file:line`.
        known: whether there are equations; otherwise only matrices are listed.
        parameters: number of elements of its parameters.
        notes: what the equations omit, or why there is no comparison.
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


class LinearExample(Record):
    """The backward pass of a linear layer in numbers: 2 samples, 3 inputs, 2 outputs, float64.

    The loss is the mean over the samples n of |z_n - t_n|^2 / 2. Matrices are lists of rows.

    Attributes:
        x, w, b, t: inputs, weights, bias and targets.
        z: output, X W^T + b.
        dz: gradient of the loss by Z; row n belongs to sample n.
        dx, dw, db: gradients by X, W and b, as matrix products.
        outer: for each sample, the outer product of its rows of dZ and X; dW is their sum.
        difference: largest difference of dX, dW and db from autograd's gradients.
    """

    x: list[list[float]]
    w: list[list[float]]
    b: list[float]
    t: list[list[float]]
    z: list[list[float]]
    dz: list[list[float]]
    dx: list[list[float]]
    dw: list[list[float]]
    db: list[float]
    outer: list[list[list[float]]]
    difference: float


class Explanation(Record):
    """The layers of a Task's model for one batch.

    Attributes:
        batch: shapes of the batch's tensors.
        parameters: number of trainable elements.
        layers: in the order of the forward pass.
        flops, bytes: sums over all equations.
        worst, difference: the equation with the largest relative difference from autograd, as `module: result`, and
            that difference.
        gradients: number of parameters whose gradients equal the network's own backward within rounding, and of all.
        unexplained: parameters with other gradients, or in unknown operations.
        example: the backward pass of a linear layer in numbers.
        written: matrices of the equivalent layer of `hotloop.arrays`, by layer name.
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
    example: LinearExample | None = None
    written: dict[str, str] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)

    @property
    def wrong(self) -> list[tuple[LayerExplanation, Equation]]:
        return [(layer, equation) for layer in self.layers for equation in layer.equations if equation.agrees is False]
