"""Proof of an optimizer exchange: one real update in place, by the exchange, and in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor

from hotloop.core.tensor_distance import difference_norm
from hotloop.data.batch_difference import raw_bytes
from hotloop.errors import describe_error
from hotloop.exchanges.part import CallComparison
from hotloop.margins import TYPICAL_LIMIT
from hotloop.scripts.child import raise_signal_error

Tensors = list[Tensor | None]
"""Parameters, gradients or one kind of state, in the same order."""

_COPIES = 6
"""Memory of a proof in multiples of the tensors: two fp32 copies, a float64 copy and temporary results."""

_SAMPLED_NUMBERS, _WHOLE_NUMBERS = 2**18, 2**12
"""Numbers of a large update that are compared, and size up to which a tensor is compared as a whole.

The updates compute each number alone, so every n-th number of each tensor shows an error of any part of the tensor.
"""


def compare_update(
    update: Callable[..., None],
    lists: Sequence[Tensors],
    settings: Mapping[str, Any],
    flags: Mapping[str, Any],
    exchanged: Callable[..., None] | None = None,
) -> CallComparison:
    """Runs an update on the script's own tensors, and the exchange on copies.

    The exchange is wrong if the error of a tensor against float64 exceeds `TYPICAL_LIMIT` times the noise floor. The
    floor is the largest of: the error of the script's own update, its error with inputs nudged by one rounding, and
    half a unit in the last place of the result. Of a large update a sample of the numbers is compared.

    Args:
        update: torch's functional form of the optimizer, such as `torch.optim.adam.adam`.
        lists: its tensor arguments; changed in place, as by `update(*lists, **settings)`.
        settings: its other arguments.
        flags: changes of the settings that make the exchange.
        exchanged: the function of the exchange; None for `update`.
    """
    try:
        size = sum(value.nbytes for tensors in lists for value in tensors if value is not None)
        if size * _COPIES > psutil.virtual_memory().available:
            raise MemoryError("its proof needs more memory than is free")
        own, sample = _copies(lists, Tensor.clone), _sampler(lists)
        nudged, wide = (
            _copies(lists, lambda value: _nudge(sample(value))),
            _copies(lists, lambda value: _widen(sample(value))),
        )
    except Exception as error:
        raise_signal_error(error)
        update(*lists, **settings)
        return CallComparison(False, 0, f"it can't be proven: {error}")
    update(*lists, **settings)
    try:
        (exchanged or update)(*own, **{**settings, **flags})
        if _are_bitwise_equal(lists, own):
            return CallComparison(True, _numbers(lists))
        return _judge(update, settings, _copies(lists, sample), _copies(own, sample), nudged, wide)
    except Exception as error:
        raise_signal_error(error)
        return CallComparison(False, 0, f"it raised {describe_error(error)}")


def _judge(
    update: Callable[..., None], settings: Mapping[str, Any], lists: Sequence[Tensors], *copies: list[Tensors]
) -> CallComparison:
    """Compares the script's update with the exchange's; the last two copies are still before the update."""
    own, nudged, wide = copies
    plain = {**settings, **{name: False for name in ("foreach", "fused") if name in settings}}
    update(*nudged, **plain)
    update(*wide, **plain)
    if not all(bool(value.isfinite().all()) for tensors in wide for value in tensors if value is not None):
        return CallComparison(False, 0)
    rows = _rows(lists, own, nudged, wide)
    ratio = max((error_ratio((value, near), exchanged, true) for value, exchanged, near, true in rows), default=0.0)
    wrong = "" if ratio <= TYPICAL_LIMIT else f"its error is {ratio:.3g} times the noise floor of the script's update"
    return CallComparison(False, _numbers(lists), wrong)


def _copies(lists: Sequence[Tensors], copy: Callable[[Tensor], Tensor]) -> list[Tensors]:
    return [[None if value is None else copy(value.detach()) for value in tensors] for tensors in lists]


def _sampler(lists: Sequence[Tensors]) -> Callable[[Tensor], Tensor]:
    """Returns a function that takes every n-th number of a large tensor, in the order of indices."""
    stride = max(1, _numbers(lists) // _SAMPLED_NUMBERS)

    def sample(value: Tensor) -> Tensor:
        return value if stride == 1 or value.numel() <= _WHOLE_NUMBERS else value.reshape(-1)[::stride]

    return sample


def _nudge(value: Tensor) -> Tensor:
    """Returns a copy whose numbers are alternately one rounding larger and smaller; counts stay the same."""
    copy = value.clone()
    if copy.ndim:
        signs = torch.ones(copy.numel(), dtype=copy.dtype)
        signs[1::2] = -1
        copy.mul_(1 + torch.finfo(copy.dtype).eps * signs.view(copy.shape))
    return copy


def _widen(value: Tensor) -> Tensor:
    return value.to(torch.float64, copy=True)


def _numbers(lists: Sequence[Tensors]) -> int:
    return sum(value.numel() for value in lists[0] if value is not None)


def _rows(*variants: Sequence[Tensors]) -> Iterator[tuple[Tensor, ...]]:
    """Yields the tensors of one place in all variants; a tensor that a variant lacks is an error of infinity."""
    for columns in zip(*variants, strict=True):
        for row in zip(*columns, strict=True):
            if any(value is not None for value in row):
                yield tuple(torch.tensor(torch.inf) if value is None else value.detach() for value in row)


def error_ratio(own: Sequence[Tensor], exchanged: Tensor, true: Tensor) -> float:
    """Returns an exchange's error against float64 in multiples of the noise floor.

    The floor is the largest error of the script's own forms, and at least half a unit in the last place of the result.
    """
    if any(value.shape != true.shape for value in (*own, exchanged)) or not bool(exchanged.isfinite().all()):
        return torch.inf
    if not true.is_floating_point():
        return 0.0 if torch.equal(own[0], exchanged) else torch.inf
    unit = torch.finfo(own[0].dtype).eps / 2
    floor = max(*(difference_norm(value, true) for value in own), unit * float(true.norm()))
    error = difference_norm(exchanged, true)
    return error / floor if floor else (torch.inf if error else 0.0)


def _are_bitwise_equal(some: Sequence[Tensors], others: Sequence[Tensors]) -> bool:
    pairs = ((a, b) for one, other in zip(some, others, strict=True) for a, b in zip(one, other, strict=True))
    return all(
        a is b is None
        if a is None or b is None
        else a.shape == b.shape and a.dtype == b.dtype and raw_bytes(a.detach()).equal(raw_bytes(b.detach()))
        for a, b in pairs
    )
