"""Starts the workers that a plan asks for."""

from __future__ import annotations

from hotloop.core.reporter import Say
from hotloop.distributed.ray.cluster import check_installed
from hotloop.lowering.parameter_server.scheduler import Crew
from hotloop.lowering.parameter_server.server_program import ServedProgram
from hotloop.lowering.parameter_server.workers.ray_workers import ActorCrew
from hotloop.lowering.parameter_server.workers.worker import Recipe
from hotloop.lowering.program import Program
from hotloop.plan import BASELINE, Plan, left_behind


def employed(program: Program, recipe: Recipe, workers: int, say: Say, limit_s: float | None = None) -> Program:
    """The Program with workers, where its gradients are to come from such; any other stays as it is.

    Args:
        limit_s: see `ServedProgram.employ`.

    Raises:
        TrainingError: a worker ended before it began.
        PlanError: the plan wants Ray, and it isn't installed.
    """
    if isinstance(program, ServedProgram):
        plan = program.parts.plan
        if plan.workforce == "ray":
            check_installed()
        say(f"starting {workers} workers; asynchronous training comes out a little different each time")
        program.employ(_crew(plan, recipe, workers), limit_s)
    return program


def alone(plan: Plan) -> Plan:
    """How one worker computes: the plan without what is about several."""
    plain = {axis: getattr(BASELINE, axis) for axis in left_behind(plan.parallel, "none")}
    return plan.with_axes(parallel="none", **plain)


def _crew(plan: Plan, recipe: Recipe, workers: int) -> Crew:
    if plan.workforce == "ray":
        return ActorCrew(recipe, alone(plan), workers)
    from hotloop.lowering.parameter_server.workers.process_pool import ProcessCrew  # takes a moment to import

    return ProcessCrew(recipe, alone(plan), workers)
