"""The backward pass of a linear layer in numbers that can be checked by hand, compared with autograd."""

from __future__ import annotations

import torch

from hotloop.core.records.explanation import LinearExample


def linear_example() -> LinearExample:
    """Returns the example: whole numbers in X, W, b and T give gradients of few digits."""
    x = torch.tensor([[1.0, 2, 0], [0, 1, 3]], dtype=torch.float64, requires_grad=True)
    w = torch.tensor([[1.0, 0, -1], [2, 1, 0]], dtype=torch.float64, requires_grad=True)
    b = torch.tensor([0.0, 1], dtype=torch.float64, requires_grad=True)
    t = torch.tensor([[0.0, 3], [-1, 4]], dtype=torch.float64)
    z = torch.nn.functional.linear(x, w, b)
    loss = (z - t).square().sum(1).mean() / 2
    by_autograd = torch.autograd.grad(loss, (x, w, b))
    with torch.no_grad():
        dz = (z - t) / len(x)
        outer = dz[:, :, None] * x[:, None, :] + 0.0  # 0.0 in place of -0.0
        by_equations = (dz @ w, dz.T @ x, dz.sum(0))
        pairs = zip(by_equations, by_autograd, strict=True)
        difference = max(float((one - other).abs().max()) for one, other in pairs)
        named = dict(x=x, w=w, b=b, t=t, z=z, dz=dz, outer=outer)
        named |= dict(zip(("dx", "dw", "db"), by_equations, strict=True))
    return LinearExample(**{name: value.tolist() for name, value in named.items()}, difference=difference)
