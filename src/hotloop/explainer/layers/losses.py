"""Losses, whose gradients begin the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hotloop.arrays.activations import sigmoid
from hotloop.explainer.layers.equation import (
    EquationTerm,
    Formula,
    FunctionCall,
    LayerEquations,
    NotCovered,
    named_operands,
)

_MEAN, _NONE = ("mean", 1), ("none", 0)


def _reduction(
    call: FunctionCall, place: int, count: float, dz: Tensor
) -> tuple[Callable[[Tensor], Tensor], Tensor, str]:
    """How the terms of a loss are reduced, dZ for each of them, and the words for it."""
    reduction = call.get(place, "reduction", 1)
    if reduction in _NONE:
        return (lambda terms: terms), dz, ""
    if reduction in _MEAN:
        return (lambda terms: terms.sum() / count), dz / count, f" / {count:g}"
    return (lambda terms: terms.sum()), dz, ""


def cross_entropy(call: FunctionCall) -> LayerEquations:
    """input, target, weight, reduction, ignored class, label smoothing: Z = -mean of Y log softmax X, dX = (P - Y) dZ / n."""
    x, target = call.tensor(0, "input"), call.tensor(1, "target")
    weight, ignored, smooth = (
        call.get(2, "weight"),
        call.get(4, "ignore_index", -100),
        call.get(5, "label_smoothing", 0.0),
    )
    if weight is not None:
        raise NotCovered("its classes are weighted")
    along = 1 if x.ndim > 1 else 0
    classes = x.shape[along]
    by_class = not target.is_floating_point()
    used = (target != ignored) if by_class else torch.ones_like(x.select(along, 0), dtype=torch.bool)
    y = _one_hot(target, classes, used, along, x) if by_class else target
    y = y * (1 - smooth) + smooth / classes * used.unsqueeze(along).to(x.dtype)
    count = float(used.sum()) if by_class else x.numel() / classes
    together, dz, words = _reduction(call, 3, count, call.dz)
    log_p = x - x.logsumexp(along, keepdim=True)
    per_term = dz if dz.ndim == 0 else dz.unsqueeze(along)
    notes = ["Y: one-hot rows of the targets" if by_class else "Y: the targets"]
    if by_class and not bool(used.all()):
        notes.append(f"{int((~used).sum())} targets are {ignored}: ignored")
    if smooth:
        notes.append(f"Y smoothed by {smooth:g}")
    z = (f"-sum of Y * log softmax X{words}", lambda: together(-(y * log_p).sum(along)), 7 * x.numel())
    dx = (
        f"(softmax X - Y) dZ{words}",
        lambda: (log_p.exp() * y.sum(along, keepdim=True) - y) * per_term,
        3 * x.numel(),
    )
    return LayerEquations(
        {"X": x}, [EquationTerm("Z", *z, [x, target])], [EquationTerm("dX", *dx, [x, target, call.dz])], notes
    )


def _one_hot(target: Tensor, classes: int, used: Tensor, along: int, x: Tensor) -> Tensor:
    kept = torch.where(used, target, 0)
    return torch.zeros_like(x).scatter_(along, kept.unsqueeze(along), 1.0) * used.unsqueeze(along)


def negative_log_likelihood(call: FunctionCall) -> LayerEquations:
    """input (log probabilities), target, weight, reduction, ignored class: Z = -mean of X at the targets."""
    x, target, weight = call.tensor(0, "input"), call.tensor(1, "target"), call.get(2, "weight")
    if weight is not None:
        raise NotCovered("its classes are weighted")
    along = 1 if x.ndim > 1 else 0
    used = target != call.get(4, "ignore_index", -100)
    y = _one_hot(target, x.shape[along], used, along, x)
    together, dz, words = _reduction(call, 3, float(used.sum()), call.dz)
    per_term = dz if dz.ndim == 0 else dz.unsqueeze(along)
    return LayerEquations(
        {"X": x},
        [EquationTerm("Z", f"-sum of Y * X{words}", lambda: together(-(y * x).sum(along)), target.numel(), [target])],
        [EquationTerm("dX", f"-Y dZ{words}", lambda: -y * per_term, target.numel(), [target, call.dz])],
        ["Y: one-hot rows of the targets"],
    )


_Terms = tuple[str, Callable[[Tensor, Tensor], Tensor], str, Callable[[Tensor, Tensor], Tensor], int, int]


def _pointwise_terms(call: FunctionCall) -> tuple[_Terms, int]:
    """(text, f, text of df/dX, df/dX, FLOPs forward, backward) of a loss of two tensors, and the place of its reduction."""
    name = call.name
    if name == "mse_loss":
        return ("(X - Y)^2", lambda x, y: (x - y) ** 2, "2 (X - Y)", lambda x, y: 2 * (x - y), 3, 3), 2
    if name == "l1_loss":
        return ("|X - Y|", lambda x, y: (x - y).abs(), "sign(X - Y)", lambda x, y: torch.sign(x - y), 3, 3), 2
    if name in ("smooth_l1_loss", "huber_loss"):
        width = call.get(3, "beta" if name == "smooth_l1_loss" else "delta", 1.0)
        part = 1.0 if name == "huber_loss" else 1 / width

        def bowl(x: Tensor, y: Tensor) -> Tensor:
            far = (x - y).abs()
            return part * torch.where(far < width, far * far / 2, width * (far - width / 2))

        return (
            f"(X - Y)^2 {part / 2:g} within {width:g}, straight beyond",
            bowl,
            f"{part:g} (X - Y), cut at {width:g}",
            lambda x, y: part * (x - y).clamp(-width, width),
            5,
            4,
        ), 2
    pos_weight = call.get(3, "pos_weight") if name.endswith("with_logits") else None
    if call.get(2, "weight") is not None or pos_weight is not None:
        raise NotCovered("its terms are weighted")
    if name == "binary_cross_entropy":
        return (
            "-(Y log X + (1 - Y) log(1 - X))",
            lambda x, y: -(y * x.log().clamp(min=-100) + (1 - y) * (1 - x).log().clamp(min=-100)),
            "(X - Y) / (X (1 - X))",
            lambda x, y: (x - y) / (x * (1 - x)).clamp(min=1e-12),
            7,
            6,
        ), 3
    return (
        "log(1 + exp X) - X Y",
        lambda x, y: torch.logaddexp(x, torch.zeros_like(x)) - x * y,
        "sigmoid X - Y",
        lambda x, y: sigmoid(x) - y,
        5,
        5,
    ), 4


def pointwise_loss(call: FunctionCall) -> LayerEquations:
    """Z = mean of f(X, Y), dX = f'(X, Y) dZ / n; the gradient of Y where it needs one isn't explained."""
    x, y = call.tensor(0, "input"), call.tensor(1, "target")
    if y.requires_grad:
        raise NotCovered("its target needs a gradient")
    (text, value, slope_text, slope, forward, backward), place = _pointwise_terms(call)
    together, dz, words = _reduction(call, place, x.numel(), call.dz)
    z = (f"sum of {text}{words}" if words else text, lambda: together(value(x, y)), forward * x.numel())
    dx = (f"({slope_text}) dZ{words}", lambda: slope(x, y) * dz, backward * x.numel())
    terms = [EquationTerm("Z", *z, [x, y])], [EquationTerm("dX", *dx, [x, y, call.dz])]
    return LayerEquations(named_operands(X=x, Y=y), *terms)


_POINTWISE = "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits"

FORMULAS: dict[str, Formula] = {
    "cross_entropy_loss": cross_entropy,
    "nll_loss": negative_log_likelihood,
    "nll_loss_nd": negative_log_likelihood,
    **dict.fromkeys(_POINTWISE.split(), pointwise_loss),
}
