"""Products of matrices: linear layers, products, einsum, and attention: softmax(Q K^T / sqrt(d) + mask) V.

Vaswani et al., "Attention is all you need", 2017; the gradients of attention as in Dao et al., "FlashAttention", 2022,
appendix B.2.
"""

from __future__ import annotations

import math

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
    ones_like,
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


_MIN_VALUE = 1.0  # of the sum of a row, whose largest number is exp 0; that of a row masked as a whole is 0


def attention(call: FunctionCall) -> LayerEquations:
    """Shapes: query (..., L, E), key (..., S, E), value (..., S, F)."""
    q, k, v = call.tensor(0, "query"), call.tensor(1, "key"), call.tensor(2, "value")
    mask, p, causal = call.get(3, "attn_mask"), call.get(4, "dropout_p", 0.0), call.get(5, "is_causal", False)
    scale = call.options.get("scale") or 1 / math.sqrt(q.shape[-1])
    repeats = q.shape[-3] // k.shape[-3] if call.options.get("enable_gqa") else 1
    keys, values = (value.repeat_interleave(repeats, -3) if repeats > 1 else value for value in (k, v))
    dz = call.dz

    def weights() -> Tensor:
        scores = _mask_scores((q @ keys.mT) * scale, mask, causal)
        high = scores.amax(-1, keepdim=True)
        parts = torch.exp(scores - high.masked_fill(high == -math.inf, 0.0))
        return parts / parts.sum(-1, keepdim=True).clamp(min=_MIN_VALUE)  # fully masked rows are zero, as in torch

    s = weights()
    kept = call.drawn(lambda: torch.dropout(ones_like(s), p, True)) if p else ones_like(s)  # M / (1 - p)
    dropped = s * kept
    d_dropped = (dz @ values.mT) * kept
    ds = s * (d_dropped - (d_dropped * s).sum(-1, keepdim=True))

    def gathered(grad: Tensor, shape: torch.Size) -> Tensor:
        """Sums the gradients of heads that share keys and values."""
        if repeats > 1:
            grad = grad.unflatten(-3, (shape[-3], repeats)).sum(-3)
        return sum_to_shape(grad, shape)

    scores = f"Q K^T / {1 / scale:.4g}" + (" + mask" if mask is not None or causal else "")
    inner, outer = 2.0 * s.numel() * q.shape[-1], 2.0 * s.numel() * v.shape[-1]
    forward = [
        EquationTerm("S", scores, lambda: _mask_scores((q @ keys.mT) * scale, mask, causal), inner, [q, k]),
        EquationTerm(
            "P", "softmax S along its rows" + f", * M / {1 - p:g}" * bool(p), lambda: dropped, 5 * s.numel(), [s]
        ),
        EquationTerm("Z", "P V", lambda: dropped @ values, outer, [s, v]),
    ]
    backward = [
        EquationTerm("dV", "P^T dZ", lambda: gathered(dropped.mT @ dz, v.shape), outer, [s, dz]),
        EquationTerm("dP", "dZ V^T", lambda: d_dropped, outer, [dz, v]),
        EquationTerm("dS", "P * (dP - sum of dP * P along its rows)", lambda: ds, 4 * s.numel(), [s, s]),
        EquationTerm(
            "dQ", f"dS K / {1 / scale:.4g}", lambda: sum_to_shape((ds @ keys) * scale, q.shape), inner, [s, k]
        ),
        EquationTerm("dK", f"dS^T Q / {1 / scale:.4g}", lambda: gathered((ds.mT @ q) * scale, k.shape), inner, [s, q]),
    ]
    notes = ["fused kernels don't write S and P, and make S once more in backward"]
    if causal:
        notes.append("causal: a position uses no later position; the products are counted in full")
    if p:
        notes.append(f"M keeps each weight with a chance of {1 - p:g}")
    if repeats > 1:
        notes.append(f"{repeats} heads of Q share each head of K and V")
    return LayerEquations({"Q": q, "K": k, "V": v}, forward, backward, notes)


def _mask_scores(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        return scores.masked_fill(ahead, -math.inf)
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask


FORMULAS: dict[str, Formula] = {
    "linear": linear,
    **dict.fromkeys(["matmul", "mm", "bmm", "mv", "dot"], matmul),
    "addmm": affine_product,
    "baddbmm": affine_product,
    "einsum": einsum,
    "scaled_dot_product_attention": attention,
}
