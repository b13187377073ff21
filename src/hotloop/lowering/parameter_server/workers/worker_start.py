"""Start of a plan's workers."""

from __future__ import annotations

from hotloop.core.reporter import Say
from hotloop.distributed.ray.cluster import check_installed
from hotloop.lowering.parameter_server.scheduler import WorkerPool
from hotloop.lowering.parameter_server.server_program import ParameterServerProgram
from hotloop.lowering.parameter_server.workers.ray_workers import ActorPool
from hotloop.lowering.parameter_server.workers.worker import RemoteTask
from hotloop.lowering.program import Program
from hotloop.plan import BASELINE, Plan, axes_dropped_with


def start_workers(
    program: Program, recipe: RemoteTask, workers: int, say: Say, limit_s: float | None = None
) -> Program:
    """Starts workers for a parameter server's Program; returns any other Program unchanged.

    Args:
        limit_s: see `ParameterServerProgram.set_workers`.

    Raises:
        TrainingError: a worker ended before its first batch.
        PlanError: the plan requires Ray, which isn't installed.
    """
    if isinstance(program, ParameterServerProgram):
        plan = program.parts.plan
        if plan.workforce == "ray":
            check_installed()
        say(f"starting {workers} workers; the result of asynchronous training differs a little each time")
        program.set_workers(_make_pool(plan, recipe, workers), limit_s)
    return program


def single_worker_plan(plan: Plan) -> Plan:
    """Returns the plan of one worker, without axes for several processes."""
    plain = {axis: getattr(BASELINE, axis) for axis in axes_dropped_with(plan.parallel, "none")}
    return plan.with_axes(parallel="none", **plain)


def _make_pool(plan: Plan, recipe: RemoteTask, workers: int) -> WorkerPool:
    if plan.workforce == "ray":
        return ActorPool(recipe, single_worker_plan(plan), workers)
    from hotloop.lowering.parameter_server.workers.process_pool import ProcessPool  # a slow import

    return ProcessPool(recipe, single_worker_plan(plan), workers)
