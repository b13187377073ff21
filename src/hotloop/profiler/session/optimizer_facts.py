"""Puts into the facts of a watch what its parts have seen so far."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hotloop.core.float32_switches import read
from hotloop.profiler.autograd.evaluation_pauses import Pauses
from hotloop.profiler.autograd.patterns import Graphs
from hotloop.profiler.autograd.probes import identities_among
from hotloop.profiler.base.step_facts import Facts
from hotloop.profiler.hooks.dataloaders import Loaders
from hotloop.profiler.hooks.forward_calls import Given
from hotloop.profiler.hooks.optimizer_hooks import Optimizers
from hotloop.profiler.hooks.resources import compile_seconds, held_memory
from hotloop.profiler.session.step_sequence import Course


def gathered(
    course: Course, loaders: Loaders, optimizers: Optimizers, graphs: Graphs, pauses: Pauses, *, wait: bool = False
) -> Facts:
    """All facts so far; with `wait`, of steps too that the device hasn't done yet."""
    facts = course.facts
    course.catch_up()
    course.settle(wait=wait)
    facts.loaders, facts.optimizers = loaders.records(), optimizers.records(course.measured())
    facts.seldom = course.seldom.records(optimizers)
    facts.samples_per_step = loaders.samples_per_step()
    apart = pauses.records(facts.steps, course.seldom.steps)  # of all steps, while graphs are those of a few
    known = {habit["what"] for habit in apart}
    facts.habits = [habit for habit in graphs.records() if habit["what"] not in known] + apart
    facts.one_batch = graphs.one_batch
    for observer in reversed(list(course.observers)):  # what operators say of the phases, lines go by
        for field, values in observer.records().items():
            setattr(facts, field, values)
    facts.identities = identities_among(facts.operators)
    facts.threads, facts.peak_memory_bytes = course.cores.record(), held_memory(facts.device, peak=True)
    facts.switches = read()
    facts.compile_s, facts.versions = compile_seconds(), {"torch": torch.__version__}
    return facts


def note_batch(facts: Facts, loaders: Loaders, called: Given) -> None:
    """The first that a network is given is taken for the batch."""
    if not facts.batch:
        facts.batch, loaders.rows = called.shapes, called.rows


def amend_batch(facts: Facts, loaders: Loaders, trained: Sequence[Given]) -> None:
    """The batch is one of those that a backward came back to, once these are known."""
    if trained and facts.batch not in [one.shapes for one in trained]:
        facts.batch = trained[0].shapes
        loaders.rows = trained[0].rows if loaders.rows is not None else None
