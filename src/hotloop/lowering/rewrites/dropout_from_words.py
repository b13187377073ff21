"""Random zeros and ones, such as a mask of dropout, out of the bytes of random words in place of number by number.

torch's generator draws them on one thread and asks a double for each. A word of 64 bits takes it hardly longer than that, and
holds eight bytes, each a random number of its own: a one is where that lies below a limit. A share of ones that isn't a whole
number of 256ths takes 32 bits of a word for each, and is right to 2**-33.

So they are other numbers than the eager step's, from the same seed. Whoever has to draw the same does it under `WordDrawMode`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

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
"""Fewer numbers are drawn before a call more could win anything."""

_LOWEST, _HIGHEST = -(2**63), 2**63 - 1


def draw_by_words(graph: GraphModule) -> int:
    """Wherever zeros and ones are drawn with one chance for all of them, and they aren't few; returns how often."""
    found = 0
    for node in find_calls(graph, aten.bernoulli_.float):
        share = share_of_ones(node.target, (fake_value(operand_at(node)), *node.args[1:]), node.kwargs)
        if share is not None:
            replace_node(graph, node, insert_operations(graph, node, partial(draw_into, share=share), operand_at(node)))
            found += 1
    return found


def share_of_ones(function: Any, args: Any, kwargs: Any) -> float | None:
    """The share of ones that an operation draws into its first operand; None where that isn't drawn by words."""
    if function is not aten.bernoulli_.float or kwargs.get("generator") is not None:
        return None
    share = args[1] if len(args) > 1 else 0.5
    if (
        not at_least(MIN_NUMBERS, args[0].numel())
        or args[0].device.type != "cpu"
        or not (isinstance(share, float) and 0 < share < 1)
    ):
        return None
    dtype, limit = word_limit(share)
    return share if abs(limit) < 2 ** (8 * dtype.itemsize - 1) else None  # it is as good as 0 or 1


def word_limit(share: float) -> tuple[torch.dtype, int]:
    """Which numbers words are cut into, and below which of them so large a share lies; they are signed."""
    dtype = torch.int8 if (share * 2**8).is_integer() else torch.int32
    bits = 8 * dtype.itemsize
    return dtype, round(share * 2**bits) - 2 ** (bits - 1)


def draw_into(value: Tensor, share: float) -> Tensor:
    """Fills it with zeros and so large a share of ones, in the order of its memory, as torch draws."""
    (dtype, limit), count = word_limit(share), value.numel()
    words = torch.randint(_LOWEST, _HIGHEST, (-(-count * dtype.itemsize // 8),), dtype=torch.int64)
    lying = value.permute(memory_order(value))
    lying.copy_((words.view(dtype)[:count] < limit).view(lying.shape))
    return value


class WordDrawMode(TorchDispatchMode):
    """Draws by words, operation by operation, what a rewritten step does."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        share = share_of_ones(function, args, kwargs or {})
        return function(*args, **(kwargs or {})) if share is None else draw_into(args[0], share)
