"""Tensors that the loop puts together by a copy of all that they hold, such as a buffer that grows at each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hotloop.diagnosing.step import ASIDE, COUNTS, Step, grouped
from hotloop.profiles import OperatorTime, Remedy

_JOINING = ("aten::cat", "aten::stack", "aten::hstack", "aten::vstack", "aten::concat", "aten::concatenate")

_MAINLY = 0.5
"""Part of a line's operators that must put tensors together, for the line being about that."""


def joined(step: Step) -> Iterator[Remedy]:
    """Lines beside the training that first of all put tensors together."""
    ones = step.operators(lambda one: one.phase in ASIDE and bool(one.where) and one.used is not True)
    for where, there in grouped(ones, lambda one: one.where).items():
        joining = [one for one in there if one.name in _JOINING or one.outer in _JOINING]
        spent = sum(map(step.cost, joining))
        if not joining or spent < _MAINLY * sum(map(step.cost, there)):
            continue
        spent = max(spent, step.aside.get(where, 0.0))
        if step.share(spent) < COUNTS:
            continue
        grows = _grows(joining)
        yield Remedy(
            cause="a buffer that grows at each step is copied as a whole (torch.cat, torch.stack)"
            if grows
            else "tensors are put together in the loop, by a copy of all that they hold (torch.cat, torch.stack)",
            where=where,
            remedy="a tensor of its final size, made before the loop, into which each step writes its part in place: "
            "buffer[n : n + len(new)] = new; of one that drops the oldest, a position that begins anew at its end"
            if grows
            else "what grows or slides: a tensor made before the loop, into which each step writes its part in place; what "
            "doesn't change: once, before the loop",
            gain=step.share(spent),
            evidence=f"{sum(one.calls for one in joining):.0f} operations take {spent:.2f} ms of each step of {step.ms:.2f} ms",
        )


def _grows(ones: Sequence[OperatorTime]) -> bool:
    """Whether the same call was given other shapes in one step than in another."""
    return any(
        len({tuple(one.shapes) for one in same}) > 1 and all(one.calls < 1 for one in same)
        for same in grouped(ones, lambda one: (one.name, one.outer)).values()
    )
