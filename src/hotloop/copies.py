"""Copies of models that share nothing with them."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer
from torch.utils._pytree import tree_leaves

from hotloop.errors import TaskError, blame, out_of_memory


class NotCopiedError(TaskError):
    """A model that can't be copied."""


def copied(model: nn.Module) -> nn.Module:
    """A deep copy, also of modules with what `copy.deepcopy` can't copy: uninitialised buffers, and attributes that were
    computed from parameters, as the `weight` of `torch.nn.utils.weight_norm` and of pruned layers, which each forward
    computes anew.

    Raises:
        NotCopiedError: an object in it can't be copied.
    """
    known: dict[int, Any] = {
        id(value): UninitializedBuffer(dtype=value.dtype)  # type: ignore[call-arg]
        for value in model.buffers()
        if isinstance(value, UninitializedBuffer)
    }
    attributes = [value for module in model.modules() for value in tree_leaves(vars(module))]
    computed = [value for value in attributes if isinstance(value, Tensor) and not value.is_leaf]
    known |= {id(value): value.detach().clone() for value in computed}
    try:
        return copy.deepcopy(model, known)
    except Exception as error:
        if out_of_memory(error):
            raise
        raise NotCopiedError(
            f"the model can't be copied: {blame(error)}",
            expected="modules that copy.deepcopy takes",
            fix="build it in a function, and keep out of its attributes what can't be copied",
        ) from error
