"""Tensors that the loop concatenates by a full copy, such as a buffer that grows at each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hotloop.core.records.profile import COUNTS, OperatorTime, Remedy
from hotloop.profiler.detectors.step import ASIDE_PHASES, ProfiledStep, group_by

CONCATENATION = "tensors are concatenated in the loop, by a copy of all their numbers (torch.cat, torch.stack)"
"""The cause of a concatenation whose result has the same size at each step."""

_CONCATENATING = ("aten::cat", "aten::stack", "aten::hstack", "aten::vstack", "aten::concat", "aten::concatenate")

_MAIN_SHARE = 0.5  # share of the time of a line's operators from which concatenation is the line's main work


def concatenation_in_loop(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields a remedy for each line outside the training step that mainly concatenates tensors."""
    operators = step.operators(lambda one: one.phase in ASIDE_PHASES and bool(one.where) and one.used is not True)
    for where, same_line in group_by(operators, lambda one: one.where).items():
        joining = [one for one in same_line if one.name in _CONCATENATING or one.outer in _CONCATENATING]
        spent = sum(map(step.cost_ms, joining))
        if not joining or spent < _MAIN_SHARE * sum(map(step.cost_ms, same_line)):
            continue
        spent = max(spent, step.aside_ms.get(where, 0.0))
        if step.share(spent) < COUNTS:
            continue
        grows = _grows(joining)
        yield Remedy(
            cause="a buffer that grows at each step is copied as a whole (torch.cat, torch.stack)"
            if grows
            else CONCATENATION,
            where=where,
            remedy="a tensor of its final size, made before the loop, into which each step writes its part in place: "
            "buffer[n : n + len(new)] = new; for a buffer that drops its oldest part, a position that "
            "restarts at 0 after the end"
            if grows
            else "for a buffer that grows or slides: make a tensor before the loop, and write each step's part "
            "into it in place; for parts that don't change: concatenate them once, before the loop",
            gain=step.share(spent),
            evidence=f"{sum(one.calls for one in joining):.0f} operations take {spent:.2f} ms of each step of {step.ms:.2f} ms",
        )


def _grows(operators: Sequence[OperatorTime]) -> bool:
    """Whether the same call receives different shapes in different steps."""
    return any(
        len({tuple(one.shapes) for one in same}) > 1 and all(one.calls < 1 for one in same)
        for same in group_by(operators, lambda one: (one.name, one.outer)).values()
    )
