"""Checks whether a plan gives the baseline's result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hotloop.core.plan_request import PlanRequest
from hotloop.core.records.race import Parity
from hotloop.core.reporter import Reporter, Say
from hotloop.lowering.failures.explanation import explain_error
from hotloop.parity.convergence import check_convergence, check_seeds
from hotloop.parity.proof import prove_programs
from hotloop.plan import Plan
from hotloop.task import Task
from hotloop.task_file import LoadedTask
from hotloop.tuning.auto.recall import lower_cached_or_auto
from hotloop.tuning.contenders import check_comparable
from hotloop.tuning.run_context import RunContext

Progress = Callable[[str, int, int], None]
"""Called with the activity, the completed number, and the total."""


def check(
    task: Task,
    plan: Plan | str | Path,
    *,
    device: str | None = None,
    converge: int = 0,
    say: Say = lambda line: None,
    progress: Progress = lambda doing, done, total: None,
) -> Parity:
    """Returns whether a plan gives the same result as the baseline on its device, with the evidence.

    Args:
        plan: a `Plan`, a TOML file or `auto`.
        device: overrides the plan's device.
        converge: also train to the end with this number of seeds, under the plan and the baseline, and compare the ends.
            If a training fails, or at Ctrl-C, the result has what was trained, and `convergence.ended` says why.
        say: called with notes of lowering.
        progress: called with the numbers of compared states and of completed trainings.

    Raises:
        PlanError: the plan can't be run here.
        HotloopError: a step of the baseline itself can't be run.
    """
    return check_requested(
        LoadedTask(task, None, {}),
        PlanRequest.from_value(plan, {} if device is None else {"device": device}),
        converge=converge,
        say=say,
        progress=progress,
    )


def check_requested(loaded: LoadedTask, wanted: PlanRequest, *, converge: int, say: Say, progress: Progress) -> Parity:
    """Checks like `check`; `auto` is the plan that `train` takes."""
    check_comparable(wanted.plan)
    if converge:
        check_seeds(converge)
    task = loaded.task
    program = lower_cached_or_auto(RunContext(loaded, wanted=wanted, reporter=Reporter(say)))
    try:
        parity = prove_programs(task, [program], progress=lambda *count: progress("states", *count))[0]
        plan = program.parts.plan
    except Exception as error:  # the baseline's own step can't be run
        raise explain_error(error, program, None) from error
    finally:
        program.close()
    if not converge:
        return parity
    found = check_convergence(task, plan, converge, lambda *count: progress("trainings", *count))
    return parity.model_copy(update={"convergence": found})
