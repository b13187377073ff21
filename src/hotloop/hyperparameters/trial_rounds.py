"""Rounds of trials: proposed together, trained in any order, compared at the same epochs, and recorded in one order.

All decisions are functions of the settings, of earlier rounds in SQLite, and of the trials' figures. A round that was
interrupted is computed again: its trials are proposed again with the same values, and trained from their checkpoints.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from hotloop.core.format import format_figure
from hotloop.core.records.study import PackMember, PackPlan, StudyRecord, TrialProgress
from hotloop.core.reporter import Say
from hotloop.errors import HotloopError, StudyError
from hotloop.hyperparameters.samplers import make_sampler, memory_study
from hotloop.hyperparameters.space import all_params, sample
from hotloop.hyperparameters.study_folder import StudyFolder
from hotloop.hyperparameters.trial_processes import Workers
from hotloop.hyperparameters.trial_values import best_value, curve, violations

FINISHED, TIME_LIMIT = "finished", "time-limit"

_ROUNDS = "rounds"

_MAX_KILLS = 5
"""Times that a run's process may be killed without a step in between; then the trial has failed."""

_PACK_PROCESS = "hotloop.hyperparameters.packs.pack_process"

_PLAN_ATTEMPTS = 3
"""Times that packs are formed, if the system kills the process."""

Unit = tuple[tuple[int, int], ...]
"""The runs, as (trial, repeat), of one process: several runs are a pack."""


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
        if any(one.packed for one in self._progress(number)):
            self.say(f"trial {number} was trained in a pack and goes on alone: equal by its proof, not bit by bit")
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
        packs = self._packs(index, memory.get_trials(deepcopy=False)[start:])
        live, pruned = list(range(start, start + size)), set[int]()
        for rung in self.study.rungs:
            self._train(memory.get_trials(deepcopy=False), live, rung, packs)
            live = [number for number in live if not self._has_failed(number, rung)]
            for number in live:
                self._report(handles[number - start], self._curve(number)[:rung])
            paused = [number for number in live if not self._is_finished(number, rung)]
            pruned |= (losers := prune(self.study, memory, paused))
            live = [number for number in live if number not in losers]
            for number in sorted(losers):
                self.say(f"trial {number}  pruned after {rung} epoch{'s' * (rung > 1)}")
        self._train(memory.get_trials(deepcopy=False), live, None, packs)
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

    def _packs(self, index: int, trials: Sequence[FrozenTrial]) -> list[Unit]:
        """Returns the packs of a round, formed before its first step."""
        if not self.study.pack:
            return []
        path = self.folder.path / "packs" / f"round-{index:04d}.json"
        plan = PackPlan.model_validate_json(path.read_bytes()) if path.is_file() else self._form_packs(path, trials)
        for member, reason in plan.alone:
            known = self.folder.progress(member.number, member.repeat)
            if not known.alone:
                self.say(f"trial {member.number} isn't packed: {reason}")
                self.folder.store_progress(known.model_copy(update={"alone": reason, "seconds": 0.0}))
        return [tuple((member.number, member.repeat) for member in pack) for pack in plan.packs]

    def _form_packs(self, path: Path, trials: Sequence[FrozenTrial]) -> PackPlan:
        members = [self._member(trial, repeat) for trial in trials for repeat in range(self.study.repeats)]
        for _ in range(_PLAN_ATTEMPTS):
            job = self.processes.start(
                f"{_PACK_PROCESS}:plan_packs", "packs.txt", folder=str(self.folder.path), study=self.study,
                make_task=self.make_task, members=members, plan_file=str(path),
            )  # fmt: skip
            try:
                self.processes.next_finished([job])
            except BaseException:
                self.processes.stop([job])
                raise
            found: PackPlan | HotloopError | None = job.result()
            if isinstance(found, HotloopError):
                raise found
            if found is not None:
                return found
        raise StudyError(
            "the process that forms packs was killed",
            expected="enough memory for a Task's data",
            fix="start a study without --pack",
        )

    def _member(self, trial: FrozenTrial, repeat: int) -> PackMember:
        return PackMember(number=trial.number, repeat=repeat, params=all_params(self.study.space, trial.params))

    def _units(self, numbers: Sequence[int], rung: int | None, packs: Sequence[Unit]) -> Iterator[Unit]:
        """Yields the runs that need training: the rest of a pack as one unit, each other run as its own."""
        due = {
            (number, repeat): not progress.alone
            for number in numbers
            for repeat in range(self.study.repeats)
            if needs_training(progress := self.folder.progress(number, repeat), rung)
        }
        rests = [tuple(run for run in pack if due.get(run)) for pack in packs]
        together = {run: rest for rest in rests if len(rest) > 1 for run in rest}
        for run in due:
            if (unit := together.get(run, (run,)))[0] == run:
                yield unit

    def _train(
        self, trials: Sequence[FrozenTrial], numbers: Sequence[int], rung: int | None, packs: Sequence[Unit] = ()
    ) -> None:
        """Trains runs to the end of an epoch, or to their end for None."""
        waiting = deque(self._units(numbers, rung, packs))
        kills: Counter[Unit] = Counter()
        running: dict[Any, tuple[Unit, int]] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    unit = waiting.popleft()
                    running[self._start(trials, unit, rung)] = (unit, self._reached(unit))
                for job in self.processes.next_finished(running):
                    unit, before = running.pop(job)
                    result = job.result()
                    if isinstance(result, HotloopError):
                        raise result
                    if result is None:
                        result = self._after_kill(unit, before, kills)
                    if result is None:
                        waiting.appendleft(unit)
                    for progress in [result] if isinstance(result, TrialProgress) else result or []:
                        self._store(progress, trials[progress.number])
                        if needs_training(progress, rung):
                            waiting.appendleft(((progress.number, progress.repeat),))
        except BaseException:
            self.processes.stop(running)
            raise

    def _store(self, progress: TrialProgress, trial: FrozenTrial) -> None:
        if progress.alone:
            self.say(f"trial {progress.number} isn't packed: {progress.alone}")
        self.folder.store_progress(progress)
        if progress.is_finished:
            self.say(_line(self.study, trial, progress))

    def _start(self, trials: Sequence[FrozenTrial], unit: Unit, rung: int | None) -> Any:
        common: dict[str, Any] = {
            "folder": str(self.folder.path), "study": self.study, "make_task": self.make_task, "pause_after": rung
        }  # fmt: skip
        members = [self._member(trials[number], repeat) for number, repeat in unit]
        runs = [str(self.folder.run_path(number, repeat)) for number, repeat in unit]
        log = f"{unit[0][0]:04d}.txt"
        if len(unit) > 1:
            return self.processes.start(f"{_PACK_PROCESS}:train_pack", log, members=members, runs=runs, **common)
        return self.processes.start(
            "hotloop.hyperparameters.trial:train", log, **members[0].model_dump(), run=runs[0], **common
        )

    def _reached(self, unit: Unit) -> int:
        return sum(self.folder.reached(number, repeat) for number, repeat in unit)

    def _after_kill(self, unit: Unit, before: int, kills: Counter[Unit]) -> list[TrialProgress] | None:
        """Returns None to train again; after kill upon kill, a run has failed, and the runs of a pack train alone."""
        kills[unit] = kills[unit] + 1 if self._reached(unit) <= before else 0
        if kills[unit] < _MAX_KILLS:
            return None
        known = [self.folder.progress(number, repeat) for number, repeat in unit]
        why = f"process {_MAX_KILLS} times without a step, often for lack of memory"
        if len(unit) == 1:
            changed: dict[str, Any] = {"error": f"the system killed the trial's {why}", "is_finished": True}
        else:
            changed = {"alone": f"the system killed the pack's {why}", "inexact": ["a pack was killed again and again"]}
        return [progress.model_copy(update=changed) for progress in known]

    def _progress(self, number: int) -> list[TrialProgress]:
        return [self.folder.progress(number, repeat) for repeat in range(self.study.repeats)]

    def _curve(self, number: int) -> list[float]:
        return curve(self._progress(number))

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
