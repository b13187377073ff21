"""Trains the trials of a pack in lockstep, each by its own training loop in its own run folder."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from hotloop.errors import describe_error
from hotloop.hyperparameters.packs.pack_members import Trial
from hotloop.hyperparameters.packs.packed_step import Pack
from hotloop.hyperparameters.trial import error_line
from hotloop.training.cadence import SpanPacer
from hotloop.training.early_stopping import RunOutcome
from hotloop.training.loop import TrainingLoop
from hotloop.training.run import is_run
from hotloop.training.start import resume_run, start_run

T = TypeVar("T")


class PackError(Exception):
    """The packed step failed, so that the trials go on alone from their last checkpoints."""


def train_in_lockstep(pack: Pack, trials: Sequence[Trial]) -> None:
    """Trains all trials to their ends, and stores the outcome, the error or the reason to leave in each.

    The contexts of the runs are nested, so that locks, signal handlers and random generators end in order.
    """
    _open_next(pack, trials, 0)


def _open_next(pack: Pack, trials: Sequence[Trial], index: int) -> None:
    if index == len(trials):
        _train(pack, trials)
        return
    trial, opened = trials[index], False

    def drive(loop: TrainingLoop) -> RunOutcome:
        nonlocal opened
        opened, trial.loop = True, loop
        numbers = [one.member.number for one in trials]
        loop.run.log("packed", trials=numbers, place=index, proof=trial.proof)
        _open_next(pack, trials, index + 1)
        if trial.failure is not None:
            raise trial.failure
        assert trial.outcome is not None
        return trial.outcome

    context = replace(trial.context, program=trial.program, drive=drive)
    try:
        if is_run(trial.run):
            trial.outcome = resume_run(context, trial.run)[1]
        else:
            trial.outcome = start_run(replace(context, checkpoint_every="auto"), trial.run)[1]
    except (Exception, SystemExit) as error:
        trial.outcome = None
        if isinstance(error, PackError):
            trial.leaves = str(error)
        else:
            traceback.print_exc()
            trial.error = error_line(error)
    if not opened:  # the run is over, or can't be opened
        _open_next(pack, trials, index + 1)


def _train(pack: Pack, trials: Sequence[Trial]) -> None:
    slots = {id(trial): slot for slot, trial in enumerate(trials)}
    live = [trial for trial in trials if trial.loop is not None]
    _share_signals(live)
    pack.reset()
    pacer = SpanPacer()
    while live:
        spans = {}
        for trial in list(live):
            reason, spans[id(trial)] = _guard(trial, lambda loop: loop.next_span()) or (None, 0)
            if reason is not None:
                trial.outcome = _guard(trial, lambda loop, reason=reason: loop.end(reason))  # type: ignore[misc]
            if reason is not None or trial.failure is not None:
                live.remove(trial)
        steps_done = [trial.program.position.step for trial in live]
        if not live:
            return
        first = min(steps_done)
        group = [trial for trial, done in zip(live, steps_done, strict=True) if done == first]
        ahead = min((done for done in steps_done if done > first), default=None)  # after a kill between two checkpoints
        steps = min([pacer.steps(), *(spans[id(trial)] for trial in group)])
        steps = steps if ahead is None else min(steps, ahead - first)
        began = time.perf_counter()
        try:
            pack.advance([slots[id(trial)] for trial in group], steps)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            for trial in live:
                trial.failure = PackError(f"the packed step raised {describe_error(error)}")
            return
        spent_s = time.perf_counter() - began
        pacer.record_span(steps, spent_s)
        for trial in group:
            _guard(trial, lambda loop: loop.run_span(steps, spent_s / len(group)))  # noqa: B023  # called before the next iteration
        live = [trial for trial in live if trial.failure is None]


def _guard(trial: Trial, work: Callable[[TrainingLoop], T]) -> T | None:
    """Runs a part of a trial's training; an error ends this trial alone."""
    assert trial.loop is not None
    try:
        return work(trial.loop)
    except (Exception, SystemExit) as error:
        trial.failure = error
        return None


def _share_signals(trials: Sequence[Trial]) -> None:
    """Gives all trials the stop signals of the last one, whose handlers are installed."""
    loops = [trial.loop for trial in trials if trial.loop is not None]
    heard = next((loop.interrupts for loop in loops if loop.interrupts.reason()), None)
    for loop in loops:
        loop.interrupts = heard or loops[-1].interrupts
