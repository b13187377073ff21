"""Draws random zeros and ones, such as a dropout mask, from the bytes of random words instead of number by number.

torch's generator draws them on one thread from a double each. A word of 64 bits takes hardly longer, and has eight
bytes, each a random number: a one if it is below a limit. A share of ones that isn't a multiple of 1/256 takes 32 bits
for each number, and is exact to 2**-33. The numbers differ from the eager step's for the same seed; `WordDrawMode`
draws equal ones.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from hotloop.core.torch_private import TorchDispatchMode
from hotloop.distributed.wrappers.global_batch_rng import memory_order
from hotloop.lowering.rewrites.fx_nodes import (
    at_least,
    aten,
    fake_value,
    find_calls,
    insert_operations,
    operand_at,
    replace_node,
)

MIN_NUMBERS = 512
"""A draw of fewer numbers is faster than the additional call."""

_LOWEST, _HIGHEST = -(2**63), 2**63 - 1


def draw_by_words(graph: GraphModule) -> int:
    """Rewrites draws of many zeros and ones with one probability; returns how often."""
    count = 0
    for node in find_calls(graph, aten.bernoulli_.float):
        share = share_of_ones(node.target, (fake_value(operand_at(node)), *node.args[1:]), node.kwargs)
        if share is not None:
            replace_node(graph, node, insert_operations(graph, node, partial(draw_into, share=share), operand_at(node)))
            count += 1
    return count


def share_of_ones(function: Any, args: Any, kwargs: Any) -> float | None:
    """Returns the share of ones that an operation draws into its first operand; None if it isn't drawn by words."""
    if function is not aten.bernoulli_.float or kwargs.get("generator") is not None:
        return None
    share = args[1] if len(args) > 1 else 0.5
    is_fitting = at_least(MIN_NUMBERS, args[0].numel()) and args[0].device.type == "cpu"
    if not is_fitting or not isinstance(share, float) or not 0 < share < 1:
        return None
    dtype, limit = word_limit(share)
    return share if abs(limit) < 2 ** (8 * dtype.itemsize - 1) else None  # rounded to a share of 0 or 1


def word_limit(share: float) -> tuple[torch.dtype, int]:
    """Returns the signed dtype into which words are split, and the limit below which the share of its numbers lies."""
    dtype = torch.int8 if (share * 2**8).is_integer() else torch.int32
    bits = 8 * dtype.itemsize
    return dtype, round(share * 2**bits) - 2 ** (bits - 1)


def draw_into(value: Tensor, share: float) -> Tensor:
    """Fills `value` with zeros and a share of ones in the order of its memory, as torch draws."""
    (dtype, limit), count = word_limit(share), value.numel()
    words = torch.randint(_LOWEST, _HIGHEST, (-(-count * dtype.itemsize // 8),), dtype=torch.int64)
    ordered = value.permute(memory_order(value))
    ordered.copy_((words.view(dtype)[:count] < limit).view(ordered.shape))
    return value


class WordDrawMode(TorchDispatchMode):
    """Makes eager operations draw the same numbers as a rewritten step."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        share = share_of_ones(function, args, kwargs or {})
        return function(*args, **(kwargs or {})) if share is None else draw_into(args[0], share)
