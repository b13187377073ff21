"""Attention: softmax(Q K^T / sqrt(d) + mask) V.

Vaswani et al., "Attention is all you need", 2017; the gradients as in Dao et al., "FlashAttention", 2022, appendix B.2.
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
    ones_like,
    sum_to_shape,
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


FORMULAS: dict[str, Formula] = {"scaled_dot_product_attention": attention}
