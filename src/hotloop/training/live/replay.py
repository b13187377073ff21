"""`--plan replay:RUN`: a new run with the plans of another run at the same steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hotloop.core.files.run_folder import PlanHistory
from hotloop.core.hardware import limits
from hotloop.core.hardware.machine import result_versions
from hotloop.core.plan_request import AXES_BESIDE_AUTO, PlanRequest
from hotloop.core.records.training import RunRecord
from hotloop.errors import RunError
from hotloop.plan import Plan
from hotloop.training.run import Run
from hotloop.tuning.run_context import RunContext


def with_replayed_plan(context: RunContext) -> RunContext:
    """Returns the context with the first plan of the run to repeat; unchanged without such a run.

    Raises:
        RunError: the run has no switches of its plan, or a damaged journal.
    """
    if context.replay is None:
        return context
    plan = runnable_plan(replayed_history(context.replay).at(0).plan)
    return replace(context, plan=plan, axes={}, is_live=False)


def without_live_request(context: RunContext, path: Path) -> RunContext:
    """Returns the context of a resumed run without `--plan auto` if the run searches already, with the axes that are set."""
    if not context.is_live or not PlanHistory.from_journal((run := Run.open(path)).journal()):
        return context
    asked = PlanRequest.from_value(None, context.axes).plan
    is_same = all(getattr(asked, axis) == getattr(run.plan, axis) for axis in asked.model_fields_set)
    if not is_same or asked.model_fields_set - AXES_BESIDE_AUTO:  # a search may change another axis later
        return context
    return replace(context, plan=None, axes={}, is_live=False)


def runnable_plan(plan: Plan) -> Plan:
    """Returns a plan without an allocator that this machine doesn't have; the results have the same bits."""
    return plan if limits.active_allocator() is not None else plan.with_axes(allocator="default")


def replayed_history(path: Path) -> PlanHistory:
    """Returns the plans of a run by step.

    Raises:
        RunError: as `with_replayed_plan`.
    """
    run = Run.open(path)
    if not (path / "journal.jsonl").is_file():
        raise RunError(f"{path} has no journal.jsonl", expected="the run's journal", fix="restore it from a copy")
    if damages := run._events().damage(path / "journal.jsonl", "its plans can't be repeated"):
        raise RunError(damages[0], expected="the file as hotloop wrote it", fix="restore it from a copy")
    history = PlanHistory.from_journal(run.journal())
    if not history:
        raise RunError(
            f"{path} used one plan throughout",
            expected="a run that changed its plan while it trained",
            fix=f"use its plan: --plan {path / 'plan.toml'}",
        )
    return history


def check_same_task(record: RunRecord, path: Path | None, *, has_schedule: bool) -> list[str]:
    """Returns a line if other versions or settings of torch may change the last bits of the repeated run `path`.

    Args:
        has_schedule: whether the learning rate depends on the number of steps.

    Raises:
        RunError: the new run's Task, data, order or seed aren't those of the run to repeat.
    """
    if path is None:
        return []
    other = Run.open(path).record
    facts, then = record.facts, other.facts
    checks = {
        "Task": ((facts.fingerprint, _parameters(record)), (then.fingerprint, _parameters(other))),
        "data": ((facts.samples, record.reader), (then.samples, other.reader)),
        "order of the data or seed": ((facts.order, _seed(record)), (then.order, _seed(other))),
        "number of steps": (facts.steps, then.steps) if has_schedule else (0, 0),
    }
    if differing := [name for name, (now, before) in checks.items() if now != before]:
        raise RunError(
            f"{path} was trained with another {' and another '.join(differing)}",
            expected="the same Task, data, seed and number of epochs",
            fix="use the command that the run printed at its end",
        )
    changed = [
        f"{name} {other.versions[name]} then, {now} now"
        for name, now in result_versions().items()
        if other.versions.get(name, now) != now
    ]
    changed += ["torch had other float32 settings"] * (record.switches != other.switches)
    return [f"{', '.join(changed)}: the result may differ in its last bits"] if changed else []


def _parameters(record: RunRecord) -> dict[str, object]:
    return {} if record.source is None else dict(record.source.parameters)


def _seed(record: RunRecord) -> object:
    return record.overrides.get("seed")
