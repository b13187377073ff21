"""Linear layers and products of matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from hotloop.explainer.layers.equation import (
    EquationTerm,
    Formula,
    FunctionCall,
    LayerEquations,
    NotCovered,
    dot_flops,
    named_operands,
    sum_to_shape,
)


def linear(call: FunctionCall) -> LayerEquations:
    """Z = X W^T + b over the last dimension of X; all other dimensions are rows."""
    x, w = call.tensor(0, "input"), call.tensor(1, "weight")
    b = call.get(2, "bias")
    if w.ndim != 2:
        raise NotCovered("its weight is a vector")
    dz = call.dz
    rows, dz_rows = x.reshape(-1, x.shape[-1]), dz.reshape(-1, w.shape[0])
    flops = dot_flops(len(rows), w.shape[1], w.shape[0])
    bias = torch.zeros(()) if b is None else b
    forward = EquationTerm(
        "Z", "X W^T" + " + b" * (b is not None), lambda: x @ w.T + bias, flops, [x, w, *named_operands(b=b).values()]
    )
    backward = [
        EquationTerm("dX", "dZ W", lambda: dz @ w, flops, [dz, w]),
        EquationTerm("dW", "dZ^T X = sum of dz_n^T x_n over the rows n", lambda: dz_rows.T @ rows, flops, [dz, x]),
    ]
    if b is not None:
        backward.append(EquationTerm("db", "sum of dz_n over the rows n", lambda: dz_rows.sum(0), dz.numel(), [dz]))
    return LayerEquations(named_operands(X=x, W=w, b=b), [forward], backward)


def matmul(call: FunctionCall) -> LayerEquations:
    """Z = A B for matrices, or broadcast batches of them; vectors are rows and columns."""
    a, b = call.tensor(0, "input"), call.get(1, "other", call.options.get("mat2"))
    if not isinstance(b, Tensor):
        raise NotCovered("its second factor isn't given as a tensor")
    return _matrix_product(a, b, call.dz)


def _matrix_product(a: Tensor, b: Tensor, dz: Tensor) -> LayerEquations:
    left, right = (a if a.ndim > 1 else a[None]), (b if b.ndim > 1 else b[:, None])
    grad = dz.unsqueeze(-1) if b.ndim == 1 else dz
    grad = grad.unsqueeze(-2) if a.ndim == 1 else grad
    z_shape = dz.shape
    flops = 2.0 * grad.numel() * left.shape[-1]
    return LayerEquations(
        {"A": a, "B": b},
        [EquationTerm("Z", "A B", lambda: (left @ right).reshape(z_shape), flops, [a, b])],
        [
            EquationTerm(
                "dA", "dZ B^T", lambda: sum_to_shape(grad @ right.mT, left.shape).reshape(a.shape), flops, [dz, b]
            ),
            EquationTerm(
                "dB", "A^T dZ", lambda: sum_to_shape(left.mT @ grad, right.shape).reshape(b.shape), flops, [a, dz]
            ),
        ],
    )


def affine_product(call: FunctionCall) -> LayerEquations:
    """Z = beta C + alpha A B."""
    c, a, b = call.tensor(0, "input"), call.tensor(1, "mat1"), call.tensor(2, "mat2")
    beta, alpha = call.options.get("beta", 1), call.options.get("alpha", 1)
    inner = _matrix_product(a, b, alpha * call.dz)
    dz = call.dz
    scaled = [] if (beta, alpha) == (1, 1) else [f"beta is {beta}, alpha {alpha}"]
    return LayerEquations(
        {"C": c, **inner.operands},
        [
            EquationTerm(
                "Z", "beta C + alpha A B", lambda: beta * c + alpha * (a @ b), inner.forward[0].flops, [a, b, c]
            )
        ],
        [*inner.backward, EquationTerm("dC", "beta dZ", lambda: sum_to_shape(beta * dz, c.shape), dz.numel(), [dz])],
        scaled,
    )


def einsum(call: FunctionCall) -> LayerEquations:
    """Z = A B summed over the indices that Z doesn't have; for two factors, each index of a factor being in the others."""
    equation, *factors = call.arguments
    if len(factors) == 1 and isinstance(factors[0], list | tuple):
        factors = list(factors[0])
    if len(factors) != 2 or not isinstance(equation, str) or "->" not in equation or "." in equation:
        raise NotCovered("only products of two factors with an arrow are explained")
    a, b = factors
    inputs, out = equation.replace(" ", "").split("->")
    first, second = inputs.split(",")
    if any(len(set(part)) < len(part) for part in (first, second)) or not (
        set(first) <= set(second + out) and set(second) <= set(first + out)
    ):
        raise NotCovered("an index that is repeated, or summed in one factor alone")
    dz = call.dz
    sizes = dict(zip(first + second, [*a.shape, *b.shape], strict=True))
    flops = 2.0
    for index in set(first + second):
        flops *= sizes[index]
    return LayerEquations(
        {"A": a, "B": b},
        [EquationTerm("Z", f"A B, {inputs}->{out}", lambda: torch.einsum(equation, a, b), flops, [a, b])],
        [
            EquationTerm(
                "dA",
                f"dZ B, {out},{second}->{first}",
                lambda: torch.einsum(f"{out},{second}->{first}", dz, b),
                flops,
                [dz, b],
            ),
            EquationTerm(
                "dB",
                f"dZ A, {out},{first}->{second}",
                lambda: torch.einsum(f"{out},{first}->{second}", dz, a),
                flops,
                [dz, a],
            ),
        ],
    )


FORMULAS: dict[str, Formula] = {
    "linear": linear,
    **dict.fromkeys(["matmul", "mm", "bmm", "mv", "dot"], matmul),
    "addmm": affine_product,
    "baddbmm": affine_product,
    "einsum": einsum,
}
