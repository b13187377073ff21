"""What an operator costs, from its name and the shapes of its inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from hotloop.profiler.costs import data_movement_cost, elementwise_cost, matmul_cost, reduction_cost
from hotloop.profiler.costs.op_cost import OpCall, OpCost, UncountableCall

FORMULAS = MappingProxyType(
    {**elementwise_cost.FORMULAS, **data_movement_cost.FORMULAS, **reduction_cost.FORMULAS, **matmul_cost.FORMULAS}
)


def count_operator(
    name: str, shapes: Sequence[Any], dtypes: Sequence[str] = (), arguments: Sequence[Any] = ()
) -> OpCost | None:
    """FLOPs and bytes of one call of an operator, forward or backward; None where they aren't known.

    Operators call others: `aten::conv2d` does nothing itself but to call `aten::convolution`, which is known and calls
    what the device has. So of calls within each other, count the outermost that is known, and none inside it.

    Args:
        name: as torch calls it, such as `aten::addmm`.
        shapes: of the inputs by position, `[]` for what is no tensor, a list of shapes for a list of tensors: as
            `torch.profiler` gives them with `record_shapes`.
        dtypes: of the same inputs, as `float32`, `torch.float32` or in the words of C++ that the profiler uses. For a
            list of tensors the profiler says `TensorList` alone; in its place may stand the tensors' own dtype, without
            which the bytes aren't known.
        arguments: values of the inputs that are no tensors, None elsewhere (the profiler's `concrete_inputs`).
    """
    formula = FORMULAS.get(name.removeprefix("aten::"))
    if formula is None:
        return None
    try:
        flops, bytes_ = formula(OpCall(shapes, dtypes, arguments))
    except UncountableCall:
        return None
    except (ValueError, IndexError, TypeError):
        return None  # shapes that don't fit: those that torch's compiler runs operators with may be symbols
    return OpCost(float(flops), None if math.isnan(bytes_) else float(bytes_))
