"""Deep copies of models."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer
from torch.utils._pytree import tree_leaves

from hotloop.errors import TaskError, describe_error, is_out_of_memory


class NotCopiedError(TaskError):
    """A model can't be copied."""


def copy_model(model: nn.Module) -> nn.Module:
    """Returns a deep copy of a model.

    Unlike `copy.deepcopy`, the function also copies uninitialised buffers, and attributes that each forward computes
    from parameters, such as the `weight` of `torch.nn.utils.weight_norm` and of pruned layers.

    Raises:
        NotCopiedError: the model has an object that can't be copied.
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
        if is_out_of_memory(error):
            raise
        raise NotCopiedError(
            f"the model can't be copied: {describe_error(error)}",
            expected="modules that copy.deepcopy takes",
            fix="build it in a function, and store nothing in its attributes that can't be copied",
        ) from error
