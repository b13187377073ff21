"""What earlier races found of a Task, for the run that follows."""

from __future__ import annotations

import hashlib

from hotloop.choosing import lowered, placed
from hotloop.errors import MemoryExhausted, PlanError
from hotloop.kept import best, recall
from hotloop.lowering import Program, lower
from hotloop.lowering.facts import facts_of
from hotloop.lowering.ingredients import Ingredients
from hotloop.lowering.order import making_ready
from hotloop.lowering.telling import During, Say
from hotloop.plan import BASELINE, Plan
from hotloop.records import TaskFacts
from hotloop.rng import preserved
from hotloop.setting import machine_name, speed_versions
from hotloop.task import Task
from hotloop.taskfile import Loaded
from hotloop.verdicts import TRUSTED
from hotloop.wanted import Wanted


def fingerprinted(loaded: Loaded) -> TaskFacts:
    """The Task's facts; their fingerprint depends on its source and on the parameters given to its `task(...)`."""
    known = loaded.record
    digest = "" if known is None else repr((known.digest, sorted(known.parameters.items())))
    with making_ready(BASELINE), preserved():
        return facts_of(Ingredients.of(loaded.task, BASELINE), hashlib.sha256(digest.encode()).hexdigest())


def remembered(loaded: Loaded, wanted: Wanted, say: Say) -> Plan | None:
    """The plan that was found fastest for this Task, machine and versions, and proven; with the axes that were set."""
    if loaded.record is None:  # without its source, a Task can't be told from another of the same shapes
        return None
    facts = fingerprinted(loaded)
    kept, notes = recall(facts.fingerprint, machine_name(), speed_versions())
    for note in notes:
        say(note)
    plan = placed(wanted.plan)
    asked = {*wanted.plan.model_fields_set, "device"}  # what was raced on one device says nothing of another
    fitting = [one for one in kept if all(one.timing.plan.get(axis) == getattr(plan, axis) for axis in asked)]
    found = best(fitting, facts.steps, (*TRUSTED, "reduced-precision") if "precision" in asked else TRUSTED)
    return None if found is None else Plan(**found.timing.plan)


def lowered_by_memory(loaded: Loaded, task: Task, wanted: Wanted, say: Say, during: During | None = None) -> Program:
    """Like `lowered`, but `auto` takes the plan that was remembered, if there is one that still can be lowered."""
    plan = remembered(Loaded(task, loaded.record, loaded.files), wanted, say) if wanted.auto else None
    if plan is not None:
        try:
            program = lower(task, plan, say, during)
        except (PlanError, MemoryExhausted) as error:
            say(f"auto passes over the remembered plan {plan.brief()}: {error.given}")
        else:
            say(f"auto: {plan.brief()}, remembered as the fastest that is proven equal")
            return program
    return lowered(task, wanted, say, during)
