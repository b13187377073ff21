"""Whether a captured step, or one operation, draws random numbers."""

from __future__ import annotations

from types import BuiltinFunctionType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule


def draws(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws: attention does only where it has dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(function, "tags", ()):
        return False
    schema = function._schema.arguments
    given = {one.name: one.default_value for one in schema} | dict(
        zip((one.name for one in schema), args, strict=False)
    )
    return bool((given | kwargs).get("dropout_p", True))


def draws_nothing(graph: GraphModule) -> bool:
    """Whether a captured graph surely draws nothing: it is made of operations of torch's own that don't."""
    return all(_draws_nothing(node.target) for node in graph.graph.nodes if node.op.startswith("call_"))


def _draws_nothing(target: Any) -> bool:
    if isinstance(target, OpOverload):
        return target.namespace in _TORCHS_OWN and torch.Tag.nondeterministic_seeded not in target.tags
    return isinstance(target, BuiltinFunctionType) or target in (torch.sym_float, torch.sym_sqrt)


_TORCHS_OWN = ("aten", "prims", "mkldnn")
