"""Rounds of trials: proposed together, trained in any order, compared at the same epochs, and recorded in one order.

All decisions are functions of the settings, of earlier rounds in SQLite, and of the trials' figures. A round that was
interrupted is computed again: its trials are proposed again with the same values, and trained from their checkpoints.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from hotloop.core.format import format_figure
from hotloop.core.records.study import StudyRecord, TrialProgress
from hotloop.core.reporter import Say
from hotloop.errors import HotloopError
from hotloop.hyperparameters.results import best_value, curve, violations
from hotloop.hyperparameters.samplers import make_sampler, memory_study
from hotloop.hyperparameters.space import all_params, sample
from hotloop.hyperparameters.study_folder import StudyFolder
from hotloop.hyperparameters.trial_processes import Workers

FINISHED, TIME_LIMIT = "finished", "time-limit"

_ROUNDS = "rounds"

_MAX_KILLS = 5
"""Times that a run's process may be killed without a step in between; then the trial has failed."""


class Rounds:
    """The trials of a study.

    Args:
        make_task: the Task's function for a study from Python, by cloudpickle.
        jobs: processes that train at the same time.
    """

    def __init__(self, folder: StudyFolder, processes: Workers, make_task: bytes | None, jobs: int, say: Say) -> None:
        self.folder, self.study, self.processes = folder, folder.record, processes
        self.make_task, self.jobs, self.say = make_task, jobs, say

    def run(self, trials: int, until: float) -> str:
        """Runs rounds until the study has so many trials or the time is over, and returns the reason.

        Args:
            until: in seconds by `time.monotonic()`; a round is completed.
        """
        while True:
            sizes: list[int] = self.folder.optuna.user_attrs.get(_ROUNDS, [])
            known = self.folder.optuna.get_trials(deepcopy=False)
            unfinished = [trial.number for trial in known if not trial.state.is_finished()]
            if sum(sizes) > len(known):
                unfinished.append(len(known))
            if not unfinished:
                if sum(sizes) >= trials:
                    return FINISHED
                if time.monotonic() >= until:
                    return TIME_LIMIT
                sizes = [*sizes, min(self.study.round_size, trials - sum(sizes))]
                self.folder.optuna.set_user_attr(_ROUNDS, sizes)
                unfinished = [sum(sizes[:-1])]
            index = next(index for index in range(len(sizes)) if unfinished[0] < sum(sizes[: index + 1]))
            self._run_round(index, sum(sizes[:index]), sizes[index])

    def train_to_end(self, number: int) -> None:
        """Trains a pruned trial from its last checkpoint to its end."""
        self._train(self.folder.optuna.get_trials(deepcopy=False), [number], None)

    def _run_round(self, index: int, start: int, size: int) -> None:
        earlier = self.folder.optuna.get_trials(deepcopy=False)[:start]
        memory = memory_study(self.study, make_sampler(self.study, index), earlier)
        handles = []
        for _ in range(size):
            handles.append(trial := memory.ask())
            trial.set_user_attr("round", index)
            sample(trial, self.study.space)
        self._store_proposals(memory.get_trials(deepcopy=False), start)
        live, pruned = list(range(start, start + size)), set[int]()
        for rung in self.study.rungs:
            self._train(memory.get_trials(deepcopy=False), live, rung)
            live = [number for number in live if not self._has_failed(number, rung)]
            for number in live:
                self._report(handles[number - start], curve(self._progress(number))[:rung])
            paused = [number for number in live if not self._is_finished(number, rung)]
            pruned |= (losers := prune(self.study, memory, paused))
            live = [number for number in live if number not in losers]
            for number in sorted(losers):
                self.say(f"trial {number}  pruned after {rung} epoch{'s' * (rung > 1)}")
        self._train(memory.get_trials(deepcopy=False), live, None)
        for number in range(start, start + size):
            self._finish(memory, handles[number - start], number in pruned)

    def _store_proposals(self, trials: Sequence[FrozenTrial], start: int) -> None:
        """Adds the trials of a round that SQLite lacks."""
        first = max(start, len(self.folder.optuna.get_trials(deepcopy=False)))
        self.folder.optuna.add_trials(trials[first:])

    def _report(self, trial: optuna.Trial, values: Sequence[float]) -> None:
        known = trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values.keys()
        for epoch, value in enumerate(values, start=1):
            if epoch not in known:
                trial.report(value, epoch)

    def _finish(self, memory: optuna.Study, trial: optuna.Trial, is_pruned: bool) -> None:
        """Ends a trial in memory, then stores the trial in SQLite."""
        number = trial.number
        if is_pruned:
            memory.tell(number, state=TrialState.PRUNED)
        elif self._has_failed(number):
            memory.tell(number, state=TrialState.FAIL)
        else:
            progress = self._progress(number)
            self._report(trial, curve(progress))
            for name, excess in violations(self.study.constraints, progress).items():
                trial.set_constraint(name, excess)
            memory.tell(number, best_value(self.study, progress))
        stored = self.folder.optuna.get_trials(deepcopy=False)[number]
        if not stored.state.is_finished():
            error = next((one.error for one in self._progress(number) if one.error), "")
            store_trial(self.folder, stored, memory.get_trials(deepcopy=False)[number], error)

    def _train(self, trials: Sequence[FrozenTrial], numbers: Sequence[int], rung: int | None) -> None:
        """Trains runs to the end of an epoch, or to their end for None."""
        runs = [(number, repeat) for number in numbers for repeat in range(self.study.repeats)]
        waiting = deque(run for run in runs if needs_training(self.folder.progress(*run), rung))
        kills: Counter[tuple[int, int]] = Counter()
        running: dict[Any, tuple[tuple[int, int], int]] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    run = waiting.popleft()
                    running[self._start(trials[run[0]], run[1], rung)] = (run, self.folder.reached(*run))
                for job in self.processes.next_finished(running):
                    run, before = running.pop(job)
                    result = job.result()
                    if isinstance(result, HotloopError):
                        raise result
                    if result is None:  # the process was killed
                        kills[run] = kills[run] + 1 if self.folder.reached(*run) <= before else 0
                        if kills[run] < _MAX_KILLS:
                            waiting.appendleft(run)
                            continue
                        why = f"the system killed the trial's process {_MAX_KILLS} times without a step, often for lack of memory"
                        result = self.folder.progress(*run).model_copy(update={"error": why, "is_finished": True})
                    self.folder.store_progress(result)
                    if result.is_finished:
                        self.say(_line(self.study, trials[run[0]], result))
                    elif needs_training(result, rung):
                        waiting.appendleft(run)
        except BaseException:
            self.processes.stop(running)
            raise

    def _start(self, trial: FrozenTrial, repeat: int, rung: int | None) -> Any:
        return self.processes.start(
            "hotloop.hyperparameters.trial:train",
            f"{trial.number:04d}.txt",
            folder=str(self.folder.path),
            study=self.study,
            make_task=self.make_task,
            number=trial.number,
            repeat=repeat,
            params=all_params(self.study.space, trial.params),
            run=str(self.folder.run_path(trial.number, repeat)),
            pause_after=rung,
        )

    def _progress(self, number: int) -> list[TrialProgress]:
        return [self.folder.progress(number, repeat) for repeat in range(self.study.repeats)]

    def _has_failed(self, number: int, rung: float = math.inf) -> bool:
        """Returns whether a trial failed before the end of an epoch.

        A round that is computed again knows failures after the epoch already, and compares those trials as before.
        """
        return any(one.error and one.epochs < rung for one in self._progress(number))

    def _is_finished(self, number: int, rung: int) -> bool:
        """Returns whether a trial ended at the rung or before; a trial that fails later was paused there."""
        return all(one.is_finished and not one.error and one.epochs <= rung for one in self._progress(number))


def needs_training(progress: TrialProgress, rung: int | None) -> bool:
    return not progress.is_finished and (rung is None or progress.epochs < rung)


def prune(study: StudyRecord, memory: optuna.Study, numbers: Sequence[int]) -> set[int]:
    """Returns the trials to prune, each compared with all other trials of the round at the same epoch.

    Optuna's pruners compare a trial with those that reached the epoch before; so each trial is judged in a copy of the
    study in which all others have reached the epoch.
    """
    trials = memory.get_trials(deepcopy=False)
    marks = {}
    for number in numbers:
        view = memory_study(study, trials=trials)
        view.pruner.prune(view, view.get_trials(deepcopy=False)[number])
        marks[number] = view.get_trials(deepcopy=False)[number].system_attrs
    losers = set()
    for number in numbers:
        others = [
            _with_attrs(one, marks[one.number]) if one.number in marks and one.number != number else one
            for one in trials
        ]
        view = memory_study(study, trials=others)
        if view.pruner.prune(view, view.get_trials(deepcopy=False)[number]):
            losers.add(number)
    for number in numbers:
        for key, value in marks[number].items():
            memory._storage.set_trial_system_attr(trials[number]._trial_id, key, value)
    return losers


def _with_attrs(trial: FrozenTrial, attrs: Mapping[str, Any]) -> FrozenTrial:
    changed = copy.copy(trial)
    changed.system_attrs = dict(attrs)
    return changed


def store_trial(folder: StudyFolder, stored: FrozenTrial, trial: FrozenTrial, error: str) -> None:
    """Writes a finished trial to SQLite, its state last: until then a resumed study computes the round again."""
    storage, identity = folder.optuna._storage, stored._trial_id
    for epoch, value in trial.intermediate_values.items():
        storage.set_trial_intermediate_value(identity, epoch, value)
    for key, value in trial.system_attrs.items():
        storage.set_trial_system_attr(identity, key, value)
    if error:
        storage.set_trial_user_attr(identity, "error", error)
    storage.set_trial_state_values(identity, trial.state, trial.values)


def _line(study: StudyRecord, trial: FrozenTrial, result: TrialProgress) -> str:
    params = "  ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in trial.params.items()
    )
    run = f"trial {trial.number}" + (f" (seed {result.repeat + 1})" if result.repeat else "")
    if result.error:
        return f"{run}  {params}  failed: {result.error}"
    best, epochs = best_value(study, [result]), f"{result.epochs} epoch{'s' * (result.epochs > 1)}"
    return f"{run}  {params}  best {study.figure.replace('_', ' ')} {format_figure(best)} of {epochs}"
