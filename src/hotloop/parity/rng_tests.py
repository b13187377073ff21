"""Tests of a plan's own random numbers against the baseline's and against each other.

`shared_rng.py` serves the comparison of results from equal random numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hotloop.core.state import Position, State
from hotloop.core.torch_private import ReadOnlyDispatchMode
from hotloop.data.batch_tree import copy_tree
from hotloop.distributed.wrappers.global_batch_rng import RandomOp
from hotloop.lowering.program import Program
from hotloop.parity.comparison import StepErrors
from hotloop.parity.references import run_within
from hotloop.parity.shared_rng import WordDraws

TESTED_STEPS = 16
_MAX_VALUES = 4096
"""Numbers of one draw that are tested."""

_MIN_VALUES = 30
"""Least numbers for a test of independence."""

_MIN_P = 1e-7
"""p-value below which two draws have different distributions or depend on each other."""


class StepDrawRecorder(ReadOnlyDispatchMode):
    """Records a step's draws in order.

    Attributes:
        drawn: name of the operator and its first numbers, float64 of shape (up to `_MAX_VALUES`,).
    """

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[str, Tensor]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawing = RandomOp.of(function, args, kwargs or {})
        result = function(*args, **(kwargs or {}))
        if drawing is not None:
            value = result[1] if isinstance(result, tuple) else result
            self.drawn.append((drawing.name, value.detach().flatten()[:_MAX_VALUES].double().cpu().clone()))
        return result


@dataclass
class OwnDraws:
    """Draws of one Program over several steps.

    Attributes:
        values: by (place of the draw in the model, piece of the batch), by step.
        names: of the operators of a step, or of each of its pieces.
        irregular: whether draws are missing or in another order, so that nothing can be tested.
    """

    most_pieces: int = 1
    values: dict[tuple[int, int], dict[int, Tensor]] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    irregular: bool = False

    def note(self, step: int, drawn: Sequence[tuple[str, Tensor]], names: tuple[str, ...]) -> None:
        """Records a step's draws, if these are the operators `names` once for each piece."""
        self.names = names
        pieces = len(drawn) // max(1, len(names))
        if not drawn or pieces > self.most_pieces or [name for name, _ in drawn] != list(names) * pieces:
            self.irregular = True
            return
        for number, (_, value) in enumerate(drawn):
            piece, place = divmod(number, len(names))
            self.values.setdefault((place, piece), {})[step] = value

    def fault(self, baseline: OwnDraws) -> str | None:
        """Returns the first draw with another distribution, or a dependence that the baseline's draws lack."""
        for (place, piece), steps in sorted(self.values.items()):
            name = f"draw {place + 1}" + (f" of piece {piece + 1}" if self.most_pieces > 1 else "")
            name = f"{name} ({self.names[place]})"
            plain = baseline.values[place, 0]
            if _same_distribution_p(steps, plain) < _MIN_P:
                return f"{name} has another rate or scale than the baseline's"
            if _between_steps_p(steps) < _MIN_P <= _between_steps_p(plain):
                return f"{name} depends on that of the step before"
            if piece and _joint_p(self.values[place, 0], steps) < _MIN_P:
                return f"{name} depends on that of the first piece"
            for other in {0, place - 1} if place else ():
                before = baseline.values[other, 0]
                if _joint_p(self.values[other, piece], steps) < _MIN_P <= _joint_p(before, plain):
                    return f"{name} depends on draw {other + 1}"
        return None


def has_own_draws(program: Program) -> bool:
    """Checks whether a Program draws otherwise than by single operations for a whole batch."""
    plan = program.parts.plan
    return plan.accumulation > 1 or plan.compile != "none" or plan.graphs != "none"


def check_own_draws(start: State, plain: Program, tested: Sequence[tuple[Program, StepErrors]]) -> None:
    """Runs steps and records whether the candidates' own draws were tested, and their faults."""
    tested = [(program, record) for program, record in tested if record.is_able and has_own_draws(program)]
    if not tested:
        return
    start = _state_at_epoch_start(start)
    for program in (plain, *(program for program, _ in tested)):
        program.restore(start)
    baseline, own = OwnDraws(), [OwnDraws(program.parts.plan.accumulation) for program, _ in tested]
    for step, batch in enumerate(_tested_batches(plain)):
        drawn = _draws_of_step(plain, batch)
        names = tuple(name for name, _ in drawn)
        if not drawn or (step and names != baseline.names):
            return
        baseline.note(step, drawn, names)
        for (program, _), draws in zip(tested, own, strict=True):
            if not draws.irregular:
                draws.note(step, _draws_of_step(program, batch), names)
    for (_, record), draws in zip(tested, own, strict=True):
        record.has_tested_draws = not draws.irregular
        record.draws = None if draws.irregular else draws.fault(baseline)


def check_word_draws(start: State, plain: Program, records: Sequence[StepErrors]) -> None:
    """Tests plans that draw by words on the eager step, which draws the same numbers: compiled masks aren't visible."""
    drawn = _draws_of_steps(start, plain)
    with WordDraws().follow([plain]):
        by_words = _draws_of_steps(start, plain)
    baseline, own = OwnDraws(), OwnDraws()
    names = tuple(name for name, _ in drawn[0])
    for step, (one, other) in enumerate(zip(drawn, by_words, strict=True)):
        baseline.note(step, one, names)
        own.note(step, other, names)
    if baseline.irregular or own.irregular:
        return
    for record in records:
        record.has_tested_draws, record.draws = True, own.fault(baseline)


def _draws_of_steps(start: State, program: Program) -> list[list[tuple[str, Tensor]]]:
    program.restore(_state_at_epoch_start(start))
    return [_draws_of_step(program, batch) for batch in _tested_batches(program)]


def _state_at_epoch_start(start: State) -> State:
    return replace(start, position=Position(start.position.step, start.position.epoch, 0), sums={})


def _tested_batches(program: Program) -> Iterator[Any]:
    """Yields the next batches, up to `TESTED_STEPS`; fewer where training or schedule ends before."""
    left, task = program.steps_left(), program.parts.task
    epochs = range(program.position.epoch, max(program.position.epoch + 1, task.epochs))
    batches = (batch for epoch in epochs for batch, _ in program.feed.epoch(epoch))
    return itertools.islice(batches, TESTED_STEPS if left is None else min(TESTED_STEPS, left))


def _draws_of_step(program: Program, batch: Any) -> list[tuple[str, Tensor]]:
    recorder = StepDrawRecorder()
    try:
        # The recorder is the innermost context: other contexts around a step replace draws.
        with program.checks.pause(), run_within([program], lambda: recorder):
            program.step(copy_tree(batch))
    except Exception:  # the step itself ran before without error
        return []
    return recorder.drawn


def _same_distribution_p(some: dict[int, Tensor], others: dict[int, Tensor]) -> float:
    """Returns the p-value of equal distributions (Kolmogorov-Smirnov)."""
    from scipy import stats  # the import takes 0.5 s and 50 MB

    one, other = (torch.cat([sample[step] for step in sorted(sample)]).numpy() for sample in (some, others))
    return float(stats.ks_2samp(one, other, method="asymp").pvalue)


def _joint_p(some: dict[int, Tensor], others: dict[int, Tensor]) -> float:
    both = sorted(some.keys() & others.keys())
    return _independence_p([some[at] for at in both], [others[at] for at in both])


def _between_steps_p(steps: dict[int, Tensor]) -> float:
    values = [steps[step] for step in sorted(steps)]
    return _independence_p(values[:-1], values[1:])


def _independence_p(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Returns the p-value of independence; 1 where there are too few values.

    Fisher's exact test for numbers of two values, else the correlation of ranks.
    """
    from scipy import stats

    pairs = [(a[: len(b)], b[: len(a)]) for a, b in zip(some, others, strict=False)]
    if not pairs:
        return 1.0
    x, y = map(torch.cat, zip(*pairs, strict=True))
    if len(x) < _MIN_VALUES or x.min() == x.max() or y.min() == y.max():
        return 1.0
    if len(x.unique()) == len(y.unique()) == 2:
        high = x == x.max(), y == y.max()
        table = [[int((a & b).sum()) for b in (high[1], ~high[1])] for a in (high[0], ~high[0])]
        return float(stats.fisher_exact(table).pvalue)
    return float(stats.spearmanr(x.numpy(), y.numpy()).pvalue)
