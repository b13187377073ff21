"""Functions that only move elements: views, selections, embeddings, concatenation, padding; and dropout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hotloop.core.torch_private import tree_flatten, tree_unflatten
from hotloop.explainer.layers.equation import (
    EquationTerm,
    Formula,
    FunctionCall,
    LayerEquations,
    NotCovered,
    one_operand,
    ones_like,
)


def move_elements(call: FunctionCall) -> LayerEquations:
    """Finds where a function moves each element by running it on the elements' indices."""
    if call.name == "pad" and call.get(3, "value"):
        raise NotCovered("it pads with another number than zero")
    leaves, form = tree_flatten((call.arguments, call.options))
    floating = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    names = ["X"] if len(floating) == 1 else [f"X{number}" for number in range(1, len(floating) + 1)]
    operands = {name: leaves[place] for name, place in zip(names, floating, strict=True)}
    starts, total = [], 1  # index 0 is for elements from no operand, such as padding
    for place, x in zip(floating, operands.values(), strict=True):
        starts.append(total)
        leaves[place] = torch.arange(total, total + x.numel(), dtype=torch.float64, device=x.device).reshape(x.shape)
        total += x.numel()
    memory = {leaves[place].untyped_storage().data_ptr() for place in floating}
    arguments, options = tree_unflatten(leaves, form)
    out = call.function(*arguments, **options)
    found = list(out) if isinstance(out, tuple | list) else [out]
    seen = MovedElements(operands, starts, [one.long() for one in found], call.gradients, total)
    return seen.worked(call, copied=not all(one.untyped_storage().data_ptr() in memory for one in found))


@dataclass(frozen=True)
class MovedElements:
    """The origin of each element of the outputs.

    Attributes:
        starts: index of the first element of each operand.
        places: for each output, the indices of its elements.
        gradients: gradients of the outputs.
        total: one more than the last index.
    """

    operands: dict[str, Tensor]
    starts: list[int]
    places: list[Tensor]
    gradients: list[Tensor]
    total: int

    def gradient(self, start: int, x: Tensor) -> Tensor:
        into = x.new_zeros(self.total)
        for where, dz in zip(self.places, self.gradients, strict=True):
            into.index_add_(0, where.flatten(), dz.flatten())
        return into[start : start + x.numel()].reshape(x.shape)

    def forward(self) -> Tensor:
        first = next(iter(self.operands.values()))
        return torch.cat([first.new_zeros(1), *(x.flatten() for x in self.operands.values())])[self.places[0]]

    def worked(self, call: FunctionCall, *, copied: bool) -> LayerEquations:
        """The backward costs nothing if no element is copied and each appears once."""
        all_places = torch.cat([where.flatten() for where in self.places])
        once = len(all_places) == self.total - 1 == len(all_places.unique())
        in_order = once and bool((all_places.diff() == 1).all())
        twice = not once and len(all_places.unique()) < len(all_places)
        text = f"the numbers of {', '.join(self.operands)}" + (" in another shape" if in_order else ", moved")
        back = (
            "dZ in the shape of {}"
            if in_order
            else "dZ, put back where {} held it" + ", summed where taken twice" * twice
        )
        written = call.outputs if copied else []
        reads = list(self.gradients) if copied or not once else []
        backward = [
            EquationTerm(f"d{name}", back.format(name), partial(self.gradient, start, x), 0, reads)
            for (name, x), start in zip(self.operands.items(), self.starts, strict=True)
        ]
        return LayerEquations(self.operands, [EquationTerm("Z", text, self.forward, 0, written)], backward)


def cast_dtype(call: FunctionCall) -> LayerEquations:
    """The same elements, rounded to another dtype."""
    x, dz = call.tensor(0, "input"), call.dz
    notes = ["rounding to the dtype is left out"]
    return one_operand(x, ("X in another dtype", lambda: x, 0), ("dZ", lambda: dz, 0), [dz], notes)


def embedding(call: FunctionCall) -> LayerEquations:
    """Z = rows of W: the product of one-hot rows with W, without making them."""
    from_functional = not call.tensor(0, "input").is_floating_point()
    w, indices = (call.arguments[1], call.arguments[0]) if from_functional else call.arguments[:2]
    padding = call.get(2, "padding_idx", -1)
    if call.get(3, "scale_grad_by_freq", False):
        raise NotCovered("its gradients are scaled by how often a row is used")
    dz = call.dz
    kept = indices.flatten() != (padding if padding is not None else -1)

    def gradient() -> Tensor:
        return torch.zeros_like(w).index_add_(0, indices.flatten()[kept], dz.reshape(-1, w.shape[1])[kept])

    notes = [] if padding in (None, -1) else [f"row {padding} is padding, and gets no gradient"]
    return LayerEquations(
        {"W": w},
        [EquationTerm("Z", "rows of W: one-hot rows of the indices times W", lambda: w[indices], 0, [indices, dz])],
        [
            EquationTerm(
                "dW", "rows of dZ, added to the rows of W that they came from", gradient, dz.numel(), [dz, indices]
            )
        ],
        notes,
    )


def dropout(call: FunctionCall) -> LayerEquations:
    """Z = X * M / (1 - p), M random zeros and ones: dX = dZ * M / (1 - p)."""
    x, p, training = (
        call.tensor(0, "input"),
        call.get(1, "p", 0.5),
        call.get(2, "train", call.options.get("training", True)),
    )
    dz = call.dz
    kept = _mask(call, x, p) if training and p else ones_like(x)
    scale = 1 / (1 - p) if training and p < 1 else 1.0
    text = f"* M / {1 - p:g}"
    notes = (
        [f"M keeps each number with a chance of {1 - p:g}; {kept.mean():.4g} of them were kept"]
        if training
        else ["evaluation: nothing is dropped"]
    )
    z = (f"X {text}", lambda: x * kept * scale, 2 * x.numel())
    return one_operand(x, z, (f"dZ {text}", lambda: dz * kept * scale, 2 * x.numel()), [dz, x], notes)


def _mask(call: FunctionCall, x: Tensor, p: float) -> Tensor:
    functions = {"dropout": torch.dropout, "feature_dropout": torch.feature_dropout}
    drawn = call.drawn(lambda: functions[call.name](ones_like(x), p, True))
    return (drawn != 0).to(x.dtype)


_MOVING_FUNCTIONS = (
    "view reshape flatten unflatten squeeze unsqueeze view_as reshape_as ravel contiguous clone broadcast_tensors transpose"
    " permute t T mT movedim swapaxes expand expand_as broadcast_to repeat tile flip roll getitem select narrow unbind split"
    " split_with_sizes chunk tensor_split cat concat stack index_select gather repeat_interleave unfold diagonal pad"
    " take_along_dim meshgrid im2col pixel_shuffle pixel_unshuffle channel_shuffle upsample_nearest1d upsample_nearest2d"
    " upsample_nearest3d tril triu"
)

CASTS = frozenset(["to", "float", "double", "half", "bfloat16", "type", "type_as"])
"""To another dtype; in float64 nothing happens."""

FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(_MOVING_FUNCTIONS.split(), move_elements),
    **dict.fromkeys(CASTS, cast_dtype),
    "embedding": embedding,
    "dropout": dropout,
    "feature_dropout": dropout,
}
