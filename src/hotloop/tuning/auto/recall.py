"""What earlier races found of a Task, for the run that follows."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace

from hotloop.core.callback import Callback
from hotloop.core.feasibility.forecast import Foreseen
from hotloop.core.files.source_files import digest_of, imported_packages, sources_elsewhere, versions_of
from hotloop.core.hardware.devices import placed
from hotloop.core.hardware.versions import machine_name, speed_versions
from hotloop.core.plan_request import Wanted
from hotloop.core.random.rng import preserved
from hotloop.core.records.training import TaskFacts
from hotloop.core.reporter import During, Say
from hotloop.errors import MemoryExhausted, PlanError
from hotloop.lowering.build import lower, making_ready
from hotloop.lowering.context import Ingredients
from hotloop.lowering.program import Program
from hotloop.lowering.task_facts import facts_of
from hotloop.plan import BASELINE, Plan
from hotloop.task import Task
from hotloop.task_file import Loaded
from hotloop.tuning.auto.auto import NOTHING_KEPT, foreseen, left_after, lowered
from hotloop.tuning.search.payoff import Memory, accepted
from hotloop.tuning.search.race_cache import Kept, best, in_vain, note_trained, recall, remember, trained


def fingerprinted(loaded: Loaded) -> TaskFacts:
    """The Task's facts; their fingerprint depends on its source, on what that imports, and on parameters of its `task(...)`."""
    with making_ready(BASELINE), preserved():
        parts = Ingredients.of(loaded.task, BASELINE)
        return facts_of(parts, hashlib.sha256(_source(loaded, parts).encode()).hexdigest())


def _source(loaded: Loaded, parts: Ingredients) -> str:
    """What the code of a Task in a file, and of what it imports, is told by; empty for one made in Python."""
    known = loaded.record
    if known is None:
        return ""
    layers = sorted({type(module).__module__ for module in parts.model.modules()})  # a file may import them by a text
    elsewhere = digest_of(sources_elsewhere(loaded.files, layers))
    return repr(
        (known.digest, elsewhere, sorted(known.parameters.items()), versions_of(imported_packages(loaded.files)))
    )


def remembered(loaded: Loaded, wanted: Wanted, say: Say, facts: TaskFacts | None = None) -> Plan | None:
    """The plan that was found fastest for this Task, machine and versions, and proven; with the axes that were set."""
    if loaded.record is None:  # without its source, a Task can't be told from another of the same shapes
        return None
    facts = facts or fingerprinted(loaded)
    return _fastest(_fitting(wanted, _where(wanted, facts), say), wanted, facts)


Where = tuple[str, str, dict[str, str], str]
"""Fingerprint of the Task, machine, versions and device: of which runs something is kept together."""


def _where(wanted: Wanted, facts: TaskFacts) -> Where:
    return facts.fingerprint, machine_name(), speed_versions(), placed(wanted.plan).device


def _fitting(wanted: Wanted, where: Where, say: Say) -> list[Kept]:
    """What was found of plans with the axes that were set.

    It counts only beside the baseline that this run would have: a plan of many workers may be the fastest of those and
    slower than none.
    """
    kept, notes = recall(*where[:3])
    _said(notes, say)
    plan = placed(wanted.plan)
    asked = {*wanted.plan.model_fields_set, "device"}  # what was raced on one device says nothing of another
    baseline = Plan(device=plan.device, workers=plan.workers)
    beside = [one for one in kept if one.baseline.as_plan == baseline]
    return [one for one in beside if all(one.timing.plan.get(axis) == getattr(plan, axis) for axis in asked)]


def _recalled(loaded: Loaded, wanted: Wanted, facts: TaskFacts, say: Say, done: int = 0) -> tuple[list[Kept], Memory]:
    """What is known of the Task, whose run has done so many steps before; nothing of one without its source."""
    if loaded.record is None:
        return [], NOTHING_KEPT
    where = _where(wanted, facts)
    kept = _fitting(wanted, where, say)
    memory = Memory([one.timing for one in kept], lambda verdict: _said(remember(verdict), say))
    if wanted.asked:
        steps = max(0, trained(*where) - done)
        memory = replace(memory, steps=steps, spend=lambda: _said(note_trained(*where, 0), say))
    to_come = 0 if facts.steps is None else memory.to_come(facts.steps)
    allowed = accepted(wanted.plan)
    return kept, replace(memory, in_vain=in_vain(kept, facts.steps, allowed, to_come))


def _fastest(kept: list[Kept], wanted: Wanted, facts: TaskFacts, memory: Memory = NOTHING_KEPT) -> Plan | None:
    to_come = 0 if facts.steps is None else memory.to_come(facts.steps)
    found = best(kept, facts.steps, accepted(wanted.plan), to_come)
    return None if found is None else found.timing.as_plan


def _said(notes: list[str], say: Say) -> None:
    for note in notes:
        say(note)


def known_by(loaded: Loaded, task: Task, wanted: Wanted) -> TaskFacts | None:
    """What runs of the Task are counted by; None where nobody asked for `auto`, and without a file.

    Raises:
        DeviceError: there is no such device here as the plan names.
    """
    if not (wanted.auto and wanted.asked) or loaded.record is None:
        return None
    placed(wanted.plan)  # a device that isn't there shows before a model is built
    return fingerprinted(replace(loaded, task=task))


def remember_steps(facts: TaskFacts | None, wanted: Wanted, steps: int, say: Say) -> None:
    """Counts what a run has done for runs to come; see `known_by`."""
    if facts is not None and steps > 0:
        where = _where(wanted, facts)
        _said(note_trained(*where, trained(*where) + steps), say)


def foreseen_by_memory(loaded: Loaded, wanted: Wanted, say: Say) -> Foreseen:
    """What `lowered_by_memory` will do under `auto`, as far as that is known before it.

    Raises:
        PlanError: the axes that were set can't be run here.
    """
    placed(wanted.plan)
    facts = fingerprinted(loaded)
    kept, memory = _recalled(loaded, wanted, facts, say)
    return foreseen(loaded.task, wanted, facts, memory, _fastest(kept, wanted, facts, memory))


def lowered_by_memory(
    loaded: Loaded,
    task: Task,
    wanted: Wanted,
    say: Say,
    during: During | None = None,
    facts: TaskFacts | None = None,
    done: int = 0,
    until: float = math.inf,
    callbacks: Sequence[Callback] = (),
) -> Program:
    """Like `lowered`, but `auto` takes the plan that was remembered, if there is one that still can be lowered, and none
    that was found slower than the baseline, or broken; what it finds it remembers.

    Args:
        facts: what `fingerprinted` says, where that is known already: to find it out, a model is built.
        done: steps of the run that lie behind.
        until: when the run is to stop, by `time.monotonic()`.
        callbacks: of the run, beside the Task's.
    """
    if not wanted.auto:
        return lowered(task, wanted, say, during, done)
    placed(wanted.plan)  # a device that isn't there shows before a model is built
    loaded = Loaded(task, loaded.record, loaded.files)
    facts = left_after(done, facts or fingerprinted(loaded))
    kept, memory = _recalled(loaded, wanted, facts, say, done)
    plan = _fastest(kept, wanted, facts, memory)
    if plan is not None:
        try:
            program = lower(task, plan, say, during)
        except (PlanError, MemoryExhausted) as error:
            say(f"auto passes over the remembered plan {plan.brief()}: {error.given}")
        else:
            say(f"auto: {plan.brief()}, remembered as the fastest that is proven equal")
            if plan != _fastest(kept, wanted, facts):  # it was compiled again for runs to come
                memory.spend()
            return program
    return lowered(task, wanted, say, during, facts=facts, memory=memory, until=until, callbacks=callbacks)
