"""Turns a recorded call into a layer's equations, and compares each with torch's result and autograd's gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hotloop.core.records.explanation import Equation, LayerExplanation, MatrixRecord
from hotloop.core.torch_private import tree_leaves, tree_map, tree_map_only
from hotloop.explainer.layers.equation import EquationTerm, Formula, FunctionCall, LayerEquations, NotCovered
from hotloop.explainer.layers.shape_ops import CASTS
from hotloop.explainer.recorder import TorchCall

ROUNDING = 1e-9
"""Tolerance relative to the numbers in an equation: float64 has 2e-16, and sums over a batch add many errors."""

_FLOAT_BYTES = 4
"""Bytes of a number in training."""

_NARROW = (torch.float32, torch.float16, torch.bfloat16)


def check_call(recorded: TorchCall, formula: Formula) -> tuple[LayerExplanation, dict[str, Tensor]]:
    """Computes the equations of a call on its inputs and its output gradient, and compares the results.

    Returns:
        The layer, and the float64 gradients of its parameters by the equations, by parameter name.
    """
    layer = layer_without_equations(recorded)
    if recorded.is_overwritten:
        return _not_explained(layer, "an input was overwritten later")
    # Without a gradient of the output, the check uses ones.
    call, leaves = _to_float64(recorded)
    try:
        equations = formula(call)
    except NotCovered as reason:
        return _not_explained(layer, str(reason))
    flows = bool(recorded.gradients)
    wanted = {name for name, value in equations.operands.items() if value.requires_grad}
    expected = _autograd_gradients(call, equations, wanted)
    scale = _largest([*leaves, *call.gradients])
    forward = [_equation(term, call.outputs[0] if term.result == "Z" else None, scale) for term in equations.forward]
    backward = []
    gradients: dict[str, Tensor] = {}
    for term in equations.backward if flows else []:
        name = term.result.removeprefix("d")
        if name in equations.operands and name not in wanted:
            continue
        with torch.no_grad():
            value = term.value().detach()
        backward.append(_equation(term, expected.get(name), scale, value))
        parameter = (
            recorded.parameters[_occurrence(leaves, equations.operands.get(name))] if name in equations.operands else ""
        )
        if parameter:
            gradients[parameter] = gradients.get(parameter, torch.zeros(())) + value
    notes = [*layer.notes, *equations.notes]
    notes += _absent_gradients(recorded, equations, leaves, wanted) if flows else ["no gradient reaches this layer"]
    matrices = [_matrix(name, value, recorded, leaves) for name, value in equations.operands.items()]
    matrices.append(MatrixRecord(name="Z", shape=list(call.outputs[0].shape)))
    changes = {"matrices": matrices, "forward": forward, "backward": backward, "notes": notes, "known": True}
    return layer.model_copy(update=changes), gradients


def layer_without_equations(recorded: TorchCall) -> LayerExplanation:
    """Returns a call's matrices by shape, without equations."""
    floating = [leaf for leaf in recorded.tensors if leaf.is_floating_point()]
    matrices = [
        MatrixRecord(name=f"input {number}", shape=list(value.shape), parameter=name)
        for number, (value, name) in enumerate(zip(floating, recorded.parameters, strict=True), start=1)
    ]
    matrices += [MatrixRecord(name="output", shape=list(value.shape)) for value in recorded.outputs]
    sizes = {name: value.numel() for value, name in zip(floating, recorded.parameters, strict=True) if name}
    return LayerExplanation(
        module=recorded.module_call.module,
        kind=recorded.module_call.kind,
        operation=recorded.name,
        call=recorded.module_call.call,
        where=recorded.where,
        known=False,
        parameters=sum(sizes.values()),
        matrices=matrices,
    )


def _not_explained(layer: LayerExplanation, reason: str) -> tuple[LayerExplanation, dict[str, Tensor]]:
    return layer.model_copy(update={"notes": [*layer.notes, f"not explained: {reason}"]}), {}


def _to_float64(recorded: TorchCall) -> tuple[FunctionCall, list[Tensor]]:
    """Returns the call in float64, and its floating-point leaves in order. A cast becomes a copy."""
    needs = iter(recorded.needs)
    leaves: list[Tensor] = []

    def wide(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        leaf = x.double() if x.dtype != torch.float64 else x.clone()
        leaves.append(leaf.requires_grad_(next(needs)))
        return leaf

    arguments, options = tree_map_only(Tensor, wide, (recorded.arguments, recorded.options))
    arguments, options = tree_map(
        lambda leaf: torch.float64 if leaf in _NARROW else leaf,
        (arguments, options),
        is_leaf=lambda leaf: isinstance(leaf, torch.dtype),
    )

    function = recorded.function
    if recorded.name in CASTS:
        function, arguments, options = torch.clone, arguments[:1], {}

    def drawn(function: Callable[[], Tensor]) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            if recorded.drawn_from is not None:
                torch.set_rng_state(recorded.drawn_from)
            return function()

    with torch.enable_grad():
        outputs = drawn(lambda: _outputs(function, arguments, options))  # type: ignore[arg-type,return-value]
    recorded_gradients = [recorded.gradients.get(place) for place in range(len(outputs))]
    gradients = [
        torch.zeros_like(z)
        if gradient is None and recorded.gradients
        else torch.ones_like(z)
        if gradient is None
        else gradient.double()
        for z, gradient in zip(outputs, recorded_gradients, strict=True)
    ]
    call = FunctionCall(
        recorded.name, function, arguments, options, list(outputs), [g.detach() for g in gradients], drawn
    )
    return call, leaves


def _outputs(function: Callable[..., Any], arguments: Any, options: Any) -> list[Tensor]:
    """Calls the function on copies, since it may work in place."""
    copied, named = tree_map_only(Tensor, lambda x: x.clone() if x.requires_grad else x, (arguments, options))
    out = function(*copied, **named)
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _autograd_gradients(call: FunctionCall, equations: LayerEquations, wanted: set[str]) -> dict[str, Tensor]:
    names = sorted(wanted)
    pairs = [(z, dz) for z, dz in zip(call.outputs, call.gradients, strict=True) if z.requires_grad]
    if not names or not pairs:
        return {}
    outputs, gradients = zip(*pairs, strict=True)
    found = torch.autograd.grad(
        outputs, [equations.operands[name] for name in names], gradients, materialize_grads=True
    )
    return {name: value.to_dense() if value.is_sparse else value for name, value in zip(names, found, strict=True)}


def _equation(term: EquationTerm, truth: Tensor | None, scale: float, value: Tensor | None = None) -> Equation:
    with torch.no_grad():
        value = term.value() if value is None else value
        touched = [*term.reads, value] if term.reads else []
        bytes_ = sum(_FLOAT_BYTES * x.numel() if x.is_floating_point() else x.nbytes for x in touched)
        equation = Equation(result=term.result, text=term.text, shape=list(value.shape), flops=term.flops, bytes=bytes_)
        if truth is None:
            return equation
        if value.shape != truth.shape:
            return equation.model_copy(update={"agrees": False, "difference": float("inf")})
        difference, largest = _largest_difference(value, truth), _largest([truth])
        agrees = difference <= ROUNDING * max(largest, scale)
        return equation.model_copy(update={"difference": difference, "largest": largest, "agrees": bool(agrees)})


def _largest_difference(value: Tensor, truth: Tensor) -> float:
    """Equal infinities, as in masks, differ by 0."""
    return float((value - truth).masked_fill(value == truth, 0.0).abs().max()) if value.numel() else 0.0


def _largest(tensors: list[Tensor]) -> float:
    """Returns the largest magnitude, without infinities, as in masks, but with NaN."""
    found = [x.detach().abs().masked_fill(x.detach().isinf(), 0.0).max() for x in tensors if x.numel()]
    return float(torch.stack(found).max()) if found else 0.0


def _absent_gradients(
    recorded: TorchCall, equations: LayerEquations, leaves: list[Tensor], wanted: set[str]
) -> Iterator[str]:
    """Yields why the backward pass computes no gradient of an operand."""
    results = {term.result for term in equations.backward}
    for name, value in equations.operands.items():
        if name in wanted or f"d{name}" not in results:
            continue
        parameter = recorded.parameters[_occurrence(leaves, value)]
        yield f"no d{name}: " + (
            f"{parameter} is frozen" if parameter else f"{name} needs no gradient, since nothing before it is trained"
        )


def _occurrence(leaves: list[Tensor], value: Tensor | None) -> int:
    return next(place for place, leaf in enumerate(leaves) if leaf is value)


def _matrix(name: str, value: Tensor, recorded: TorchCall, leaves: list[Tensor]) -> MatrixRecord:
    found = [place for place, leaf in enumerate(leaves) if leaf is value]
    return MatrixRecord(name=name, shape=list(value.shape), parameter=recorded.parameters[found[0]] if found else "")
