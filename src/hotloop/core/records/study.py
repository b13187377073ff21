"""Records of studies: the space, the settings, the trials and the result."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from hotloop.core.records.training import Record, SourceRecord

Value = bool | int | float | str | None
"""A value of a hyper-parameter."""

RULES_PLAN = "rules"
"""The plan of a study without `--plan`."""


class ParameterRecord(Record):
    """A hyper-parameter of a space: a range, a choice of values, or a fixed value.

    Attributes:
        low, high: ends of a range, both included.
        step: distance of a range's values; None for any value.
        choices: the values of a choice; one value is fixed.
        when: the parameter is set only in trials where each named parameter has one of these values.
        place: where the user wrote the parameter, for messages.
    """

    low: float | None = None
    high: float | None = None
    log: bool = False
    is_int: bool = False
    step: float | None = None
    choices: list[Value] = Field(default=[])
    when: dict[str, list[Value]] = Field(default={})
    place: str = ""

    @property
    def is_fixed(self) -> bool:
        return len(self.choices) == 1


class StudyRecord(Record):
    """The settings of a study (`study.json`), stored before the first trial.

    Attributes:
        id: of this study and its copies.
        source: how to load the Task from the folder; None for a function of Python.
        space: the hyper-parameters, in the order of sampling.
        arguments: parameters of `task(...)`; the other names of the space are fields of the Task.
        round_size: trials that are proposed together, from the results of earlier rounds.
        repeats: seeds for each trial.
        plan: `rules`, `auto`, or a plan as TOML.
        axes: plan axes that are set.
        figure: the monitored figure, such as `validation_loss`.
        epochs: the largest number of epochs of a trial.
        rungs: epochs after which trials are compared for pruning.
        task_epochs, task_seed: values of the Task.
        trials: number of trials that the study began with.
    """

    version: int = 1
    id: str
    name: str
    created: str
    source: SourceRecord | None
    space: dict[str, ParameterRecord]
    arguments: list[str]
    sampler: str
    pruner: str
    seed: int
    round_size: int
    repeats: int
    plan: str
    axes: dict[str, Any] = Field(default={})
    constraints: list[str] = Field(default=[])
    figure: str
    is_minimized: bool
    epochs: int
    rungs: list[int]
    task_epochs: int
    task_seed: int
    trials: int = 0
    versions: dict[str, str]


class TrialProgress(Record):
    """The state of one run of a trial.

    Attributes:
        epochs: completed epochs.
        values: the monitored figure of each epoch.
        is_finished: whether training is over; else it was paused.
        final: metrics of the test data, after the end.
        error: the line of the error that ended the run; empty without one.
        inexact: why a resumed run may differ from an uninterrupted run.
        step_ms: mean time of a training step in the last epoch; `memory_bytes`: the largest memory of the process.
    """

    number: int
    repeat: int
    epochs: int = 0
    values: list[float] = Field(default=[])
    is_finished: bool = False
    final: dict[str, Any] | None = None
    error: str = ""
    inexact: list[str] = Field(default=[])
    seconds: float = 0.0
    step_ms: float | None = None
    memory_bytes: int | None = None


TrialState = Literal["running", "complete", "pruned", "continued", "failed"]


class TrialRecord(Record):
    """One trial of a study.

    Attributes:
        params: the values of all hyper-parameters that the trial sets.
        value: the best monitored figure of an epoch; the mean over the repeats; None for a failed trial.
        spread: standard deviation of the values of the repeats; None without repeats.
        epochs: completed epochs.
        error: why the trial failed; empty for other trials.
        runs: run folders, one for each repeat.
        curve: the monitored figure of each epoch, as the mean over the repeats.
        feasible: whether the constraints are met.
    """

    number: int
    state: TrialState
    params: dict[str, Value]
    value: float | None
    spread: float | None = None
    epochs: int
    error: str = ""
    runs: list[str] = Field(default=[])
    curve: list[float] = Field(default=[])
    feasible: bool = True


class StudyResult(Record):
    """The trials of a study, and the winner.

    Attributes:
        trials: in the order of their numbers.
        best: number of the winner; None if no trial is complete.
        importance: the share of each hyper-parameter in the variance of the values (fANOVA); empty with few trials.
        exact: whether the same seed gives the same result; `inexact`: the reasons against.
        command: the line that repeats the winner.
        ended: why the study stopped, such as `finished` or `time-limit`.
    """

    version: int = 1
    study: str
    name: str
    figure: str
    goal: Literal["min", "max"]
    sampler: str
    pruner: str
    seed: int
    trials: list[TrialRecord]
    best: int | None
    importance: dict[str, float]
    exact: bool
    inexact: list[str]
    command: str
    ended: str

    @property
    def winner(self) -> TrialRecord | None:
        return None if self.best is None else self.trials[self.best]


class LearningRateRange(Record):
    """A learning-rate range test.

    Attributes:
        rates, losses: the learning rate and the smoothed training loss of each step of the test.
        recommended: the learning rate to use; None if no rate lowers the loss.
        steps: of the confirming run; `first_loss` and `last_loss` are means over its first and last tenth.
        command: the line that trains with the recommended rate; empty if the Task has no argument for the rate.
    """

    version: int = 1
    name: str
    rates: list[float]
    losses: list[float]
    recommended: float | None
    steps: int
    first_loss: float | None = None
    last_loss: float | None = None
    command: str = ""


class BatchSizeTrial(Record):
    """One batch size, in a process of its own.

    Attributes:
        memory_bytes: largest memory of the process, or of the accelerator.
        predicted_bytes: the prediction from the smaller sizes before the process ran.
        error: why the size can't be used; empty if it can.
    """

    batch_size: int
    samples_per_s: float | None = None
    memory_bytes: int | None = None
    predicted_bytes: int | None = None
    error: str = ""


class BatchSizeRange(Record):
    """Batch sizes from small to large.

    Attributes:
        largest: the largest size that fits; `fastest` has the best samples/s; None without such a size, and on a busy
            machine for `fastest`.
        limit: why the search ended.
        busy: a remark on other programs that used the cores meanwhile; empty if none did.
    """

    version: int = 1
    name: str
    sizes: list[BatchSizeTrial]
    largest: int | None
    fastest: int | None
    limit: str
    busy: str = ""
