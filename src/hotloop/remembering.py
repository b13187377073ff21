"""What earlier races found of a Task, for the run that follows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from hotloop.choosing import lowered, placed
from hotloop.errors import MemoryExhausted, PlanError
from hotloop.kept import Kept, best, recall
from hotloop.lowering import Program, lower
from hotloop.lowering.facts import facts_of
from hotloop.lowering.ingredients import Ingredients
from hotloop.lowering.order import making_ready
from hotloop.lowering.telling import During, Say
from hotloop.plan import BASELINE, Plan
from hotloop.records import TaskFacts
from hotloop.rng import preserved
from hotloop.setting import machine_name, speed_versions
from hotloop.sources import imported_packages, versions_of
from hotloop.task import Task
from hotloop.taskfile import Loaded
from hotloop.verdicts import TRUSTED
from hotloop.wanted import Wanted


def fingerprinted(loaded: Loaded) -> TaskFacts:
    """The Task's facts; their fingerprint depends on its source, on what that imports, and on parameters of its `task(...)`."""
    known, versions = loaded.record, versions_of(imported_packages(loaded.files))
    digest = "" if known is None else repr((known.digest, sorted(known.parameters.items()), versions))
    with making_ready(BASELINE), preserved():
        return facts_of(Ingredients.of(loaded.task, BASELINE), hashlib.sha256(digest.encode()).hexdigest())


def remembered(loaded: Loaded, wanted: Wanted, say: Say, facts: TaskFacts | None = None) -> Plan | None:
    """The plan that was found fastest for this Task, machine and versions, and proven; with the axes that were set.

    It counts only beside the baseline that this run would have: a plan of many workers may be the fastest of those and
    slower than none.
    """
    if loaded.record is None:
        return None
    facts = facts or fingerprinted(loaded)
    return _fastest(_recalled(loaded, wanted, say, facts), wanted, facts)


def _recalled(loaded: Loaded, wanted: Wanted, say: Say, facts: TaskFacts) -> list[Kept]:
    """What was found of plans that have the axes that were set, beside the baseline that this run would have."""
    if loaded.record is None:  # without its source, a Task can't be told from another of the same shapes
        return []
    kept, notes = recall(facts.fingerprint, machine_name(), speed_versions())
    for note in notes:
        say(note)
    plan = placed(wanted.plan)
    asked = {*wanted.plan.model_fields_set, "device"}  # what was raced on one device says nothing of another
    baseline = Plan(device=plan.device, workers=plan.workers)
    beside = [one for one in kept if Plan(**one.baseline.plan) == baseline]
    return [one for one in beside if all(one.timing.plan.get(axis) == getattr(plan, axis) for axis in asked)]


def _fastest(kept: Sequence[Kept], wanted: Wanted, facts: TaskFacts) -> Plan | None:
    reduced = "precision" in wanted.plan.model_fields_set
    found = best(kept, facts.steps, (*TRUSTED, "reduced-precision") if reduced else TRUSTED)
    return None if found is None else Plan(**found.timing.plan)


def _against(kept: Sequence[Kept]) -> dict[Plan, str]:
    """Plans that something measured speaks against, and what."""
    found = {}
    for timing in (one.timing for one in kept):
        if timing.parity == "broken":
            found[Plan(**timing.plan)] = "it was found broken"
        elif timing.behind:
            found[Plan(**timing.plan)] = "it was found slower than the baseline"
    return found


def lowered_by_memory(
    loaded: Loaded,
    task: Task,
    wanted: Wanted,
    say: Say,
    during: During | None = None,
    facts: TaskFacts | None = None,
) -> Program:
    """Like `lowered`, but `auto` takes the plan that was remembered, if there is one that still can be lowered, and no plan of the
    rules that was found slower than the baseline, or broken.

    Args:
        facts: what `fingerprinted` says, where that is known already: to find it out, a model is built.
    """
    if not wanted.auto:
        return lowered(task, wanted, say, during)
    placed(wanted.plan)  # a device that isn't there shows before a model is built
    loaded = Loaded(task, loaded.record, loaded.files)
    facts = facts or fingerprinted(loaded)
    kept = _recalled(loaded, wanted, say, facts)
    plan = _fastest(kept, wanted, facts)
    if plan is not None:
        try:
            program = lower(task, plan, say, during)
        except (PlanError, MemoryExhausted) as error:
            say(f"auto passes over the remembered plan {plan.brief()}: {error.given}")
        else:
            say(f"auto: {plan.brief()}, remembered as the fastest that is proven equal")
            return program
    return lowered(task, wanted, say, during, facts=facts, against=_against(kept))
