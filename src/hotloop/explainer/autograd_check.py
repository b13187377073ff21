"""One recorded call -> the equations of a layer, each held against torch's own result and autograd's gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from hotloop.core.records.explanation import Equation, LayerExplanation, MatrixRecord
from hotloop.explainer.layers.equation import EquationTerm, Formula, FunctionCall, LayerEquations, NotCovered
from hotloop.explainer.layers.shape_ops import CASTS
from hotloop.explainer.recorder import TorchCall

ROUNDING = 1e-9
"""Of the numbers that go into an equation: float64 has 2e-16, and sums of a batch gather many of them."""

_NARROW = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class CheckedLayer:
    """A layer, and what its equations say of the gradients of parameters, by the parameter's name, in float64."""

    layer: LayerExplanation
    gradients: dict[str, Tensor]


def check_call(one: TorchCall, formula: Formula, bytes_of: Callable[[int], int]) -> CheckedLayer:
    """The equations of a call, computed and compared on its own inputs and the gradient that came back to it.

    Args:
        bytes_of: bytes that training has of a floating-point tensor with so many numbers.
    """
    layer = layer_without_equations(one)
    if one.is_overwritten:
        return _name_parameters(layer, "an input was overwritten later: nothing left to compute with")
    # A layer that nothing flows back to is as well explained by a gradient of ones.
    call, leaves = _to_float64(one)
    try:
        worked = formula(call)
    except NotCovered as reason:
        return _name_parameters(layer, f"not explained: {reason}")
    flows = bool(one.gradients)
    wanted = {name for name, value in worked.operands.items() if value.requires_grad}
    expected = _autograd_gradients(call, worked, wanted)
    scale = _largest([*leaves, *call.gradients])
    forward = [
        _equation(term, call.outputs[0] if term.result == "Z" else None, scale, bytes_of) for term in worked.forward
    ]
    backward = []
    gradients: dict[str, Tensor] = {}
    for term in worked.backward if flows else []:
        name = term.result.removeprefix("d")
        if name in worked.operands and name not in wanted:
            continue
        value = term.value().detach()
        backward.append(_equation(term, expected.get(name), scale, bytes_of, value))
        parameter = one.parameters[_occurrence(leaves, worked.operands.get(name))] if name in worked.operands else ""
        if parameter:
            gradients[parameter] = gradients.get(parameter, torch.zeros(())) + value
    notes = [*layer.notes, *worked.notes]
    if not flows:
        notes.append("nothing flows back here")
    matrices = [_matrix(name, value, one, leaves) for name, value in worked.operands.items()]
    matrices.append(MatrixRecord(name="Z", shape=list(call.outputs[0].shape)))
    changes = {"matrices": matrices, "forward": forward, "backward": backward, "notes": notes, "known": True}
    return CheckedLayer(layer.model_copy(update=changes), gradients)


def layer_without_equations(one: TorchCall) -> LayerExplanation:
    """A call without equations: its matrices by shape."""
    floating = [leaf for leaf in one.tensors if leaf.is_floating_point()]
    matrices = [
        MatrixRecord(name=f"input {number}", shape=list(value.shape), parameter=name)
        for number, (value, name) in enumerate(zip(floating, one.parameters, strict=True), start=1)
    ]
    matrices += [MatrixRecord(name="output", shape=list(value.shape)) for value in one.outputs]
    held = {name: value.numel() for value, name in zip(floating, one.parameters, strict=True) if name}
    return LayerExplanation(
        module=one.module_call.module,
        kind=one.module_call.kind,
        operation=one.name,
        call=one.module_call.call,
        where=one.where,
        known=False,
        parameters=sum(held.values()),
        matrices=matrices,
    )


def _name_parameters(layer: LayerExplanation, reason: str) -> CheckedLayer:
    return CheckedLayer(layer.model_copy(update={"notes": [*layer.notes, reason]}), {})


def _to_float64(one: TorchCall) -> tuple[FunctionCall, list[Tensor]]:
    """The call in float64 with leaves of their own, and these floating-point leaves in order; a cast becomes a copy."""
    needs = iter(one.needs)
    leaves: list[Tensor] = []

    def wide(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        leaf = x.double() if x.dtype != torch.float64 else x.clone()
        leaves.append(leaf.requires_grad_(next(needs)))
        return leaf

    arguments, options = tree_map_only(Tensor, wide, (one.arguments, one.options))
    arguments, options = tree_map(
        lambda leaf: torch.float64 if leaf in _NARROW else leaf, (arguments, options), is_leaf=_is_dtype
    )

    function = one.function
    if one.name in CASTS:
        function, arguments, options = torch.clone, arguments[:1], {}

    def drawn(function: Callable[[], Tensor]) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            if one.drawn_from is not None:
                torch.set_rng_state(one.drawn_from)
            return function()

    with torch.enable_grad():
        outputs = drawn(lambda: _outputs(function, arguments, options))  # type: ignore[arg-type,return-value]
    given = [one.gradients.get(place) for place in range(len(outputs))]
    gradients = [
        torch.zeros_like(z)
        if gradient is None and one.gradients
        else torch.ones_like(z)
        if gradient is None
        else gradient.double()
        for z, gradient in zip(outputs, given, strict=True)
    ]
    call = FunctionCall(one.name, function, arguments, options, list(outputs), [g.detach() for g in gradients], drawn)
    return call, leaves


def _is_dtype(leaf: Any) -> bool:
    return isinstance(leaf, torch.dtype)


def _outputs(function: Callable[..., Any], arguments: Any, options: Any) -> list[Tensor]:
    """Of copies, since the function may work in place."""
    copied, named = tree_map_only(Tensor, lambda x: x.clone() if x.requires_grad else x, (arguments, options))
    out = function(*copied, **named)
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _autograd_gradients(call: FunctionCall, worked: LayerEquations, wanted: set[str]) -> dict[str, Tensor]:
    """Gradients by the operands' names."""
    names = sorted(wanted)
    pairs = [(z, dz) for z, dz in zip(call.outputs, call.gradients, strict=True) if z.requires_grad]
    if not names or not pairs:
        return {}
    outputs, gradients = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, [worked.operands[name] for name in names], gradients, materialize_grads=True)
    return {name: value.to_dense() if value.is_sparse else value for name, value in zip(names, found, strict=True)}


def _equation(
    term: EquationTerm, truth: Tensor | None, scale: float, bytes_of: Callable[[int], int], value: Tensor | None = None
) -> Equation:
    with torch.no_grad():
        value = term.value() if value is None else value
        touched = [*term.reads, value] if term.reads else []
        bytes_ = sum(bytes_of(x.numel()) if x.is_floating_point() else x.nbytes for x in touched)
        equation = Equation(result=term.result, text=term.text, shape=list(value.shape), flops=term.flops, bytes=bytes_)
        if truth is None:
            return equation
        if value.shape != truth.shape:
            return equation.model_copy(update={"agrees": False, "difference": float("inf")})
        difference, largest = _largest_difference(value, truth), _largest([truth])
        agrees = difference <= ROUNDING * max(largest, scale)
        return equation.model_copy(update={"difference": difference, "largest": largest, "agrees": bool(agrees)})


def _largest_difference(value: Tensor, truth: Tensor) -> float:
    """Of numbers at the same place; infinite ones, as masks have them, may be the same."""
    return float((value - truth).masked_fill(value == truth, 0.0).abs().max()) if value.numel() else 0.0


def _largest(tensors: list[Tensor]) -> float:
    """The largest magnitude; infinite numbers, as masks have them, don't count, but NaN does."""
    found = [x.detach().abs().masked_fill(x.detach().isinf(), 0.0).max() for x in tensors if x.numel()]
    return float(torch.stack(found).max()) if found else 0.0


def _occurrence(leaves: list[Tensor], value: Tensor | None) -> int:
    return next(place for place, leaf in enumerate(leaves) if leaf is value)


def _matrix(name: str, value: Tensor, one: TorchCall, leaves: list[Tensor]) -> MatrixRecord:
    found = [place for place, leaf in enumerate(leaves) if leaf is value]
    return MatrixRecord(name=name, shape=list(value.shape), parameter=one.parameters[found[0]] if found else "")
