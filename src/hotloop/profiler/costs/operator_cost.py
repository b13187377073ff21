"""The cost of an operator, from its name and the shapes of its inputs."""

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
    """Returns the FLOPs and bytes of one call of an operator, forward or backward; None if they are unknown.

    Operators call other operators: `aten::conv2d` only calls `aten::convolution`, which has a formula. Of nested calls,
    count the outermost known call and none inside it.

    Args:
        name: torch's name, such as `aten::addmm`.
        shapes: shapes of the inputs by position, as `torch.profiler` records them with `record_shapes`: `[]` if the
            input isn't a tensor, a list of shapes for a list of tensors.
        dtypes: dtypes of the same inputs, such as `float32`, `torch.float32` or the profiler's C++ names. The profiler
            records `TensorList` for a list of tensors, and the bytes are then unknown; the tensors' dtype may replace
            it.
        arguments: values of the inputs that aren't tensors, None elsewhere (the profiler's `concrete_inputs`).
    """
    formula = FORMULAS.get(name.removeprefix("aten::"))
    if formula is None:
        return None
    try:
        flops, bytes_ = formula(OpCall(shapes, dtypes, arguments))
    except (UncountableCall, ValueError, IndexError, TypeError):
        return None  # the shapes don't match the formula, as with symbolic sizes of torch's compiler
    return OpCost(float(flops), None if math.isnan(bytes_) else float(bytes_))
