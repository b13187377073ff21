"""The options of a study, and where its Tasks come from."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotloop.core.files.source_files import file_of_reference, split_reference
from hotloop.core.format import parse_seconds
from hotloop.core.plan_request import BASELINE, PlanRequest
from hotloop.errors import StudyError, type_name
from hotloop.hyperparameters import samplers
from hotloop.hyperparameters.trial_values import check_constraints
from hotloop.plan import Plan

DEFAULT_ROUND = 8

_UNPACKED_AXES = ("engine", "compile", "graphs", "layout", "accumulation", "parallel", "precision")
"""Axes of a plan that a packed step lacks."""

_AUTO_PACK = 8
"""Trials of a pack with `auto`: the default round; more trials leave the caches of a core."""


@dataclass(frozen=True)
class StudyOptions:
    """How to search.

    Attributes:
        trials: number of trials; None for 20, or those of the study to go on with.
        sampler: `tpe`, `cmaes`, `gp`, `grid` or `random`.
        pruner: `none`, `median`, `hyperband` or `halving`.
        round_size: trials that are proposed together from the results of earlier rounds; at least `jobs` uses all jobs.
        jobs: processes that train at the same time, without effect on the result.
        repeats: seeds for each trial; the value is the mean.
        constraints: limits such as `memory < 4GB` and `step_ms < 5`.
        time_limit: a time such as `1h`, after which no further round begins.
        plan: `auto`, `baseline`, `arrays`, a TOML file or a Plan; None for the rules' plan.
        axes: plan axes that are set.
        pack: `none`, `auto`, or the largest number of trials that train together in one program.
    """

    trials: int | None = None
    sampler: str = "tpe"
    pruner: str = "none"
    round_size: int = DEFAULT_ROUND
    jobs: int = 1
    seed: int = 0
    repeats: int = 1
    constraints: Sequence[str] = ()
    time_limit: str | None = None
    plan: Plan | str | Path | None = None
    axes: Mapping[str, Any] = field(default_factory=dict)
    pack: str | int = "none"

    def check(self) -> None:
        """Raises HotloopError if an option has no such value."""
        samplers.check_name("--sampler", self.sampler, samplers.SAMPLERS)
        samplers.check_name("--prune", self.pruner, samplers.PRUNERS)
        check_constraints(self.constraints)
        numbers = {"--trials": self.trials, "--round": self.round_size, "--jobs": self.jobs, "--repeats": self.repeats}
        for option, number in numbers.items():
            if number is not None and number < 1:
                raise StudyError(f"{option} {number}", expected="1 or more")
        if self.seed < 0:
            raise StudyError(f"--seed {self.seed}", expected="0 or more")
        if self.time_limit is not None:
            parse_seconds(self.time_limit, "time-limit")
        PlanRequest.from_value(self.plan, self.axes)
        clashes = [f"{axis}={self.axes[axis]}" for axis in _UNPACKED_AXES if axis in self.axes]
        if self.pack_size and (clashes or self.plan not in (None, BASELINE)):
            raise StudyError(
                f"--pack {self.pack} with {clashes[0] if clashes else 'a plan of its own'}, which is for trials alone",
                expected="the rules' plan or --plan baseline",
                fix="leave out --pack, or the plan",
            )

    @property
    def pack_size(self) -> int:
        """The largest number of trials in a pack; 0 for none.

        Raises:
            StudyError: `pack` has another form.
        """
        if self.pack in ("none", "auto"):
            return 0 if self.pack == "none" else _AUTO_PACK
        if not re.fullmatch("[0-9]+", str(self.pack)) or int(self.pack) < 2:
            raise StudyError(f"--pack {self.pack}", expected="none, auto, or a number of trials from 2")
        return int(self.pack)

    @property
    def until(self) -> float:
        """When no further round begins, in seconds by `time.monotonic()`."""
        return math.inf if self.time_limit is None else time.monotonic() + parse_seconds(self.time_limit, "time-limit")


@dataclass(frozen=True)
class TaskSource:
    """Where a study's Tasks come from: a file, or a function of Python.

    Attributes:
        make_task: the function, by cloudpickle.
    """

    reference: str
    make_task: bytes | None = None

    @classmethod
    def from_value(cls, value: Any) -> TaskSource:
        """Returns the source of a function that returns a Task, or of a reference such as `file.py`.

        Raises:
            StudyError: neither of them, or a function that can't be sent to other processes.
        """
        if isinstance(value, str | Path):
            file_of_reference(split_reference(str(value))[0])
            return cls(str(value))
        if not callable(value):
            raise StudyError(
                f"study got {type_name(value)}", expected="a function that returns a hotloop.Task, or a file"
            )
        import cloudpickle

        try:
            return cls(getattr(value, "__name__", "make_task"), cloudpickle.dumps(value))
        except Exception as error:
            raise StudyError(
                f"make_task can't be sent to the processes of trials: {type(error).__name__}: {error}",
                expected="a function whose variables can be pickled",
                fix="create such objects inside the function",
            ) from error
