"""Plans of a study with `--plan auto`: the fastest proven plan of each shape of network, found once."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.files.package_use import PackageUse
from hotloop.core.plan_request import PlanRequest
from hotloop.core.records.race import Verdict
from hotloop.core.records.study import ParameterRecord, StudyRecord
from hotloop.core.records.training import TaskFacts
from hotloop.core.reporter import Report
from hotloop.core.task_parts.named_optimizers import member_optimizers
from hotloop.lowering.build import lower
from hotloop.lowering.program import Program
from hotloop.plan import Plan
from hotloop.task import Task
from hotloop.task_file import LoadedTask
from hotloop.tuning.auto import feasibility_facts
from hotloop.tuning.tune import cached_or_tuned_plan


@dataclass(frozen=True)
class ShapePlan:
    """The plan of a shape.

    Attributes:
        pays_after: steps of one trial from which compiling the plan for this trial alone pays; None if unknown.
    """

    plan: Plan
    pays_after: int | None

    def lower(self, task: Task, steps: int | None, say: Report) -> Program:
        """Lowers the plan for one trial. A number that is a constant of the compiled step, such as the rate of a dropout,
        makes another package: it is compiled only if that pays in this trial.

        Raises:
            PlanError: the trial needs a package of its own that wouldn't pay, or the plan can't be run.
        """
        may_build = steps is None or self.pays_after is None or steps > self.pays_after
        return lower(task, self.plan, say, package=PackageUse(may_build=may_build))


def plan_of_shape(folder: Path, loaded: LoadedTask, base: Plan, trials: int) -> ShapePlan:
    """Returns the plan for trials that differ in numbers alone; the first trial of a shape finds the plan.

    Args:
        folder: where the study stores plans.
        base: axes that are set.
        trials: expected number of trials of the shape: the plan has to pay in all of them together.
    """
    path = folder / f"{shape_key(loaded.task, base)}.toml"
    folder.mkdir(parents=True, exist_ok=True)
    if path.is_file():
        return _read(path)
    with FileLock(folder / "search.lock"):  # one search at a time: two would change each other's times
        if not path.is_file():
            print(f"finding the plan for {path.stem}", flush=True)
            together = {"epochs": loaded.task.epochs * trials}
            searches: list[Verdict] = []
            request = PlanRequest(base, is_auto=True)
            plan, reason = cached_or_tuned_plan(loaded, request, overrides=together, searches=searches)
            print(reason, flush=True)
            winners = [one.plan(one.winner) for one in searches if one.winner]
            write_atomic(
                path.with_suffix(".json"), json.dumps({"pays_after": winners[-1].pays_after if winners else None})
            )
            write_atomic(path, (plan or base).to_toml())
    return _read(path)


def _read(path: Path) -> ShapePlan:
    facts = path.with_suffix(".json")  # a study of an earlier version has none
    return ShapePlan(Plan.read(path), json.loads(facts.read_text())["pays_after"] if facts.is_file() else None)


def expected_trials(study: StudyRecord) -> int:
    """Returns the number of trials of one shape if each choice, and each whole number of a range, makes another shape.

    A study that prunes trains half of its trials' epochs.
    """
    shapes = math.prod(_different_values(one) for one in study.space.values())
    return max(1, study.trials * study.repeats // (shapes * (2 if study.rungs else 1)))


def _different_values(parameter: ParameterRecord) -> int:
    if parameter.low is None or parameter.high is None:
        return max(1, len(parameter.choices))
    return int((parameter.high - parameter.low) // (parameter.step or 1)) + 1 if parameter.is_int else 1


def shape_key(task: Task, base: Plan) -> str:
    """Returns a hash of what a plan's speed depends on: shapes, layers and optimizers, without their numbers."""
    facts, _ = feasibility_facts(task, base)
    model = task.build_model()
    optimizers = [type(one).__name__ for one in member_optimizers(task.build_optimizer(model))]
    tensors = [[name, list(value.shape), str(value.dtype)] for name, value in model.state_dict(keep_vars=True).items()]
    layers = [[name, type(module).__qualname__] for name, module in model.named_modules()]
    text = json.dumps([tensors, layers, optimizers, _sizes(facts), base.brief()])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _sizes(facts: TaskFacts) -> list[Any]:
    return [facts.batch_size, facts.inputs, facts.drops, facts.one_operation, facts.steps is None]
