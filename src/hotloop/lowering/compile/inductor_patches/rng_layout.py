"""Keeps the eager layout of tensors in whose shape random numbers are drawn: kernels draw in the order of memory.

Inductor lays out the result of a convolution otherwise, so `randn_like` of it has its numbers in other places (torch 2.13).
Upstream: pytorch/pytorch#177652. Test without the patch:
`test_noise_on_what_convolutions_give_is_that_of_the_eager_step[False]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload

from hotloop.core.patches import patch_attribute

_RNG_NAMES = (
    "rand_like",
    "randn_like",
    "randint_like",
    "bernoulli",
    "normal",
    "poisson",
    "binomial",
    "_standard_gamma",
)
_RNG_OPS = {getattr(torch.ops.aten, name) for name in _RNG_NAMES}


@contextmanager
def keep_rng_layout() -> Iterator[None]:
    from torch._inductor import graph

    with patch_attribute(graph, "maybe_layout_constraints", _with_rng_constraints):
        yield


def _with_rng_constraints(original: Callable[..., Any]) -> Callable[..., Any]:
    from torch._inductor.lowering import constrain_to_fx_strides

    def constraint(operation: Any) -> Any:
        is_random = isinstance(operation, OpOverload) and operation.overloadpacket in _RNG_OPS
        return constrain_to_fx_strides if is_random else original(operation)

    return constraint
