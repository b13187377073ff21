"""The trials of a pack in its process: loads their Tasks, lowers them onto one stack, and proves each trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hotloop.core.plan_request import AUTO, BASELINE, PlanRequest
from hotloop.core.records.study import PackMember, StudyRecord
from hotloop.core.state import differing_paths
from hotloop.data.batch_tree import tree_tensors
from hotloop.data.sources import Table
from hotloop.errors import DataError, describe_error
from hotloop.hyperparameters.packs.model_stack import ModelStack
from hotloop.hyperparameters.packs.packed_step import Pack, PackedStep
from hotloop.hyperparameters.packs.shape_keys import same_loss
from hotloop.hyperparameters.trial import rules_plans, trial_context
from hotloop.hyperparameters.trial_server import seed_generators
from hotloop.lowering.build import lower
from hotloop.lowering.program import Program
from hotloop.parity.proof import prove_programs
from hotloop.plan import Plan
from hotloop.task import Task
from hotloop.training.early_stopping import RunOutcome
from hotloop.training.loop import TrainingLoop
from hotloop.tuning.run_context import RunContext

PROVEN = ("bitwise", "fp32-equivalent")

_EAGER = {"engine": "eager", "compile": "none", "layout": "contiguous", "graphs": "none", "accumulation": 1}
"""Axes that the packed step replaces."""


@dataclass(eq=False)
class Trial:
    """A trial of a pack.

    Attributes:
        program: with a `PackedStep`; its tensors are rows of the pack's stack.
        outcome: the end of its training; None before, and after an error.
        proof: how far the packed step is from the step alone.
        loop: the training loop, within the run's contexts.
        failure: the error that ended the training, raised within the run's contexts.
        error: the line of the error that ended the training.
        leaves: why the trial goes on alone from its last checkpoint.
    """

    member: PackMember
    run: Path
    context: RunContext
    program: Program
    proof: str = ""
    loop: TrainingLoop | None = None
    outcome: RunOutcome | None = None
    failure: Exception | SystemExit | None = None
    error: str = ""
    leaves: str = ""


def load_context(
    folder: Path, study: StudyRecord, make_task: bytes | None, member: PackMember, pause_after: int | None
) -> RunContext:
    """Loads a trial's Task, with the random numbers that the Task reads in a process of its own."""
    seed_generators()
    context = trial_context(folder, study, make_task, member.repeat, member.params, pause_after)
    return context.with_overrides()


def lower_member(study: StudyRecord, context: RunContext) -> Program:
    """Lowers a trial's Task under the rules' plan, without the axes that the packed step replaces."""
    return lower(context.task, _member_plan(study, context.task), context.say, make_step=PackedStep)


def _member_plan(study: StudyRecord, task: Task) -> Plan:
    axes = {"threads": 1, **study.axes}
    if study.plan == BASELINE:
        return PlanRequest.from_value(BASELINE, axes).plan
    return rules_plans(task, PlanRequest.from_value(AUTO, axes).plan)[0].with_axes(**_EAGER)


def build_pack(programs: Sequence[Program]) -> Pack:
    """Stacks the models of Programs.

    Raises:
        DataError: the trials have data of different forms.
    """
    tasks = [program.parts.task for program in programs]
    splits = [program.parts.splits for program in programs]
    if len({(one.batches, one.batch_size, len(_order(one).epoch(0))) for one in splits}) > 1:
        raise DataError("the trials have different numbers of samples")
    shares_seed = len({task.seed for task in tasks}) == 1
    shares_batch = shares_seed and all(_same_data(programs[0], other) for other in programs[1:])
    has_common_loss = tasks[0].step is not None or same_loss(tasks)
    stack = ModelStack(
        [program.parts for program in programs],
        shares_batch=shares_batch,
        shares_draws=shares_seed,
        has_common_loss=has_common_loss,
    )
    return Pack(programs, stack)


def _order(splits: Any) -> Any:
    assert splits.order is not None
    return splits.order


def _same_data(one: Program, other: Program) -> bool:
    """Returns whether two trials of one seed train on the same batches."""
    splits = [program.parts.splits for program in (one, other)]
    tables = [split.train for split in splits if isinstance(split.train, Table)]
    if len(tables) < len(splits) or vars(_order(splits[0])) != vars(_order(splits[1])):
        return False
    columns = [list(tree_tensors(table.columns)) for table in tables]
    return len(columns[0]) == len(columns[1]) and all(
        mine is theirs or (mine.shape == theirs.shape and mine.dtype == theirs.dtype and torch.equal(mine, theirs))
        for mine, theirs in zip(*columns, strict=True)
    )


def prove_pack(pack: Pack, tasks: Sequence[Task]) -> list[tuple[bool, str]]:
    """Proves that each trial of a pack computes what the trial computes alone.

    Returns:
        For each trial whether it is proven, and the evidence or the reason against.
    """
    before = [program.state() for program in pack.programs]
    found = []
    for slot, (program, task) in enumerate(zip(pack.programs, tasks, strict=True)):
        try:
            parity = prove_programs(task, [program])[0]
            is_proven, reason = parity.parity in PROVEN, f"{parity.parity}: {parity.reason}"
            restore(pack, before)
            if is_proven and (changed := _changed_neighbour(pack, slot)):
                is_proven, reason = False, changed
        except (Exception, SystemExit) as error:
            is_proven, reason = False, f"the packed step raised {describe_error(error)}"
        restore(pack, before)
        found.append((is_proven, reason))
    return found


def restore(pack: Pack, states: Sequence[Any]) -> None:
    for program, state in zip(pack.programs, states, strict=True):
        program.restore(state)
    pack.reset()


def _changed_neighbour(pack: Pack, slot: int) -> str:
    """Trains one trial while the others rest; returns what changes in another trial, or what doesn't in this one."""
    before = [program.state() for program in pack.programs]
    pack.advance([slot], 1)
    pack.programs[slot].advance(1)
    for other, (program, state) in enumerate(zip(pack.programs, before, strict=True)):
        paths = differing_paths(program.state(), state)
        if other != slot and paths:
            return f"a step of this trial changes {paths[0].strip('/')} of another trial of the pack"
        if other == slot and not any(path.startswith("/parameters") for path in paths):
            return "a step of this trial alone changes none of its parameters"
    return ""
