"""The result of a study: the figures of its trials, the winner, importance of the parameters, and the line that repeats the winner."""

from __future__ import annotations

import math
import re
import shlex
import statistics
from collections.abc import Mapping, Sequence

import optuna
from optuna.trial import FrozenTrial, TrialState

from hotloop.core.records.study import StudyRecord, StudyResult, TrialProgress, TrialRecord, Value
from hotloop.core.records.study import TrialState as StateName
from hotloop.errors import StudyError
from hotloop.hyperparameters.space import all_params, as_text
from hotloop.hyperparameters.study_folder import StudyFolder

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
    candidates = [
        one for one in trials if one.state in ("complete", "continued") and one.feasible and one.value is not None
    ]
    sign = 1 if study.is_minimized else -1
    winner = min(candidates, key=lambda one: (sign * (one.value or 0.0), one.number), default=None)
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


# --- the figures of a trial from its runs

_UNITS = {"": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_CONSTRAINT = re.compile(r"(memory|step_ms)\s*<=?\s*((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([kmgt]?b?)", re.IGNORECASE)


def curve(runs: Sequence[TrialProgress]) -> list[float]:
    """Returns the mean over the runs of each epoch that all runs have completed."""
    return [statistics.fmean(values) for values in zip(*(run.values for run in runs), strict=False)]


def best_value(study: StudyRecord, runs: Sequence[TrialProgress]) -> float:
    """Returns the mean over the runs of their best epochs."""
    return statistics.fmean(_best_values(study, runs))


def spread(study: StudyRecord, runs: Sequence[TrialProgress]) -> float | None:
    """Returns the standard deviation over the runs; None for a single run."""
    return statistics.stdev(_best_values(study, runs)) if len(runs) > 1 else None


def _best_values(study: StudyRecord, runs: Sequence[TrialProgress]) -> list[float]:
    better = min if study.is_minimized else max
    return [better(filter(math.isfinite, run.values)) for run in runs]


def check_constraints(texts: Sequence[str]) -> list[str]:
    """Returns the constraints.

    Raises:
        StudyError: a constraint has another form.
    """
    for text in texts:
        _parse_constraint(text)
    return list(texts)


def violations(constraints: Sequence[str], runs: Sequence[TrialProgress]) -> dict[str, float]:
    """Returns by how much a trial exceeds each limit; 0 or less for a limit that is met."""
    found = {}
    for text in constraints:
        name, limit = _parse_constraint(text)
        measured = [run.memory_bytes if name == "memory" else run.step_ms for run in runs]
        found[text] = max((float(value) for value in measured if value is not None), default=0.0) - limit
    return found


def _parse_constraint(text: str) -> tuple[str, float]:
    match = _CONSTRAINT.fullmatch(text.strip())
    unit = match[3].lower() if match else ""
    if match is None or (match[1].lower() == "step_ms" and unit) or unit not in _UNITS:
        raise StudyError(f"--require {text!r}", expected="a limit such as 'memory < 4GB' or 'step_ms < 5'")
    return match[1].lower(), float(match[2]) * _UNITS[unit]
