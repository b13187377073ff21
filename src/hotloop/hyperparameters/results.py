"""The result of a study: trials, winner, importance of the parameters, and the line that repeats the winner."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

import optuna
from optuna.trial import FrozenTrial, TrialState

from hotloop.core.records.study import StudyRecord, StudyResult, TrialRecord, Value
from hotloop.core.records.study import TrialState as StateName
from hotloop.hyperparameters.space import all_params, as_text
from hotloop.hyperparameters.study_folder import StudyFolder
from hotloop.hyperparameters.trial_values import best_value, curve, spread

_STATES: dict[TrialState, StateName] = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}

_IMPORTANCE_TRIALS = 4
"""Complete trials below which no importance is computed."""

_IMPORTANCE_SEED = 0

CHANGES = "inexact"
"""The attribute of Optuna's study with the versions that have changed since the start."""


def study_result(folder: StudyFolder, ended: str) -> StudyResult:
    """Returns the result from the study's folder."""
    study = folder.record
    trials = [trial_record(folder, trial) for trial in folder.optuna.get_trials(deepcopy=False)]
    winner = best_trial(study, trials)
    inexact = inexact_reasons(folder, trials)
    return StudyResult(
        study=str(folder.path),
        name=study.name,
        figure=study.figure,
        goal="min" if study.is_minimized else "max",
        sampler=study.sampler,
        pruner=study.pruner,
        seed=study.seed,
        trials=trials,
        best=None if winner is None else winner.number,
        importance=importance(folder.optuna),
        exact=not inexact,
        inexact=inexact,
        command="" if winner is None else command(folder, winner),
        ended=ended,
    )


def trial_record(folder: StudyFolder, trial: FrozenTrial) -> TrialRecord:
    study, number = folder.record, trial.number
    runs = [folder.progress(number, repeat) for repeat in range(study.repeats)]
    state = _STATES.get(trial.state, "running")
    if state == "pruned" and all(run.is_finished and not run.error for run in runs):
        state = "continued"
    values = curve(runs)
    is_over = state in ("complete", "continued")
    pruned_value = values[-1] if state == "pruned" and values else None
    return TrialRecord(
        number=number,
        state=state,
        params=all_params(study.space, trial.params),
        value=best_value(study, runs) if is_over else pruned_value,
        spread=spread(study, runs) if is_over else None,
        epochs=len(values),
        error=next((run.error for run in runs if run.error), ""),
        runs=[str(path) for repeat in range(study.repeats) if (path := folder.run_path(number, repeat)).is_dir()],
        curve=values,
        feasible=all(excess <= 0 for excess in trial.constraints.values()),
    )


def best_trial(study: StudyRecord, trials: list[TrialRecord]) -> TrialRecord | None:
    """Returns the first of the trials with the best value among those that are complete and meet the constraints."""
    ended = [one for one in trials if one.state in ("complete", "continued") and one.feasible and one.value is not None]
    sign = 1 if study.is_minimized else -1
    return min(ended, key=lambda one: (sign * (one.value or 0.0), one.number), default=None)


def inexact_reasons(folder: StudyFolder, trials: list[TrialRecord]) -> list[str]:
    study = folder.record
    reasons = [f"--require {', '.join(study.constraints)}: measured time and memory"] if study.constraints else []
    if study.plan == "auto":
        reasons.append("--plan auto chooses plans by measured times: the result is exact in this folder alone")
    runs = [folder.progress(one.number, repeat) for one in trials for repeat in range(study.repeats)]
    changes = folder.optuna.user_attrs.get(CHANGES, [])
    return list(dict.fromkeys([*reasons, *changes, *(reason for run in runs for reason in run.inexact)]))


def importance(study: optuna.Study) -> dict[str, float]:
    """Returns the share of each parameter in the variance of the values of complete trials, by fANOVA."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(complete) < _IMPORTANCE_TRIALS or len({trial.value for trial in complete}) < 2:
        return {}
    shared = set.intersection(*(set(trial.params) for trial in complete))
    searched = [name for name in shared if len({trial.params[name] for trial in complete}) > 1]
    if not searched:
        return {}
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=_IMPORTANCE_SEED)
    found = optuna.importance.get_param_importances(study, evaluator=evaluator, params=sorted(searched))
    return {name: float(share) for name, share in found.items()}


def command(folder: StudyFolder, trial: TrialRecord) -> str:
    """Returns the line that repeats a trial."""
    study, plan = folder.record, str(folder.run_path(trial.number) / "plan.toml")
    if study.source is None:
        return _python_line(study, trial.params, plan)
    parts = ["hotloop", "train", study.source.reference]
    for name, value in trial.params.items():
        option = "--" + name.replace("_", "-")
        parts += ["-p", f"{name}={as_text(value)}"] if name in study.arguments else [option, as_text(value)]
    return shlex.join([*parts, "--plan", plan])


def _python_line(study: StudyRecord, params: Mapping[str, Value], plan: str) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in params.items() if name in study.arguments)
    task = f"make_task({arguments})"
    fields = ", ".join(f"{name}={value!r}" for name, value in params.items() if name not in study.arguments)
    task = f"dataclasses.replace({task}, {fields})" if fields else task
    return f"hotloop.fit({task}, plan={plan!r})"


def link_winner(folder: StudyFolder, result: StudyResult) -> Path | None:
    """Makes `best` a link to the winner's first run; returns the link."""
    if result.winner is None:
        return None
    folder.link_best(folder.run_path(result.winner.number))
    return folder.path / "best"
