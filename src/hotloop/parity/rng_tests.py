"""A plan's random numbers by themselves: those that its own steps draw, beside the baseline's and each other.

Whether it computes the right thing with them is another question, see `shared_rng.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hotloop.core.dispatch_mode import ReadOnlyDispatchMode
from hotloop.core.state import Position, State
from hotloop.data.batch_tree import copy_tree
from hotloop.distributed.wrappers.global_batch_rng import RandomOp
from hotloop.lowering.program import Program
from hotloop.parity.evidence import StepErrors
from hotloop.parity.references import run_within
from hotloop.parity.shared_rng import WordDraws

TESTED_STEPS = 16
_MAX_VALUES = 4096
"""Numbers of one draw that are looked at."""

_MIN_VALUES = 30
"""Numbers of a kind without which nothing can be said of how they go together."""

_MIN_P = 1e-7
"""A probability by chance below which two draws are not alike, or not independent."""


class StepDrawRecorder(ReadOnlyDispatchMode):
    """Keeps what a step draws, in order.

    Attributes:
        drawn: names of operators, and their first numbers, flat.
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
    """What steps of one Program have drawn.

    Attributes:
        values: by the place of a draw in the model, and by the piece of a batch, step by step.
        names: of the operators of a step, or of each of its pieces.
        odd: whether not all draws were seen, or in no such order; then nothing can be said.
    """

    most_pieces: int = 1
    values: dict[tuple[int, int], dict[int, Tensor]] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    irregular: bool = False

    def note(self, step: int, drawn: Sequence[tuple[str, Tensor]], names: tuple[str, ...]) -> None:
        """Keeps a step's draws, where they are those of so many names once for each piece."""
        self.names = names
        pieces = len(drawn) // max(1, len(names))
        if not drawn or pieces > self.most_pieces or [name for name, _ in drawn] != list(names) * pieces:
            self.irregular = True
            return
        for number, (_, value) in enumerate(drawn):
            piece, place = divmod(number, len(names))
            self.values.setdefault((place, piece), {})[step] = value

    def fault(self, baseline: OwnDraws) -> str | None:
        """What is wrong with them: their rate and scale, or that they depend on each other where the baseline's don't."""
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
    """Whether it draws otherwise than operation by operation for a whole batch."""
    plan = program.parts.plan
    return plan.accumulation > 1 or plan.compile != "none" or plan.graphs != "none"


def check_own_draws(start: State, plain: Program, watched: Sequence[tuple[Program, StepErrors]]) -> None:
    """Runs steps from there on, and writes down in the accounts whether their own draws were seen, and what is wrong."""
    watched = [(program, account) for program, account in watched if account.is_able and has_own_draws(program)]
    if not watched:
        return
    start = _state_at_epoch_start(start)
    for program in (plain, *(program for program, _ in watched)):
        program.restore(start)
    baseline, own = OwnDraws(), [OwnDraws(program.parts.plan.accumulation) for program, _ in watched]
    for step, batch in enumerate(_tested_batches(plain)):
        drawn = _draws_of_step(plain, batch)
        names = tuple(name for name, _ in drawn)
        if not drawn or (step and names != baseline.names):
            return
        baseline.note(step, drawn, names)
        for (program, _), found in zip(watched, own, strict=True):
            if not found.irregular:
                found.note(step, _draws_of_step(program, batch), names)
    for (_, account), found in zip(watched, own, strict=True):
        account.draw_notes = not found.irregular
        account.draws = None if found.irregular else found.fault(baseline)


def check_word_draws(start: State, plain: Program, accounts: Sequence[StepErrors]) -> None:
    """The same for plans that draw by words, of which the eager step draws the same ones; compiled, masks can't be seen."""
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
    for account in accounts:
        account.draw_notes, account.draws = True, own.fault(baseline)


def _draws_of_steps(start: State, program: Program) -> list[list[tuple[str, Tensor]]]:
    """What each of some steps from there on draws."""
    program.restore(_state_at_epoch_start(start))
    return [_draws_of_step(program, batch) for batch in _tested_batches(program)]


def _state_at_epoch_start(start: State) -> State:
    """Of its epoch."""
    return replace(start, position=Position(start.position.step, start.position.epoch, 0), sums={})


def _tested_batches(program: Program) -> Iterator[Any]:
    """Those that come, as many as are looked at; fewer where training or its schedule is over before."""
    left, task = program.steps_left(), program.parts.task
    epochs = range(program.position.epoch, max(program.position.epoch + 1, task.epochs))
    batches = (batch for epoch in epochs for batch, _ in program.feed.epoch(epoch))
    return itertools.islice(batches, TESTED_STEPS if left is None else min(TESTED_STEPS, left))


def _draws_of_step(program: Program, batch: Any) -> list[tuple[str, Tensor]]:
    """What a step draws; nothing where it can't be watched."""
    recording = StepDrawRecorder()
    try:
        # The recording is the innermost context: other contexts around a step draw in their own way.
        with program.checks.pause(), run_within([program], lambda: recording):
            program.step(copy_tree(batch))
    except Exception:  # the same step ran without being watched
        return []
    return recording.drawn


def _same_distribution_p(some: dict[int, Tensor], others: dict[int, Tensor]) -> float:
    """That two samples of one distribution differ so much."""
    from scipy import stats  # takes half a second and 50 MB, which no training shall pay for

    one, other = (torch.cat([each[step] for step in sorted(each)]).numpy() for each in (some, others))
    return float(stats.ks_2samp(one, other, method="asymp").pvalue)


def _joint_p(some: dict[int, Tensor], others: dict[int, Tensor]) -> float:
    both = sorted(some.keys() & others.keys())
    return _independence_p([some[at] for at in both], [others[at] for at in both])


def _between_steps_p(steps: dict[int, Tensor]) -> float:
    values = [steps[step] for step in sorted(steps)]
    return _independence_p(values[:-1], values[1:])


def _independence_p(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """That they go together so well by chance; 1 where there is too little to say.

    Numbers of two values by Fisher's exact test, others by the correlation of their ranks.
    """
    from scipy import stats

    pairs = [(a[: len(b)], b[: len(a)]) for a, b in zip(some, others, strict=False)]
    if not pairs:
        return 1.0
    x, y = (torch.cat(each) for each in zip(*pairs, strict=True))
    if len(x) < _MIN_VALUES or x.min() == x.max() or y.min() == y.max():
        return 1.0
    if len(x.unique()) == len(y.unique()) == 2:
        high = x == x.max(), y == y.max()
        table = [[int((a & b).sum()) for b in (high[1], ~high[1])] for a in (high[0], ~high[0])]
        return float(stats.fisher_exact(table).pvalue)
    return float(stats.spearmanr(x.numpy(), y.numpy()).pvalue)
