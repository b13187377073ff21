"""Detection of a loss that is a mean over no element, such as when all targets of a batch are ignored."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hotloop.core.random.rng import preserve_generators
from hotloop.core.torch_private import TorchDispatchMode, tree_leaves
from hotloop.data.batch_tree import to_device
from hotloop.lowering.program import Program

EMPTY_MEAN_FIX = (
    "make the loss 0 in such a batch, as by (losses * mask).sum() / mask.sum().clamp(min=1), and give the Task a"
    " weight(batch) that counts its targets"
)
_CROSS_ENTROPIES = ("nll_loss_forward", "nll_loss2d_forward")


def find_empty_mean(program: Program, batch: Any) -> str:
    """Returns the operation in a batch's loss that is a mean over no element; empty if there is none or the loss fails."""
    watch = _DivisionRecorder()
    try:
        with preserve_generators(*program.devices), torch.no_grad(), watch:
            program.parts.task.compute(program.model, to_device(batch, program.device))
    except Exception:
        pass  # the step itself ran before; this pass only searches for a mean over nothing
    return watch.found


class _DivisionRecorder(TorchDispatchMode):
    """Records the last operation that divides by a count of 0."""

    found = ""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        value = result[0] if isinstance(result, tuple | list) and result else result
        if isinstance(value, Tensor) and not value.ndim and value.is_floating_point() and math.isnan(float(value)):
            self.found = self._description(name, args, result) or self.found
        return result

    def _description(self, name: str, args: Any, result: Any) -> str:
        if name in _CROSS_ENTROPIES:
            return "a cross entropy of which all targets are ignored" * (not float(result[1]))
        if name == "div":
            return "a division by a sum that is 0, as of a mask that leaves out all" * (not float(args[1]))
        inputs = [value for value in tree_leaves(args) if isinstance(value, Tensor)]
        return "a mean over no element" * any(value.ndim and not value.numel() for value in inputs)
